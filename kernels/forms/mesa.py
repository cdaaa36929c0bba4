"""Exact online ridge regression, read two ways: recursive least squares, and the mesa read-out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.forms.decode import decodes, matrix_step
from linattn_cli.kernels.forms.features import check_mask, keep, one_pass
from linattn_cli.kernels.forms.features import feature_map as get_feature_map
from linattn_cli.kernels.forms.scan import delta_scan, linear_scan, penalty_gain
from linattn_cli.kernels.forms.serial import pick, start_state, token_masks
from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.penalty.inverse import REFRESH, inverse, start
from linattn_cli.kernels.types import FormOutput, Impl, PenaltyState, state_dtype
from linattn_cli.kernels.validate import check_form, check_linear, check_penalty

LAMBDA0 = 1.0
"""Default ridge: unit keys, so that the inverse stays well conditioned in float32 over long sequences."""


class RlsState(NamedTuple):
    """S `[B, H, K, V]`, the regression weights; the penalty's mass and inverse."""

    S: Tensor
    penalty: PenaltyState


class MesaState(NamedTuple):
    """S `[B, H, K, V]`, `sum k v^T`; the penalty's mass and inverse."""

    S: Tensor
    penalty: PenaltyState


@dispatch.runs_kernels
def rls(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lambda0: float = LAMBDA0,
    feature_map: str = "silu",
    mask: Tensor | None = None,
    initial_state: RlsState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """Recursive least squares: VLA with u = k and a gain that is not normalised::

        A_t = (lambda0 I + sum_{s<=t} k^_s k^_s^T)^-1
        S_t = S_{t-1} + A_t k^_t (v_t - S_{t-1}^T k^_t)^T;   o_t = S_t^T q^_t

    with `q^ = phi(q) / |phi(q)|` and k^ likewise. S_t is the exact ridge regression of values on keys, so this is
    `mesa` to rounding, through the delta scan instead of the linear one.

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`; mask `[B, T]`, true at real tokens. Dtypes: float64,
    float32, bfloat16, float16; states and gains in float64 for float64 inputs, else float32.

    Raises `ValueError` for shapes, dtypes or options that do not fit.

    Source: recursive least squares; the gain of VLA (arXiv 2605.11196).

    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> rls(q, k, torch.tensor([3.0, 6.0]).view(1, 2, 1, 1), feature_map="identity").o.flatten()
    tensor([1.5000, 3.0000])
    """
    if Impl.parse(impl) is Impl.REFERENCE:
        return rls_serial(q, k, v, lambda0=lambda0, feature_map=feature_map, mask=mask, initial_state=initial_state)
    S, penalty = initial_state or (None, None)
    if initial_state is not None and decodes(impl, ("penalty_gain", "delta_scan"), (v, q, k), mask, initial_state):
        return _step("rls", RlsState, q, k, v, S, penalty, lambda0, feature_map, chunk_size)
    query, key, value = _prepare(q, k, v, feature_map, mask, impl)
    how: dict[str, Any] = {"chunk_size": chunk_size, "impl": impl}
    with torch.autocast(q.device.type, enabled=False):
        gain = penalty_gain(key, key, lambda0=lambda0, initial_state=penalty, **how)
        out = delta_scan(query, key, gain.o, value, initial_state=S, **how)
    return FormOutput(out.o.to(v.dtype), RlsState(out.final_state, gain.final_state), impl=out.impl)


@dispatch.runs_kernels
def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lambda0: float = LAMBDA0,
    feature_map: str = "silu",
    mask: Tensor | None = None,
    initial_state: MesaState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """The mesa layer, solved exactly and without conjugate gradients::

        A_t = (lambda0 I + sum_{s<=t} k^_s k^_s^T)^-1;   S_t = S_{t-1} + k^_t v_t^T
        o_t = S_t^T A_t q^_t

    with `q^ = phi(q) / |phi(q)|` and k^ likewise: `LA(A_t q^_t, k^, v)`, the same numbers as `rls`.

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`; mask `[B, T]`, true at real tokens. Dtypes: float64,
    float32, bfloat16, float16; states and gains in float64 for float64 inputs, else float32.

    Raises `ValueError` for shapes, dtypes or options that do not fit.

    Source: von Oswald et al. 2023 (arXiv 2309.05858), MesaNet 2025 (arXiv 2506.05233), without forgetting.

    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> mesa(q, k, torch.tensor([3.0, 6.0]).view(1, 2, 1, 1), feature_map="identity").o.flatten()
    tensor([1.5000, 3.0000])
    """
    check_form(q, k, v)
    if Impl.parse(impl) is Impl.REFERENCE:
        return mesa_serial(q, k, v, lambda0=lambda0, feature_map=feature_map, mask=mask, initial_state=initial_state)
    S, penalty = initial_state or (None, None)
    if initial_state is not None and decodes(impl, ("penalty_gain", "linear_scan"), (v, q, k), mask, initial_state):
        return _step("mesa", MesaState, q, k, v, S, penalty, lambda0, feature_map, chunk_size)
    if _fused(k, mask, impl):
        from linattn_cli.kernels.mesa_triton import mesa_triton

        check_linear(q, k, v, None, S, chunk_size)
        check_penalty(k, k, lambda0, penalty, None)
        get_feature_map(feature_map)
        options: dict[str, Any] = {"feature_map": feature_map, "lambda0": lambda0, "chunk_size": chunk_size}
        with torch.autocast(q.device.type, enabled=False):
            o, S, penalty = mesa_triton(q, k, v, S=S, state=penalty, **options)
        return FormOutput(o, MesaState(S, penalty), impl="triton")
    query, key, value = _prepare(q, k, v, feature_map, mask, impl)
    how: dict[str, Any] = {"chunk_size": chunk_size, "impl": impl}
    with torch.autocast(q.device.type, enabled=False):
        gain = penalty_gain(key, query, lambda0=lambda0, initial_state=penalty, **how)
        out = linear_scan(gain.o, key, value, initial_state=S, **how)
    return FormOutput(out.o.to(v.dtype), MesaState(out.final_state, gain.final_state), impl=out.impl)


def _fused(k: Tensor, mask: Tensor | None, impl: str | Impl) -> bool:
    """Whether the one fused Triton operator makes the call: no padding, and neither of its parts replaced."""
    replaced = any(dispatch.overridden(operator, "triton") for operator in ("penalty_gain", "linear_scan"))
    return mask is None and not replaced and one_pass(impl, k)


def _step(mixer, kind, q, k, v, S, penalty, lambda0, feature_map, chunk_size) -> FormOutput:
    """One token from a carried state, in one launch."""
    check_linear(q, k, v, None, S, chunk_size)
    check_penalty(k, k, lambda0, penalty, None)
    step = matrix_step(mixer, q, k, v, S, penalty=penalty, lambda0=lambda0, feature_map=feature_map)
    return FormOutput(step.o, kind(step.S, step.penalty), impl="triton")


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str, mask: Tensor | None, impl: str | Impl = Impl.REFERENCE
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit features and values in the state dtype: a gain rounded to half precision is not the inverse's any more."""
    check_linear(q, k, v, None, None, None)
    check_mask(mask, k)
    unit_phi = get_feature_map(feature_map, normalise=True, wide=True, impl=impl)
    return unit_phi(q), keep(unit_phi(k), mask), v.to(state_dtype(v.dtype))


def rls_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lambda0: float = LAMBDA0,
    feature_map: str = "silu",
    mask: Tensor | None = None,
    initial_state: RlsState | None = None,
) -> FormOutput:
    """`rls` one token at a time, by Sherman-Morrison; the oracle."""
    S, penalty = initial_state or (None, None)
    o, S, penalty = _serial(q, k, v, lambda0, feature_map, mask, S, penalty, weights=True)
    return FormOutput(o, RlsState(S, penalty), impl="reference")


def mesa_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lambda0: float = LAMBDA0,
    feature_map: str = "silu",
    mask: Tensor | None = None,
    initial_state: MesaState | None = None,
) -> FormOutput:
    """`mesa` one token at a time, by Sherman-Morrison; the oracle."""
    S, penalty = initial_state or (None, None)
    o, S, penalty = _serial(q, k, v, lambda0, feature_map, mask, S, penalty, weights=False)
    return FormOutput(o, MesaState(S, penalty), impl="reference")


def _serial(q, k, v, lambda0, feature_map, mask, S, penalty, *, weights: bool):
    """`weights`: S holds the regression weights A sum k v^T (rls), else the sum alone (mesa)."""
    query, key, value = _prepare(q, k, v, feature_map, mask)
    S = start_state(S, key, v.shape[3])
    P, A, age = start(key, lambda0, penalty)
    masks = token_masks(mask, k.shape[1])
    outputs = []
    for q_t, k_t, v_t, real in zip(
        queries_time_first(query, k.shape[2]), time_first(key), time_first(value), masks, strict=True
    ):
        if age >= REFRESH:
            A, age = inverse(P, lambda0), 0
        column = k_t.unsqueeze(-1)
        z = A @ column
        A = pick(real, A - z @ z.mT / (1 + column.mT @ z), A)
        P = pick(real, P + column @ column.mT, P)
        age += 1
        if weights:
            S = pick(real, S + (A @ column) @ (v_t.unsqueeze(-2) - column.mT @ S), S)
            outputs.append(q_t @ S)
        else:
            S = pick(real, S + column @ v_t.unsqueeze(-2), S)
            outputs.append(q_t @ A @ S)
    return stack_tokens(outputs, v.dtype), S, PenaltyState(P, A, age)
