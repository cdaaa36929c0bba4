"""Asymmetric higher-order linear attention (AHLA): attention applied to the output of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.dispatch import runs_kernels
from linattn_cli.kernels.forms.decode import decodes, hla_step
from linattn_cli.kernels.forms.features import check_choice
from linattn_cli.kernels.forms.higher_order import (
    EPS,
    as_segment,
    check_inputs,
    check_state,
    decays,
    finish,
    grouped,
    join_mass,
    per_query,
    prepare,
    resolved_impl,
    scan,
    scan_dtype,
    split_mass,
    ungrouped,
)
from linattn_cli.kernels.monoids import ahla as monoid
from linattn_cli.kernels.monoids.base import apply, outer
from linattn_cli.kernels.monoids.stream import scan_tokens
from linattn_cli.kernels.types import FormOutput, Impl

DECAYS = ("none", "cascade")


class AhlaState(NamedTuple):
    """`P = sum k v^T` `[B, H, K, V]`, once per key head; `E = sum k (P^T q)^T` `[B, Q, K, V]`; m `[B, H, K]`
    and n `[B, Q, K]`, the same with v = 1, None where nothing is divided."""

    P: Tensor
    E: Tensor
    m: Tensor | None = None
    n: Tensor | None = None


@runs_kernels
def ahla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    readout: str = "raw",
    decay: str = "none",
    feature_map: str = "identity",
    eps: float = EPS,
    mask: Tensor | None = None,
    initial_state: AhlaState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """Asymmetric second order `W W V`, `W = tril(Q K^T)`, in linear time.

    Recurrence, `g = exp(log_decay)`::

        P_t = g_t P_{t-1} + k_t v_t^T
        E_t = g_t E_{t-1} + k_t (P_t^T q_t)^T
        o_t = E_t^T q_t

    which is `LA_g(q, k, LA_g(q, k, v))`. With `decay="cascade"` both stages lose g, pair weight `g^(t-j)`:
    the literal `W_g W_g V` at the same time.

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`, Q a multiple of H; log_decay `[B, T, H]`,
    natural log, <= 0; mask `[B, T]`, true at real tokens. `readout="ratio"` divides by the same sums with v = 1;
    `clamped` counts denominators within eps of 0.

    Dtypes: float64, float32, bfloat16, float16; states and everything between the scans in float64 for
    float64 inputs, else float32 (bfloat16 between the Triton scans where that suffices); `o` has the dtype of v.

    Raises `ValueError` for shapes, dtypes, options and states that do not fit.

    Source: HLA (arXiv 2510.27258), section 6.

    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> ahla(q, k, v).o.flatten().tolist()
    [1.0, 3.0, 6.0]
    """
    check_choice("decay", decay, DECAYS)
    check_inputs(q, k, v, log_decay=log_decay, decay=decay, readout=readout, mask=mask, chunk_size=chunk_size)
    _check_carried(initial_state, q, k, v, readout)
    resolved = resolved_impl(impl, v)
    if initial_state is not None and decodes(resolved, ("linear_scan",), (v, q, k, log_decay), mask, initial_state):
        P, E, m, n = initial_state
        states = {"P": P, "H": E, "m": m, "h": n}
        how: dict[str, Any] = {"feature_map": feature_map, "log_decay": log_decay, "powers": (0, 1, 1, 0, 0)}
        o, clamped, states = hla_step("ahla", q, k, v, states, eps=eps, **how)
        return FormOutput(o, AhlaState._make(states[name] for name in "PHmh"), clamped, resolved)
    with torch.autocast(q.device.type, enabled=False):
        dtype = scan_dtype(v, resolved, readout)
        qf, kf, vf, log = prepare(q, k, v, log_decay, feature_map, readout, mask, resolved, dtype)
        state = None
        if initial_state is not None:
            state = (join_mass(initial_state.P, initial_state.m), join_mass(initial_state.E, initial_state.n))
        if resolved == "reference":
            o, P, E = _serial(qf, kf, vf, log, state)
        elif resolved == "scan":
            o, P, E = _scan(qf, kf, vf, log, state, chunk_size)
        else:
            o, P, E = _compose(qf, kf, vf, log, state, chunk_size, resolved)
        o, clamped = finish(o, readout, eps, v.dtype, mask)
    (P, m), (E, n) = split_mass(P, readout), split_mass(E, readout)
    return FormOutput(o, AhlaState(P, E, m, n), clamped, resolved)


def ahla_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    readout: str = "raw",
    decay: str = "none",
    feature_map: str = "identity",
    eps: float = EPS,
    mask: Tensor | None = None,
    initial_state: AhlaState | None = None,
) -> FormOutput:
    """The oracle of `ahla`: the streaming updates, one token at a time (`_serial` below)."""
    return ahla(
        q,
        k,
        v,
        log_decay=log_decay,
        readout=readout,
        decay=decay,
        feature_map=feature_map,
        eps=eps,
        mask=mask,
        initial_state=initial_state,
        impl="reference",
    )


def _serial(q, k, v, log, state):
    """Token by token; in here `[B, H, G, ...]`, with a group of 1 for what is held once per key head."""
    heads = k.shape[2]
    qs, ks, vs = (grouped(x, heads).unbind(1) for x in (q, k, v))
    if state is None:
        P = k.new_zeros(*ks[0].shape, v.shape[-1])
        E = q.new_zeros(*qs[0].shape, v.shape[-1])
    else:
        P, E = (as_segment(x, heads).squeeze(1) for x in state)
    outputs = []
    for q_t, k_t, v_t, g in zip(qs, ks, vs, decays(log, len(qs)), strict=True):
        P = g * P + outer(k_t, v_t)
        E = g * E + outer(k_t, apply(P, q_t))
        outputs.append(apply(E, q_t))
    return torch.stack(outputs, dim=1).flatten(2, 3), P.flatten(1, 2), E.flatten(1, 2)


def _compose(q, k, v, log, state, chunk_size, impl):
    """Through the linear scan: LA(q, k, LA(q, k, v))."""
    P, E = (None, None) if state is None else state
    how = {"chunk_size": chunk_size, "impl": impl}
    w, P = scan(q, k, v, log_decay=log, initial_state=P, **how)
    k, log = per_query(k, q.shape[2]), per_query(log, q.shape[2])
    o, E = scan(q, k, w, log_decay=log, initial_state=E, **how)
    return o, P, E


def _scan(q, k, v, log, state, chunk_size):
    """Through the associative operator."""
    heads = k.shape[2]
    inputs = [grouped(x, heads) for x in (q, k, v, log)]
    initial = None
    if state is not None:
        start: list[Any] = [None if x is None else x[:, :1] for x in inputs]
        first = monoid.token(*start)
        P, E = (as_segment(x, heads) for x in state)
        initial = monoid.identity(first)._replace(P=P, E=E)
    o, total = scan_tokens(
        monoid.AHLA,
        inputs,
        token=monoid.token,
        read=lambda x, q, *_: monoid.read(x, q),
        initial=initial,
        chunk_size=chunk_size,
    )
    return o.flatten(2, 3), ungrouped(total.P), ungrouped(total.E)


def _check_carried(state, q: Tensor, k: Tensor, v: Tensor, readout: str) -> None:
    batch, _, heads, key_dim = k.shape
    P, E = (batch, heads, key_dim, v.shape[3]), (batch, q.shape[2], key_dim, v.shape[3])
    m, n = (P[:3], E[:3]) if readout == "ratio" else ((), ())
    check_state(state, AhlaState, {"P": P, "E": E, "m": m, "n": n}, k)
