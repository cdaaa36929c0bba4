"""What the higher-order forms share: options, grouped heads, the column of ones, and the clamped ratio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.forms.features import check_choice, check_mask, keep
from linattn_cli.kernels.forms.features import feature_map as get_feature_map
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.registry import MAX_HEAD_DIM
from linattn_cli.kernels.types import Impl, state_dtype
from linattn_cli.kernels.validate import check_device, check_linear, check_shape

EPS = 1e-6
"""Smallest size of a denominator, as in the HLA paper; a smaller one is clamped, keeping its sign."""

READOUTS = ("raw", "ratio")


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    decay: str,
    readout: str,
    mask: Tensor | None,
    chunk_size: int | None,
) -> None:
    """Shapes, dtypes and options that all forms share; a decay is given exactly when its option asks for one."""
    check_choice("readout", readout, READOUTS)
    check_linear(q, k, v, log_decay, None, chunk_size)
    check_mask(mask, k)
    if decay == "none" and log_decay is not None:
        raise ValueError("log_decay was given but decay='none'; name the decay, or leave log_decay out")
    if decay != "none" and log_decay is None:
        raise ValueError(f"decay={decay!r} needs log_decay [B, T, H]; pass it, or use decay='none'")


def check_state(state: Any, kind: type, shapes: dict[str, tuple[int, ...]], like: Tensor) -> None:
    """A carried state must be of this form's kind, with these shapes (empty: the field is None)."""
    if state is None:
        return
    if not isinstance(state, kind):
        raise ValueError(
            f"initial_state must be a {kind.__name__}, got {type(state).__name__}; "
            "pass the state of an earlier call with the same options"
        )
    for name, shape in shapes.items():
        value = getattr(state, name)
        if (value is None) != (not shape):
            wanted = f"a tensor {list(shape)}" if shape else "None"
            raise ValueError(
                f"initial_state.{name} must be {wanted} here; pass the state of an earlier call with the same options"
            )
        if value is None:
            continue
        check_shape(f"initial_state.{name}", value, "BHKV"[: len(shape)], shape)
        check_device(f"initial_state.{name}", value, "k", like)
        if value.dtype != state_dtype(like.dtype):
            raise ValueError(
                f"initial_state.{name} must be {state_dtype(like.dtype)}, got {value.dtype}; "
                "states are never kept in half precision, use the one returned"
            )


def resolved_impl(impl: str | Impl, like: Tensor) -> str:
    """The name recorded for a form: reference and scan are its own, the others those of its primitives."""
    wanted = Impl.parse(impl)
    if wanted in (Impl.REFERENCE, Impl.SCAN):
        return wanted.value
    return dispatch.resolve("linear_scan", wanted, like)


@overload
def per_query(x: Tensor, query_heads: int) -> Tensor: ...
@overload
def per_query(x: Tensor | None, query_heads: int) -> Tensor | None: ...
def per_query(x: Tensor | None, query_heads: int) -> Tensor | None:
    """`[B, T, H, ...]` -> `[B, T, Q, ...]`: each key/value head repeated for its group of query heads."""
    if x is None or x.shape[2] == query_heads:
        return x
    return x.repeat_interleave(query_heads // x.shape[2], dim=2)


def with_ones(v: Tensor, readout: str) -> Tensor:
    """v, with a column of ones when a ratio needs its denominator: the same sums with v = 1."""
    return v if readout == "raw" else torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1)


def scan_dtype(v: Tensor, impl: str, readout: str) -> torch.dtype:
    """The dtype of what the scans of a nested form take and hand on: bfloat16 where it loses nothing that counts.

    A scan of bfloat16 keeps sums and state in float32 and rounds what it multiplies, which is a tenth of what the
    output's own rounding allows (benchmarks/nested_precision.py). Not so where a difference or a quotient of two
    such sums follows, and not in float16, whose range the inner sums leave.
    """
    if impl == "triton" and v.dtype == torch.bfloat16 and readout == "raw":
        return torch.bfloat16
    return state_dtype(v.dtype)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    feature_map: str,
    readout: str,
    mask: Tensor | None,
    impl: str,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Features of q and k, v with its column of ones, all in `dtype`, by default the state's, and log-decays in that.

    A padded token has no query, no key and no decay, so it adds to no moment and to no denominator.
    """
    phi, dtype = get_feature_map(feature_map, impl=impl), dtype or state_dtype(v.dtype)
    log = None if log_decay is None else keep(log_decay.to(state_dtype(v.dtype)), mask)
    return keep(phi(q.to(dtype)), mask), keep(phi(k.to(dtype)), mask), with_ones(v.to(dtype), readout), log


def decays(log: Tensor | None, tokens: int) -> Sequence[Tensor | float]:
    """`[B, T, H]` -> T factors `[B, H, 1, 1, 1]`, or T times 1."""
    return [1.0] * tokens if log is None else log.exp()[..., None, None, None].unbind(1)


def join_mass(matrix: Tensor, mass: Tensor | None) -> Tensor:
    """A state `[..., K, V]` and its denominator `[..., K]` as one `[..., K, V + 1]`."""
    return matrix if mass is None else torch.cat((matrix, mass.unsqueeze(-1)), dim=-1)


def split_mass(matrix: Tensor, readout: str) -> tuple[Tensor, Tensor | None]:
    """The inverse of `join_mass`."""
    return (matrix, None) if readout == "raw" else (matrix[..., :-1], matrix[..., -1])


def finish(
    o: Tensor, readout: str, eps: float, dtype: torch.dtype, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The output, and how many denominators of real tokens were clamped.

    A denominator within eps of zero becomes +eps or -eps by its own sign (0 counts as positive), so that it
    never changes the sign of an output.

    >>> finish(torch.tensor([[6.0, -2.0], [1.0, -0.25]]), "ratio", 0.5, torch.float32)
    (tensor([[-3.],
            [-2.]]), tensor(1))
    """
    if readout == "raw":
        return o.to(dtype), None
    numerator, denominator = o[..., :-1], o[..., -1:]
    clamped = denominator.abs() < eps
    signed = eps * torch.where(denominator < 0, -1, 1).to(o.dtype)
    return (numerator / torch.where(clamped, signed, denominator)).to(dtype), keep(clamped, mask).sum()


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    exclusive: bool = False,
    chunk_size: int | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """`linear_scan`, in as many calls as a v wider than one head dimension needs."""
    outputs, states = [], []
    for start in range(0, v.shape[-1], MAX_HEAD_DIM):
        columns = slice(start, start + MAX_HEAD_DIM)
        out = linear_scan(
            q,
            k,
            v[..., columns],
            log_decay=log_decay,
            initial_state=None if initial_state is None else initial_state[..., columns],
            exclusive=exclusive,
            chunk_size=chunk_size,
            impl=impl,
        )
        outputs.append(out.o)
        states.append(out.final_state)
    if len(outputs) == 1:
        return outputs[0], states[0]
    return torch.cat(outputs, dim=-1), torch.cat(states, dim=-1)


@overload
def grouped(x: Tensor, heads: int) -> Tensor: ...
@overload
def grouped(x: Tensor | None, heads: int) -> Tensor | None: ...
def grouped(x: Tensor | None, heads: int) -> Tensor | None:
    """`[B, T, Q, ...]` -> `[B, T, H, G, ...]`; a tensor of H heads gets a group of 1 and broadcasts."""
    return None if x is None else x.unflatten(2, (heads, x.shape[2] // heads))


def ungrouped(x: Tensor) -> Tensor:
    """`[B, 1, H, G, ...]`, a segment's field, -> `[B, Q, ...]`, a state's."""
    return x.squeeze(1).flatten(1, 2)


def as_segment(x: Tensor, heads: int) -> Tensor:
    """`[B, Q, ...]` -> `[B, 1, H, G, ...]`."""
    return x.unflatten(1, (heads, x.shape[1] // heads)).unsqueeze(1)
