"""Causal softmax attention as a form: torch's fused SDPA, with a key/value cache as its state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.forms.features import check_mask, repeat_heads
from linattn_cli.kernels.types import FormOutput, Impl, state_dtype
from linattn_cli.kernels.validate import check_linear


class SoftmaxState(NamedTuple):
    """The cache: keys `[B, S, H, K]`, values `[B, S, H, V]`, mask `[B, S]`, true at real tokens."""

    k: Tensor
    v: Tensor
    mask: Tensor


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    initial_state: SoftmaxState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """Causal softmax attention, the baseline of every comparison::

        o_t = sum_{s<=t} w_ts v_s,   w_t = softmax_s(q_t . k_s / sqrt(K))

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`; mask `[B, T]`, true at real tokens. The state
    is the cache of all keys and values, so it grows with T. `impl` `auto` and `chunk` are torch's SDPA, which
    tiles the softmax itself; `chunk_size` has no effect on it.

    Source: Vaswani et al. 2017.
    """
    wanted = Impl.parse(impl)
    if wanted is Impl.REFERENCE:
        return softmax_serial(q, k, v, mask=mask, initial_state=initial_state)
    if wanted in (Impl.SCAN, Impl.TRITON):
        raise ValueError(f"softmax has no impl {wanted.value!r}; use auto or chunk (torch SDPA), or reference")
    check_linear(q, k, v, None, None, chunk_size)
    check_mask(mask, k)
    state = _extend(initial_state, k, v, mask)
    past = 0 if initial_state is None else initial_state.k.shape[1]
    attention = None if past == 0 and mask is None else _allowed(state.mask, past)
    o = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        state.k.transpose(1, 2),
        state.v.transpose(1, 2),
        attn_mask=attention,
        is_causal=attention is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return FormOutput(o.transpose(1, 2), state, impl="chunk")


def softmax_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    initial_state: SoftmaxState | None = None,
) -> FormOutput:
    """`softmax` one token at a time, in the state dtype; the oracle."""
    check_linear(q, k, v, None, None, None)
    check_mask(mask, k)
    dtype = state_dtype(q.dtype)
    state = _extend(initial_state, k, v, mask)
    keys, values = (repeat_heads(x.to(dtype), q.shape[2]) for x in (state.k, state.v))
    past = state.k.shape[1] - k.shape[1]
    outputs = []
    for t in range(q.shape[1]):
        seen = past + t + 1
        scores = torch.einsum("bqk,bsqk->bqs", q[:, t].to(dtype), keys[:, :seen]) / q.shape[-1] ** 0.5
        valid = state.mask[:, :seen].clone()
        valid[:, -1] = True  # a padded token sees itself, so that no row of the softmax is empty
        weights = scores.masked_fill(~valid.unsqueeze(1), float("-inf")).softmax(-1)
        outputs.append(torch.einsum("bqs,bsqv->bqv", weights, values[:, :seen]))
    return FormOutput(torch.stack(outputs, dim=1).to(v.dtype), state, impl="reference")


def _extend(state: SoftmaxState | None, k: Tensor, v: Tensor, mask: Tensor | None) -> SoftmaxState:
    if mask is None:
        mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if state is None:
        return SoftmaxState(k, v, mask)
    return SoftmaxState(torch.cat((state.k, k), 1), torch.cat((state.v, v), 1), torch.cat((state.mask, mask), 1))


def _allowed(mask: Tensor, past: int) -> Tensor:
    """`[B, 1, T, S]`: which cached tokens each new token may read; every token reads itself."""
    total = mask.shape[1]
    query = torch.arange(past, total, device=mask.device).unsqueeze(1)
    token = torch.arange(total, device=mask.device)
    allowed = (token <= query) & mask.unsqueeze(1) | (token == query)
    return allowed.unsqueeze(1)
