"""Third-order higher-order linear attention: the causal order, and the set that the paper's operator sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.dispatch import runs_kernels
from linattn_cli.kernels.forms import hla3_published as published
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
from linattn_cli.kernels.monoids import hla3 as monoid
from linattn_cli.kernels.monoids.base import apply, outer
from linattn_cli.kernels.monoids.stream import scan_tokens
from linattn_cli.kernels.types import FormOutput, Impl

VARIANTS = ("causal", "published")
DECAYS = {"causal": ("none", "moment", "cascade", "mask"), "published": ("none", "moment")}


class Hla3State(NamedTuple):
    """SK `[B, H, K, K]` and `P = sum k v^T` `[B, H, K, V]`, once per key head; `H = sum_u (SK_u q_u)(P_u^T
    q_u)^T` `[B, Q, K, V]`; m `[B, H, K]` and h `[B, Q, K]`, the same with v = 1, None where nothing is
    divided."""

    SK: Tensor
    P: Tensor
    H: Tensor
    m: Tensor | None = None
    h: Tensor | None = None


class Hla3PublishedState(NamedTuple):
    """SK `[B, H, K, K]`, SQ `[B, Q, K, K]`, P `[B, H, K, V]`, `F = SK SQ P - G1 - G2 - G3` `[B, Q, K, V]`; m
    `[B, H, K]` and f `[B, Q, K]`, the same with v = 1, None where nothing is divided."""

    SK: Tensor
    SQ: Tensor
    P: Tensor
    F: Tensor
    m: Tensor | None = None
    f: Tensor | None = None


@runs_kernels
def hla3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    variant: str = "causal",
    readout: str = "raw",
    decay: str = "none",
    feature_map: str = "identity",
    eps: float = EPS,
    mask: Tensor | None = None,
    initial_state: Hla3State | Hla3PublishedState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """Third-order attention: causal `W W^T W V` with `W = tril(Q K^T)`, or the paper's set of triples.

    Recurrence of `causal`, with decays a, p and h::

        SK_t = a_t SK_{t-1} + k_t k_t^T;  P_t = p_t P_{t-1} + k_t v_t^T
        H_t  = h_t H_{t-1} + (SK_t q_t)(P_t^T q_t)^T
        o_t  = H_t^T q_t

    which is `LA_h(q, LA_a(q, k, k), LA_p(q, k, v))`. Decay, `g = exp(log_decay)`: `moment` a = p = g, h =
    g^3; `cascade` a = p = h = g; `mask` a = g^2, p = h = g, the literal `W_g W_g^T W_g`.

    `published` sums the index triples (i, u, j) whose maximum is attained at least twice, which is what the
    paper's streaming form computes and not the causal order of its Theorem 7.1; with `moment` every moment
    decays by g. The recurrence stands in `hla3_published.py`. Its associative operator (`impl="scan"`)
    carries K^3 V numbers a segment and is refused above K = 16.

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`, Q a multiple of H; log_decay `[B, T, H]`,
    natural log, <= 0; mask `[B, T]`, true at real tokens. `readout="ratio"` divides by the same sums with v = 1;
    `clamped` counts denominators within eps of 0.

    Dtypes: float64, float32, bfloat16, float16; states and everything between the scans in float64 for
    float64 inputs, else float32 (bfloat16 between the Triton scans where that suffices); `o` has the dtype of v.

    Raises `ValueError` for shapes, dtypes, options and states that do not fit.

    Source: HLA (arXiv 2510.27258), section 7.

    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> hla3(q, k, v).o.flatten().tolist()
    [1.0, 5.0, 14.0]
    >>> hla3(q, k, v, variant="published").o.flatten().tolist()
    [1.0, 5.0, 12.0]
    """
    check_choice("variant", variant, VARIANTS)
    check_choice(f"decay of variant={variant!r}", decay, DECAYS[variant])
    check_inputs(q, k, v, log_decay=log_decay, decay=decay, readout=readout, mask=mask, chunk_size=chunk_size)
    _check_carried(initial_state, q, k, v, variant, readout)
    resolved = resolved_impl(impl, v)
    if initial_state is not None and decodes(resolved, ("linear_scan",), (v, q, k, log_decay), mask, initial_state):
        return _step(q, k, v, log_decay, variant, decay, feature_map, eps, initial_state)
    with torch.autocast(q.device.type, enabled=False):
        dtype = scan_dtype(v, resolved, readout) if variant == "causal" else None
        qf, kf, vf, log = prepare(q, k, v, log_decay, feature_map, readout, mask, resolved, dtype)
        state = _matrices(initial_state)
        if variant == "published":
            o, *matrices = published.run(qf, kf, vf, log, state, chunk_size, resolved)
        elif resolved == "reference":
            o, *matrices = _serial(qf, kf, vf, _stages(decay, log), state)
        elif resolved == "scan":
            o, *matrices = _scan(qf, kf, vf, _stages(decay, log), state, chunk_size)
        else:
            o, *matrices = _compose(qf, kf, vf, _stages(decay, log), state, chunk_size, resolved)
        o, clamped = finish(o, readout, eps, v.dtype, mask)
    return FormOutput(o, _state(matrices, variant, readout), clamped, resolved)


def hla3_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    variant: str = "causal",
    readout: str = "raw",
    decay: str = "none",
    feature_map: str = "identity",
    eps: float = EPS,
    mask: Tensor | None = None,
    initial_state: Hla3State | Hla3PublishedState | None = None,
) -> FormOutput:
    """The oracle of `hla3`: the streaming updates, one token at a time (`_serial` below)."""
    return hla3(
        q,
        k,
        v,
        log_decay=log_decay,
        variant=variant,
        readout=readout,
        decay=decay,
        feature_map=feature_map,
        eps=eps,
        mask=mask,
        initial_state=initial_state,
        impl="reference",
    )


def _stages(decay: str, log: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Log-decays of SK, P and H."""
    if log is None:
        return None, None, None
    return {"moment": (log, log, 3 * log), "cascade": (log, log, log), "mask": (2 * log, log, log)}[decay]


def _step(q, k, v, log_decay, variant, decay, feature_map, eps, state) -> FormOutput:
    """One token from a carried state, in one launch; powers of the decay are those of `_stages`."""
    a, p, h = {"moment": (1, 1, 3), "cascade": (1, 1, 1), "mask": (2, 1, 1)}.get(decay, (0, 0, 0))
    form, names = (
        ("hla3", ("S", "P", "H", "m", "h")) if variant == "causal" else ("published", ("S", "SQ", "P", "H", "m", "h"))
    )
    carried = dict(zip(names, state, strict=True))
    how: dict[str, Any] = {"feature_map": feature_map, "log_decay": log_decay, "powers": (a, p, h, 0, 0), "eps": eps}
    o, clamped, after = hla_step(form, q, k, v, carried, **how)
    kind = Hla3State if variant == "causal" else Hla3PublishedState
    return FormOutput(o, kind._make(after[name] for name in names), clamped, "triton")


def _serial(q, k, v, stages, state):
    """Token by token; in here `[B, H, G, ...]`, with a group of 1 for what is held once per key head."""
    heads = k.shape[2]
    qs, ks, vs = (grouped(x, heads).unbind(1) for x in (q, k, v))
    if state is None:
        SK, P = k.new_zeros(*ks[0].shape, k.shape[-1]), k.new_zeros(*ks[0].shape, v.shape[-1])
        H = q.new_zeros(*qs[0].shape, v.shape[-1])
    else:
        SK, P, H = (as_segment(x, heads).squeeze(1) for x in state)
    outputs = []
    for q_t, k_t, v_t, a, p, h in zip(qs, ks, vs, *(decays(x, len(qs)) for x in stages), strict=True):
        SK = a * SK + outer(k_t, k_t)
        P = p * P + outer(k_t, v_t)
        H = h * H + outer(apply(SK, q_t), apply(P, q_t))
        outputs.append(apply(H, q_t))
    return torch.stack(outputs, dim=1).flatten(2, 3), SK.flatten(1, 2), P.flatten(1, 2), H.flatten(1, 2)


def _compose(q, k, v, stages, state, chunk_size, impl):
    """Through the linear scan: LA(q, LA(q, k, k), LA(q, k, v)).

    On the CPU one scan does for both inner ones where their decay is one; a GPU has the tiles to run them apart.
    """
    log_a, log_p, log_h = stages
    SK, P, H = (None, None, None) if state is None else state
    how = {"chunk_size": chunk_size, "impl": impl}
    if log_a is log_p and impl == "chunk":
        both = None if SK is None or P is None else torch.cat((SK, P), dim=-1)
        read, both = scan(q, k, torch.cat((k, v), dim=-1), log_decay=log_a, initial_state=both, **how)
        u, w = read.split((k.shape[-1], v.shape[-1]), dim=-1)
        SK, P = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    else:
        u, SK = scan(q, k, k, log_decay=log_a, initial_state=SK, **how)
        w, P = scan(q, k, v, log_decay=log_p, initial_state=P, **how)
    o, H = scan(q, u, w, log_decay=per_query(log_h, q.shape[2]), initial_state=H, **how)
    return o, SK, P, H


def _scan(q, k, v, stages, state, chunk_size):
    """Through the associative operator."""
    heads = k.shape[2]
    inputs = [grouped(x, heads) for x in (q, k, v, *stages)]
    initial = None
    if state is not None:
        start: list[Any] = [None if x is None else x[:, :1] for x in inputs]
        first = monoid.token(*start)
        SK, P, H = (as_segment(x, heads) for x in state)
        initial = monoid.identity(first)._replace(SK=SK, P=P, H=H)
    o, total = scan_tokens(
        monoid.HLA3,
        inputs,
        token=monoid.token,
        read=lambda x, q, *_: monoid.read(x, q),
        initial=initial,
        chunk_size=chunk_size,
    )
    return o.flatten(2, 3), ungrouped(total.SK), ungrouped(total.P), ungrouped(total.H)


def _check_carried(state, q: Tensor, k: Tensor, v: Tensor, variant: str, readout: str) -> None:
    batch, _, heads, key_dim = k.shape
    SK, SQ = (batch, heads, key_dim, key_dim), (batch, q.shape[2], key_dim, key_dim)
    P, H = (batch, heads, key_dim, v.shape[3]), (batch, q.shape[2], key_dim, v.shape[3])
    m, h = (P[:3], H[:3]) if readout == "ratio" else ((), ())
    if variant == "causal":
        check_state(state, Hla3State, {"SK": SK, "P": P, "H": H, "m": m, "h": h}, k)
    else:
        check_state(state, Hla3PublishedState, {"SK": SK, "SQ": SQ, "P": P, "F": H, "m": m, "f": h}, k)


def _matrices(state: Hla3State | Hla3PublishedState | None) -> tuple[Tensor, ...] | None:
    """A public state with its denominators as columns."""
    if state is None:
        return None
    if isinstance(state, Hla3State):
        return state.SK, join_mass(state.P, state.m), join_mass(state.H, state.h)
    return state.SK, state.SQ, join_mass(state.P, state.m), join_mass(state.F, state.f)


def _state(matrices: list[Tensor], variant: str, readout: str) -> Hla3State | Hla3PublishedState:
    *moments, P, H = matrices
    (P, m), (H, h) = split_mass(P, readout), split_mass(H, readout)
    fields = (*moments, P, H, m, h)
    return Hla3State._make(fields) if variant == "causal" else Hla3PublishedState._make(fields)
