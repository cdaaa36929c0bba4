"""Kernelised linear attention as a form of its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.forms.decode import decodes, matrix_step
from linattn_cli.kernels.forms.features import (
    RATIO_EPS,
    check_choice,
    check_mask,
    feature_map,
    keep,
    one_pass,
    ratio_readout,
)
from linattn_cli.kernels.forms.scan import linear_scan
from linattn_cli.kernels.forms.serial import pick, start_state, token_masks
from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.types import FormOutput, Impl
from linattn_cli.kernels.validate import check_form, check_linear, check_shape


class LinearState(NamedTuple):
    """S `[B, H, K, V]` and, for the ratio read-out, `z = sum phi(k)`, `[B, H, K]`."""

    S: Tensor
    z: Tensor | None


@dispatch.runs_kernels
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "elu1",
    readout: str = "ratio",
    mask: Tensor | None = None,
    initial_state: LinearState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """Linear attention with a feature map phi::

        S_t = S_{t-1} + phi(k_t) v_t^T;   z_t = z_{t-1} + phi(k_t)
        o_t = S_t^T phi(q_t) / max(phi(q_t) . z_t, 1e-4)        (readout raw: not divided)

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`; mask `[B, T]`, true at real tokens.
    Raises `ValueError` for shapes, dtypes or options that do not fit.

    Source: Katharopoulos et al. 2020.
    """
    check_choice("readout", readout, ("ratio", "raw"))
    check_form(q, k, v)
    if Impl.parse(impl) is Impl.REFERENCE:
        return linear_attention_serial(
            q, k, v, feature_map=feature_map, readout=readout, mask=mask, initial_state=initial_state
        )
    check_mask(mask, k)
    phi = _phi(feature_map, impl=impl)
    S, z = initial_state or (None, None)
    whole = (z is None) == (readout == "raw")
    if S is not None and whole and decodes(impl, ("linear_scan",), (v, q, k), mask, S):
        check_linear(q, k, v, None, S, chunk_size)
        step = matrix_step("linear", q, k, v, S, z=z, feature_map=feature_map)
        return FormOutput(step.o, LinearState(step.S, step.z), step.clamped, "triton")
    if _fused(k, mask, readout, impl):
        from linattn_cli.kernels.linear_ratio_triton import linear_ratio_triton

        check_linear(q, k, v, None, S, chunk_size)
        if z is not None:
            check_shape("initial_state.z", z, "BHK", (k.shape[0], *k.shape[2:]))
        options: dict[str, Any] = {"feature_map": feature_map, "floor": RATIO_EPS, "chunk_size": chunk_size}
        with torch.autocast(q.device.type, enabled=False):
            o, denominator, S, z = linear_ratio_triton(q, k, v, S=S, z=z, **options)
        return FormOutput(o, LinearState(S, z), (denominator < RATIO_EPS).sum(), "triton")
    q, k = phi(q), keep(phi(k), mask)
    scan = linear_scan(q, k, v, initial_state=S, chunk_size=chunk_size, impl=impl)
    if readout == "raw":
        return FormOutput(scan.o, LinearState(scan.final_state, None), impl=scan.impl)
    o, z, clamped = ratio_readout(scan.o, q, k, z, impl=impl)
    return FormOutput(o, LinearState(scan.final_state, z), clamped, scan.impl)


def _fused(k: Tensor, mask: Tensor | None, readout: str, impl: str | Impl) -> bool:
    """Whether the one fused Triton operator makes the call: the ratio read-out, without padding."""
    if mask is not None or readout != "ratio" or dispatch.overridden("linear_scan", "triton"):
        return False
    return one_pass(impl, k)


_phi = feature_map


def linear_attention_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "elu1",
    readout: str = "ratio",
    mask: Tensor | None = None,
    initial_state: LinearState | None = None,
) -> FormOutput:
    """`linear_attention` one token at a time; the oracle."""
    check_linear(q, k, v, None, None, None)
    check_mask(mask, k)
    phi = _phi(feature_map)
    S, z = initial_state or (None, None)
    S = start_state(S, k, v.shape[3])
    z = torch.zeros_like(S[..., 0]) if z is None else z
    masks = token_masks(mask, k.shape[1])
    clamped = torch.zeros((), dtype=torch.int64, device=k.device)
    outputs = []
    for q_t, k_t, v_t, real in zip(queries_time_first(q, k.shape[2]), time_first(k), time_first(v), masks, strict=True):
        phi_q, phi_k = phi(q_t), phi(k_t)
        S = pick(real, S + phi_k.unsqueeze(-1) * v_t.unsqueeze(-2), S)
        z = pick(real, z + phi_k, z)
        o = phi_q @ S
        if readout == "ratio":
            denominator = (phi_q * z.unsqueeze(-2)).sum(-1, keepdim=True)
            clamped = clamped + (denominator.detach() < RATIO_EPS).sum()
            o = o / denominator.clamp_min(RATIO_EPS)
        outputs.append(o)
    ratio = readout == "ratio"
    state = LinearState(S, z if ratio else None)
    return FormOutput(stack_tokens(outputs, v.dtype), state, clamped if ratio else None, "reference")
