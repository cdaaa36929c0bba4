"""Variational linear attention as a form of its tensors."""

from __future__ import annotations

from typing import NamedTuple

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
    unit,
)
from linattn_cli.kernels.forms.scan import delta_scan, penalty_gain
from linattn_cli.kernels.forms.serial import pick, start_state, token_masks
from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.penalty.inverse import REFRESH, inverse, start
from linattn_cli.kernels.types import FormOutput, Impl, PenaltyState, state_dtype
from linattn_cli.kernels.validate import check_form, check_linear, check_penalty, check_shape

FUSED_KEYS = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
"""Widest keys of the fused GPU operator: its walk of wider float32 ones spills, and takes a minute to compile."""


class VLAState(NamedTuple):
    """S `[B, H, K, V]`; the penalty's mass and inverse; `z = sum phi(k)`, `[B, H, K]`, for the ratio read-out."""

    S: Tensor
    penalty: PenaltyState | None
    z: Tensor | None


@dispatch.runs_kernels
def vla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    lambda0: float = 0.1,
    penalty: str = "learned",
    normalise_gate: bool = True,
    feature_map: str = "elu1",
    readout: str = "ratio",
    mask: Tensor | None = None,
    initial_state: VLAState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """Variational linear attention: a delta rule written along a penalised gain::

        k^_t = phi(k_t) / |phi(k_t)|
        A_t = (lambda0 I + sum_{s<=t} u_s u_s^T)^-1;   a_t = A_t k^_t / |A_t k^_t|
        S_t = S_{t-1} + beta_t a_t (v_t - S_{t-1}^T k^_t)^T
        o_t = S_t^T phi(q_t) / max(phi(q_t) . z_t, 1e-4),   z_t = sum_{s<=t} phi(k_s)

    Options: `penalty` `learned` takes u as given, `key` sets u = k^, `none` sets u = 0 (a delta rule: A = I /
    lambda0); `normalise_gate=False` leaves a_t = A_t k^_t; `readout="raw"` does not divide; beta None is 1.

    Shapes: q `[B, T, Q, K]`, k and u `[B, T, H, K]`, v `[B, T, H, V]`, beta `[B, T, H]`; mask `[B, T]`, true at
    real tokens. Raises `ValueError` for shapes, dtypes or options that do not fit.

    Source: VLA (arXiv 2605.11196), sections 2.1 to 2.3.
    """
    check_form(q, k, v, u=u, beta=beta)
    _check(k, u, beta, penalty, readout, mask)
    if Impl.parse(impl) is Impl.REFERENCE:
        return vla_serial(
            q,
            k,
            v,
            u,
            beta,
            lambda0=lambda0,
            penalty=penalty,
            normalise_gate=normalise_gate,
            feature_map=feature_map,
            readout=readout,
            mask=mask,
            initial_state=initial_state,
        )
    S, penalty_state, z = initial_state or (None, None, None)
    phi = _phi(feature_map, impl=impl)
    whole = (penalty_state is None) == (penalty == "none") and (z is None) == (readout == "raw")
    if (
        S is not None
        and whole
        and decodes(impl, ("penalty_gain", "delta_scan"), (v, q, k, u, beta), mask, initial_state)
    ):
        check_linear(q, k, v, None, S, chunk_size)
        check_penalty(k, k, lambda0, penalty_state, None)
        step = matrix_step(
            "vla",
            q,
            k,
            v,
            S,
            u=u if penalty == "learned" else None,
            beta=beta,
            penalty=penalty_state,
            lambda0=lambda0,
            normalise=normalise_gate,
            z=z,
            feature_map=feature_map,
        )
        return FormOutput(step.o, VLAState(step.S, step.penalty, step.z), step.clamped, "triton")
    if _fused(k, beta, penalty, normalise_gate, readout, mask, impl):
        check_linear(q, k, v, None, S, chunk_size)
        check_penalty(k, k, lambda0, penalty_state, None)
        from linattn_cli.kernels.vla_triton import vla_triton

        with torch.autocast(q.device.type, enabled=False):
            o, denominator, S, penalty_state, z = vla_triton(
                q,
                k,
                v,
                u if penalty == "learned" else None,
                feature_map=feature_map,
                lambda0=lambda0,
                floor=RATIO_EPS,
                S=S,
                state=penalty_state,
                z=z,
                chunk_size=chunk_size,
            )
        return FormOutput(o, VLAState(S, penalty_state, z), (denominator < RATIO_EPS).sum(), "triton")
    dtype = v.dtype
    if dtype == torch.float16 and not normalise_gate:  # what such a gate writes is as large as 1 / lambda0
        q, k, v = (x.float() for x in (q, k, v))
        u, beta = (None if x is None else x.float() for x in (u, beta))
    q, k = phi(q), keep(phi(k), mask)
    key = unit(k, impl=impl)
    write, penalty_state = _write_direction(
        key, u, beta, lambda0, penalty, normalise_gate, mask, penalty_state, chunk_size, impl
    )
    scan = delta_scan(q, key, write, v, initial_state=S, chunk_size=chunk_size, impl=impl)
    if readout == "raw":
        return FormOutput(scan.o.to(dtype), VLAState(scan.final_state, penalty_state, None), impl=scan.impl)
    o, z, clamped = ratio_readout(scan.o, q, k, z, impl=impl)
    return FormOutput(o.to(dtype), VLAState(scan.final_state, penalty_state, z), clamped, scan.impl)


def _fused(k, beta, penalty, normalise_gate, readout, mask, impl) -> bool:
    """Whether the one fused Triton operator makes the call: the default form, without padding, of K up to 64 or 128."""
    if beta is not None or mask is not None or penalty == "none" or not normalise_gate or readout != "ratio":
        return False
    replaced = any(dispatch.overridden(operator, "triton") for operator in ("penalty_gain", "delta_scan"))
    return one_pass(impl, k) and not replaced and k.shape[-1] <= FUSED_KEYS[k.dtype]


_phi = feature_map


def vla_directions(
    k: Tensor,
    u: Tensor | None,
    beta: Tensor | None,
    *,
    lambda0: float = 0.1,
    penalty: str = "learned",
    normalise_gate: bool = True,
    feature_map: str = "elu1",
    mask: Tensor | None = None,
    initial_state: PenaltyState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> tuple[Tensor, Tensor, PenaltyState | None]:
    """What VLA's delta rule reads along, k^, and writes along, beta a, with the penalty state after them.

    The Jacobian of a step is `I - (beta a) k^T`.
    """
    key = keep(_phi(feature_map, normalise=True, impl=impl)(k), mask)
    write, state = _write_direction(
        key, u, beta, lambda0, penalty, normalise_gate, mask, initial_state, chunk_size, impl
    )
    return key, write, state


def _write_direction(
    key, u, beta, lambda0, penalty, normalise_gate, mask, initial_state, chunk_size, impl
) -> tuple[Tensor, PenaltyState | None]:
    if penalty == "none":
        gain, state = key / lambda0, None
    else:
        gained = penalty_gain(
            key if u is None or penalty == "key" else keep(u, mask),
            key,
            lambda0=lambda0,
            initial_state=initial_state,
            chunk_size=chunk_size,
            impl=impl,
        )
        gain, state = gained.o, gained.final_state
    # a padded token has no gain: its direction is kept out, for its gradient is one over the norm of nothing
    write = keep(unit(gain, impl=impl), mask) if normalise_gate else gain
    if beta is not None:
        write = (write * beta.unsqueeze(-1)).to(write.dtype)
    return write, state


def vla_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    lambda0: float = 0.1,
    penalty: str = "learned",
    normalise_gate: bool = True,
    feature_map: str = "elu1",
    readout: str = "ratio",
    mask: Tensor | None = None,
    initial_state: VLAState | None = None,
) -> FormOutput:
    """`vla` one token at a time, with Sherman-Morrison as in the paper; the oracle."""
    check_linear(q, k, v, None, None, None)
    _check(k, u, beta, penalty, readout, mask)
    phi, dtype = _phi(feature_map), state_dtype(k.dtype)
    S, penalty_state, z = initial_state or (None, None, None)
    S = start_state(S, k, v.shape[3])
    z = torch.zeros_like(S[..., 0]) if z is None else z
    P, A, age = start(k, lambda0, penalty_state)
    masks = token_masks(mask, k.shape[1])
    clamped = torch.zeros((), dtype=torch.int64, device=k.device)
    outputs = []
    for t, (q_t, k_t, v_t) in enumerate(
        zip(queries_time_first(q, k.shape[2]), time_first(k), time_first(v), strict=True)
    ):
        real, phi_q, phi_k = masks[t], phi(q_t), phi(k_t)
        key = unit(phi_k)
        if penalty != "none":
            if age >= REFRESH:
                A, age = inverse(P, lambda0), 0
            u_t = (key if u is None or penalty == "key" else u[:, t].to(dtype)).unsqueeze(-1)
            column = A @ u_t
            A = pick(real, A - column @ column.mT / (1 + u_t.mT @ column), A)
            P = pick(real, P + u_t @ u_t.mT, P)
            age += 1
        gain = (A @ key.unsqueeze(-1)).squeeze(-1)
        write = unit(gain) if normalise_gate else gain
        if beta is not None:
            write = write * beta[:, t].to(dtype).unsqueeze(-1)
        error = v_t - (key.unsqueeze(-2) @ S).squeeze(-2)
        S = pick(real, S + write.unsqueeze(-1) * error.unsqueeze(-2), S)
        z = pick(real, z + phi_k, z)
        o = phi_q @ S
        if readout == "ratio":
            denominator = (phi_q * z.unsqueeze(-2)).sum(-1, keepdim=True)
            clamped = clamped + (denominator.detach() < RATIO_EPS).sum()
            o = o / denominator.clamp_min(RATIO_EPS)
        outputs.append(o)
    ratio = readout == "ratio"
    state = VLAState(S, None if penalty == "none" else PenaltyState(P, A, age), z if ratio else None)
    return FormOutput(stack_tokens(outputs, v.dtype), state, clamped if ratio else None, "reference")


def _check(k, u, beta, penalty, readout, mask) -> None:
    check_choice("penalty", penalty, ("learned", "none", "key"))
    check_choice("readout", readout, ("ratio", "raw"))
    check_mask(mask, k)
    if penalty == "learned":
        if u is None:
            raise ValueError(
                "u must be given when penalty='learned', got None; pass u [B, T, H, K], or use penalty='key' or 'none'"
            )
        check_shape("u", u, "BTHK", tuple(k.shape))
    if beta is not None:
        check_shape("beta", beta, "BTH", tuple(k.shape[:3]))
