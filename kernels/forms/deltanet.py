"""The delta-rule mixers without a penalty: DeltaNet, and the forget-gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn_cli.kernels.dispatch import runs_kernels
from linattn_cli.kernels.forms.decode import decodes, matrix_step
from linattn_cli.kernels.forms.features import check_mask, feature_map, keep, unit
from linattn_cli.kernels.forms.scan import delta_scan
from linattn_cli.kernels.forms.serial import pick, start_state, token_masks
from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.types import FormOutput, Impl, state_dtype
from linattn_cli.kernels.validate import check_form, check_linear, check_log_decay, check_shape


class DeltaState(NamedTuple):
    """S `[B, H, K, V]`."""

    S: Tensor


@runs_kernels
def deltanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    mask: Tensor | None = None,
    initial_state: DeltaState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """The delta rule with a write strength, on unit SiLU features::

        q^ = silu(q) / |silu(q)|;   k^ = silu(k) / |silu(k)|
        S_t = S_{t-1} + beta_t k^_t (v_t - S_{t-1}^T k^_t)^T;   o_t = S_t^T q^_t

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`, beta `[B, T, H]` in (0, 1); mask `[B, T]`,
    true at real tokens. Raises `ValueError` for shapes, dtypes or options that do not fit.

    Source: Yang et al. 2024 (arXiv 2406.06484).
    """
    check_form(q, k, v, beta=beta)
    if Impl.parse(impl) is Impl.REFERENCE:
        return deltanet_serial(q, k, v, beta, mask=mask, initial_state=initial_state)
    check_mask(mask, k)
    if initial_state is not None and decodes(impl, ("delta_scan",), (v, q, k, beta), mask, initial_state):
        return _delta_step("deltanet", q, k, v, beta, None, "silu", initial_state)
    unit_silu = feature_map("silu", normalise=True, impl=impl)
    key = keep(unit_silu(k), mask)
    write = (key * beta.unsqueeze(-1)).to(key.dtype)
    return _delta_form(unit_silu(q), key, write, v, None, initial_state, chunk_size, impl)


def deltanet_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    mask: Tensor | None = None,
    initial_state: DeltaState | None = None,
) -> FormOutput:
    """`deltanet` one token at a time; the oracle."""
    check_shape("beta", beta, "BTH", k.shape[:3])
    return _delta_serial("silu", q, k, v, beta, None, mask, initial_state)


@runs_kernels
def decay_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    feature_map: str = "elu1",
    mask: Tensor | None = None,
    initial_state: DeltaState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """The delta rule with a scalar forget gate, what the VLA paper compares with as "DeltaNet"::

        q^ = phi(q) / |phi(q)|;   k^ = phi(k) / |phi(k)|;   g_t = exp(log_decay_t)
        S_t = g_t S_{t-1} + k^_t (v_t - S_{t-1}^T k^_t)^T;   o_t = S_t^T q^_t

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`, log_decay `[B, T, H]`, natural log, <= 0; mask
    `[B, T]`, true at real tokens. Raises `ValueError` for shapes, dtypes or options that do not fit.

    Source: VLA (arXiv 2605.11196), the baseline of its experiments.
    """
    check_form(q, k, v)
    if Impl.parse(impl) is Impl.REFERENCE:
        return decay_delta_serial(q, k, v, log_decay, feature_map=feature_map, mask=mask, initial_state=initial_state)
    check_mask(mask, k)
    check_log_decay(log_decay, k, k.shape[2])
    if initial_state is not None and decodes(impl, ("delta_scan",), (v, q, k, log_decay), mask, initial_state):
        return _delta_step("decay_delta", q, k, v, None, log_decay, feature_map, initial_state)
    unit_phi = _phi(feature_map, normalise=True, impl=impl)
    key = keep(unit_phi(k), mask)
    return _delta_form(unit_phi(q), key, key, v, keep(log_decay, mask), initial_state, chunk_size, impl)


_phi = feature_map


def decay_delta_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    feature_map: str = "elu1",
    mask: Tensor | None = None,
    initial_state: DeltaState | None = None,
) -> FormOutput:
    """`decay_delta` one token at a time; the oracle."""
    check_log_decay(log_decay, k, k.shape[2])
    return _delta_serial(feature_map, q, k, v, None, log_decay, mask, initial_state)


def _delta_step(mixer, q, k, v, beta, log_decay, phi_name, state: DeltaState) -> FormOutput:
    """One token from a carried state, in one launch."""
    check_linear(q, k, v, None, state.S, None)
    step = matrix_step(mixer, q, k, v, state.S, beta=beta, log_decay=log_decay, feature_map=phi_name)
    return FormOutput(step.o, DeltaState(step.S), impl="triton")


def _delta_form(q, p, a, v, log_decay, initial_state, chunk_size, impl) -> FormOutput:
    scan = delta_scan(
        q,
        p,
        a,
        v,
        log_decay=log_decay,
        initial_state=None if initial_state is None else initial_state.S,
        chunk_size=chunk_size,
        impl=impl,
    )
    return FormOutput(scan.o, DeltaState(scan.final_state), impl=scan.impl)


def _delta_serial(phi_name, q, k, v, beta, log_decay, mask, initial_state) -> FormOutput:
    check_linear(q, k, v, None, None, None)
    check_mask(mask, k)
    phi = _phi(phi_name)
    S = start_state(None if initial_state is None else initial_state.S, k, v.shape[3])
    masks = token_masks(mask, k.shape[1])
    dtype = state_dtype(k.dtype)
    outputs = []
    for t, (q_t, k_t, v_t) in enumerate(
        zip(queries_time_first(q, k.shape[2]), time_first(k), time_first(v), strict=True)
    ):
        key = unit(phi(k_t))
        error = v_t - (key.unsqueeze(-2) @ S).squeeze(-2)
        if beta is not None:
            error = error * beta[:, t].to(dtype).unsqueeze(-1)
        kept = S if log_decay is None else log_decay[:, t].to(dtype).exp()[..., None, None] * S
        S = pick(masks[t], kept + key.unsqueeze(-1) * error.unsqueeze(-2), S)
        outputs.append(unit(phi(q_t)) @ S)
    return FormOutput(stack_tokens(outputs, v.dtype), DeltaState(S), impl="reference")
