"""Every user error of the operators is raised here: what, got, expected, and the fix."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from linattn_cli.kernels.registry import MAX_HEAD_DIM
from linattn_cli.kernels.types import PenaltyState, state_dtype

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _shape_error(name: str, tensor: Tensor, letters: str, expected: tuple[int, ...]) -> ValueError:
    got = list(tensor.shape)
    message = f"{name} must have shape [{', '.join(letters)}] = {list(expected)}, got {got}"
    swapped = list(expected)
    if len(swapped) >= 3:
        swapped[1], swapped[2] = swapped[2], swapped[1]
    if got == swapped and got != list(expected):
        message += "; this looks head-first, transpose dims 1 and 2"
    elif len(got) == len(expected) + 1 and got[-1] == 1 and got[:-1] == list(expected):
        message += f"; it has a trailing dimension of 1, pass {name}.squeeze(-1)"
    elif got[0:1] != list(expected[0:1]) and len(got) == len(expected):
        message += "; the batch sizes differ, expand or slice the tensors to one batch"
    else:
        message += "; reshape it so"
    return ValueError(message)


def check_shape(name: str, tensor: Tensor, letters: str, expected: tuple[int, ...]) -> None:
    """Raise unless `tensor` has exactly the expected shape; `letters` names its dimensions."""
    if tuple(tensor.shape) != tuple(expected):
        raise _shape_error(name, tensor, letters, expected)


def check_tensor(name: str, tensor: object, letters: str) -> None:
    """Raise unless `tensor` is a real tensor of a supported dtype with one dimension per letter."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with torch.as_tensor")
    if tensor.dim() != len(letters):
        raise ValueError(
            f"{name} must have {len(letters)} dimensions [{', '.join(letters)}], got {tensor.dim()} "
            f"with shape {list(tensor.shape)}; add or remove dimensions"
        )
    if tensor.dtype not in _DTYPES:
        names = ", ".join(_name(dtype) for dtype in _DTYPES)
        raise ValueError(f"{name} must have dtype {names}, got {_name(tensor.dtype)}; convert it")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_same(tensors: Mapping[str, Tensor]) -> None:
    """Raise unless all tensors share one dtype and one device."""
    names = list(tensors)
    first = tensors[names[0]]
    for name in names[1:]:
        if tensors[name].dtype != first.dtype:
            raise ValueError(
                f"{name} must have the dtype of {names[0]}, {first.dtype}, got {tensors[name].dtype}; "
                f"convert it with {name}.to({names[0]}.dtype)"
            )
        check_device(name, tensors[name], names[0], first)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name}, {other.device}, got {tensor.device}; "
            f"move it with {name}.to({other_name}.device)"
        )


def check_head_dims(**dims: int) -> None:
    for name, size in dims.items():
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must be between 1 and {MAX_HEAD_DIM}, got {size}; use more heads of a smaller dimension"
            )


def check_groups(query_name: str, query_heads: int, heads: int) -> None:
    if heads < 1 or query_heads % heads:
        raise ValueError(
            f"{query_name} must have a multiple of the key/value heads, {heads}, got {query_heads} heads; "
            f"use {max(1, query_heads // max(heads, 1)) * heads} query heads"
        )


def check_tokens(name: str, tensor: Tensor) -> None:
    if tensor.shape[1] < 1:
        raise ValueError(f"{name} must hold at least one token, got shape {list(tensor.shape)}; skip the call")


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is None:
        return
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive int or None, got {chunk_size!r}; None chooses it from T")


def check_log_decay(log_decay: Tensor | None, like: Tensor, heads: int) -> None:
    """A natural-log decay `[B, T, H]`; values above 0 are refused where looking is free (on the CPU)."""
    if log_decay is None:
        return
    check_tensor("log_decay", log_decay, "BTH")
    check_shape("log_decay", log_decay, "BTH", (like.shape[0], like.shape[1], heads))
    check_device("log_decay", log_decay, "k", like)
    if log_decay.device.type == "cpu" and not torch.compiler.is_compiling():
        largest = log_decay.detach().max().item()
        if not largest <= 0:
            raise ValueError(
                f"log_decay must be <= 0 everywhere (natural log of a decay in (0, 1]), got a maximum of "
                f"{largest:.4g}; pass decay.log(), or -softplus(x)"
            )


def check_initial_state(
    state: Tensor | None, shape: tuple[int, ...], like: Tensor, name: str = "initial_state"
) -> None:
    """A carried state `[B, H, K, V]` in the state dtype of `like`."""
    if state is None:
        return
    check_tensor(name, state, "BHKV"[: len(shape)])
    check_shape(name, state, "BHKV"[: len(shape)], shape)
    check_device(name, state, "k", like)
    wanted = state_dtype(like.dtype)
    if state.dtype != wanted:
        raise ValueError(
            f"{name} must be {_name(wanted)} for {_name(like.dtype)} inputs, got {_name(state.dtype)}; "
            "states are never kept in half precision, use the one returned"
        )


def check_form(q: Tensor, k: Tensor, v: Tensor, *, u: Tensor | None = None, beta: Tensor | None = None) -> None:
    """That the arguments of a form are tensors it can put through its features; their shapes are checked by its scans.

    A write strength `beta` never reaches a scan under its own name, so all of it is checked here.
    """
    tensors = {"q": q, "k": k, "v": v} | ({} if u is None else {"u": u})
    for name, tensor in tensors.items():
        check_tensor(name, tensor, "BTHD")
    for name, tensor in tensors.items():
        check_device(name, tensor, "k", k)
    if beta is not None:
        check_tensor("beta", beta, "BTH")
        check_shape("beta", beta, "BTH", tuple(k.shape[:3]))
        check_device("beta", beta, "k", k)


def check_linear(q: Tensor, k: Tensor, v: Tensor, log_decay, initial_state, chunk_size) -> None:
    """The contract of `linear_scan`."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, "BTHD")
    check_same({"k": k, "q": q, "v": v})
    batch, tokens, heads, key_dim = k.shape
    check_tokens("k", k)
    check_shape("v", v, "BTHV", (batch, tokens, heads, v.shape[3]))
    check_query("q", q, k)
    check_head_dims(K=key_dim, V=v.shape[3])
    check_log_decay(log_decay, k, heads)
    check_initial_state(initial_state, (batch, heads, key_dim, v.shape[3]), k)
    check_chunk_size(chunk_size)


def check_query(name: str, q: Tensor, k: Tensor) -> None:
    """Queries `[B, T, Q, K]` against keys `[B, T, H, K]`."""
    batch, tokens, heads, key_dim = k.shape
    if q.shape[0] != batch or q.shape[1] != tokens or q.shape[3] != key_dim:
        raise _shape_error(name, q, "BTQK", (batch, tokens, q.shape[2] if q.shape[1] == tokens else heads, key_dim))
    check_groups(name, q.shape[2], heads)


def check_delta(q: Tensor, p: Tensor, a: Tensor, v: Tensor, log_decay, initial_state, chunk_size) -> None:
    """The contract of `delta_scan`."""
    for name, tensor in (("q", q), ("p", p), ("a", a), ("v", v)):
        check_tensor(name, tensor, "BTHD")
    check_same({"p": p, "q": q, "a": a, "v": v})
    batch, tokens, heads, key_dim = p.shape
    check_tokens("p", p)
    check_shape("a", a, "BTHK", (batch, tokens, heads, key_dim))
    check_shape("v", v, "BTHV", (batch, tokens, heads, v.shape[3]))
    check_query("q", q, p)
    check_head_dims(K=key_dim, V=v.shape[3])
    check_log_decay(log_decay, p, heads)
    check_initial_state(initial_state, (batch, heads, key_dim, v.shape[3]), p)
    check_chunk_size(chunk_size)


def check_penalty(u: Tensor, k: Tensor, lambda0: float, initial_state: PenaltyState | None, chunk_size) -> None:
    """The contract of `penalty_gain`."""
    for name, tensor in (("u", u), ("k", k)):
        check_tensor(name, tensor, "BTHK")
    check_same({"u": u, "k": k})
    check_tokens("u", u)
    batch, _, heads, key_dim = u.shape
    check_query("k", k, u)
    check_head_dims(K=key_dim)
    if isinstance(lambda0, bool) or not isinstance(lambda0, (int, float)) or not math.isfinite(lambda0) or lambda0 <= 0:
        raise ValueError(f"lambda0 must be a finite float > 0, got {lambda0!r}; the VLA paper's code uses 0.1")
    if initial_state is not None:
        if not isinstance(initial_state, PenaltyState):
            raise ValueError(
                f"initial_state must be a PenaltyState(mass, inverse, age), got {type(initial_state).__name__}; "
                "pass the final_state of an earlier call"
            )
        shape = (batch, heads, key_dim, key_dim)
        check_initial_state(initial_state.mass, shape, u, "initial_state.mass")
        check_initial_state(initial_state.inverse, shape, u, "initial_state.inverse")
    check_chunk_size(chunk_size)
