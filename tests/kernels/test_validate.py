"""Every user error of the operators has its message: what, got, expected, and the fix."""

from __future__ import annotations

import pytest
import torch

from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.penalty import penalty_gain
from linattn_cli.kernels.types import Impl, PenaltyState

B, T, H, K, V = 2, 8, 4, 6, 5


def x(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def linear(q=None, k=None, v=None, **options):
    q = x(B, T, H, K) if q is None else q
    k = x(B, T, H, K) if k is None else k
    v = x(B, T, H, V) if v is None else v
    return linear_scan(q, k, v, **options)


def delta(p=None, a=None, **options):
    p = x(B, T, H, K) if p is None else p
    a = x(B, T, H, K) if a is None else a
    return delta_scan(x(B, T, H, K), p, a, x(B, T, H, V), **options)


def gain(u=None, k=None, lambda0=0.1, **options):
    u = x(B, T, H, K) if u is None else u
    k = x(B, T, H, K) if k is None else k
    return penalty_gain(u, k, lambda0=lambda0, **options)


def state(dtype=torch.float32, heads=H):
    return x(B, heads, K, V, dtype=dtype)


ERRORS = [
    (lambda: linear(q=[1.0]), "q must be a torch.Tensor, got list; convert it with torch.as_tensor"),
    (lambda: linear(q=x(B, T, K)), "q must have 4 dimensions [B, T, H, D], got 3 with shape [2, 8, 6]"),
    (lambda: linear(k=x(B, T, H, K, dtype=torch.int64)), "k must have dtype float64, float32, bfloat16, float16"),
    (
        lambda: linear(q=x(B, T, H, K, dtype=torch.bfloat16)),
        "q must have the dtype of k, torch.float32, got torch.bfloat16; convert it with q.to(k.dtype)",
    ),
    (
        lambda: linear(v=torch.zeros(B, T, H, V, device="meta")),
        "v must be on the device of k, cpu, got meta; move it with v.to(k.device)",
    ),
    (lambda: linear(v=x(B, H, T, V)), "v must have shape [B, T, H, V] = [2, 8, 4, 5], got [2, 4, 8, 5]; this looks "),
    (lambda: linear(q=x(B, T, 6, K)), "q must have a multiple of the key/value heads, 4, got 6 heads; use 4 query"),
    (lambda: linear(q=x(B, T, H, 7)), "q must have shape [B, T, Q, K] = [2, 8, 4, 6], got [2, 8, 4, 7]"),
    (lambda: linear(q=x(B, H, T, K)), "q must have shape [B, T, Q, K] = [2, 8, 4, 6], got [2, 4, 8, 6]; this looks "),
    (
        lambda: linear(q=x(3, T, H, K)),
        "q must have shape [B, T, Q, K] = [2, 8, 4, 6], got [3, 8, 4, 6]; the batch sizes differ",
    ),
    (
        lambda: linear(q=x(B, 0, H, K), k=x(B, 0, H, K), v=x(B, 0, H, V)),
        "k must hold at least one token, got shape [2, 0, 4, 6]",
    ),
    (
        lambda: linear(q=x(B, T, H, 257), k=x(B, T, H, 257)),
        "K must be between 1 and 256, got 257; use more heads of a smaller dimension",
    ),
    (
        lambda: linear(log_decay=x(B, H, T)),
        "log_decay must have shape [B, T, H] = [2, 8, 4], got [2, 4, 8]; this looks head-first, transpose dims 1 and 2",
    ),
    (lambda: linear(log_decay=x(B, T, H, 1)), "log_decay must have 3 dimensions [B, T, H], got 4"),
    (
        lambda: linear(log_decay=x(B, T, H) + 0.5),
        "log_decay must be <= 0 everywhere (natural log of a decay in (0, 1]), got a maximum of 0.5; pass decay.log()",
    ),
    (lambda: linear(log_decay=x(B, T, H) * float("nan")), "log_decay must be <= 0 everywhere"),
    (lambda: linear(initial_state=x(B, H, K)), "initial_state must have 4 dimensions [B, H, K, V], got 3"),
    (
        lambda: linear(initial_state=x(B, H, V, K)),
        "initial_state must have shape [B, H, K, V] = [2, 4, 6, 5], got [2, 4, 5, 6]",
    ),
    (
        lambda: linear(initial_state=state(torch.bfloat16)),
        "initial_state must be float32 for float32 inputs, got bfloat16; states are never kept in half precision",
    ),
    (lambda: linear(chunk_size=0), "chunk_size must be a positive int or None, got 0; None chooses it from T"),
    (lambda: linear(chunk_size=1.5), "chunk_size must be a positive int or None, got 1.5"),
    (lambda: linear(impl="fast"), "impl must be one of auto, reference, scan, chunk, triton; got 'fast'"),
    (lambda: linear(impl="scan"), "linear_scan has no impl 'scan'; forms have it"),
    (lambda: linear(impl="triton"), "impl='triton' was asked for but"),
    (lambda: delta(a=x(B, T, H, V)), "a must have shape [B, T, H, K] = [2, 8, 4, 6], got [2, 8, 4, 5]"),
    (lambda: delta(p=x(B, T, 2, K)), "a must have shape [B, T, H, K] = [2, 8, 2, 6], got [2, 8, 4, 6]"),
    (lambda: delta(log_decay=x(B, T, 2)), "log_decay must have shape [B, T, H] = [2, 8, 4], got [2, 8, 2]"),
    (lambda: delta(initial_state=state(heads=2)), "initial_state must have shape [B, H, K, V] = [2, 4, 6, 5], got"),
    (lambda: gain(lambda0=0.0), "lambda0 must be a finite float > 0, got 0.0"),
    (lambda: gain(lambda0=float("nan")), "lambda0 must be a finite float > 0, got nan"),
    (lambda: gain(lambda0=True), "lambda0 must be a finite float > 0, got True"),
    (lambda: gain(k=x(B, T, 3, K)), "k must have a multiple of the key/value heads, 4, got 3 heads"),
    (lambda: gain(initial_state=state()), "initial_state must be a PenaltyState(mass, inverse, age), got Tensor"),
    (
        lambda: gain(initial_state=PenaltyState(x(B, H, K, V), x(B, H, K, K))),
        "initial_state.mass must have shape [B, H, K, V] = [2, 4, 6, 6], got [2, 4, 6, 5]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("action", "message"), ERRORS, ids=[m[:40] for _, m in ERRORS])
def test_message(action, message):
    with pytest.raises(ValueError, match=r".") as caught:
        action()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_every_call_of_the_table_is_otherwise_right():
    for action in (linear, delta, gain):
        action()


def test_impl_accepts_its_own_members():
    assert Impl.parse(Impl.CHUNK) is Impl.CHUNK
