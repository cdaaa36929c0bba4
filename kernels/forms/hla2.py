"""Second-order higher-order linear attention (HLA), masked and not, with every decay of it."""

from __future__ import annotations

from typing import NamedTuple

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
from linattn_cli.kernels.monoids import hla2 as monoid
from linattn_cli.kernels.monoids.base import apply, outer
from linattn_cli.kernels.monoids.stream import scan_tokens
from linattn_cli.kernels.types import FormOutput, Impl

DECAYS = ("none", "moment", "cascade", "mask", "published")
STATE_FORMS = ("summary", "paper")


class Hla2State(NamedTuple):
    """`S = sum k k^T` `[B, H, K, K]`, once per key head; `H = sum_j S_j q_j v_j^T` `[B, Q, K, V]`; h `[B, Q,
    K]`, the same with v = 1, None where nothing is divided."""

    S: Tensor
    H: Tensor
    h: Tensor | None = None


class Hla2PaperState(NamedTuple):
    """The paper's moments S `[B, H, K, K]`, `C = sum q v^T` and its correction G `[B, Q, K, V]`, with m and h
    `[B, Q, K]` the same with v = 1. G and h are None without the mask, m and h where nothing is divided."""

    S: Tensor
    C: Tensor
    G: Tensor | None = None
    m: Tensor | None = None
    h: Tensor | None = None


@runs_kernels
def hla2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    masked: bool = True,
    readout: str = "raw",
    ridge: float = 0.0,
    decay: str = "none",
    state_form: str = "summary",
    feature_map: str = "identity",
    eps: float = EPS,
    mask: Tensor | None = None,
    initial_state: Hla2State | Hla2PaperState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """Second-order attention `[(W W^T) . L] V`, `W = tril(Q K^T)`, in linear time.

    Recurrence, with decays a of S and b of H::

        S_t = a_t S_{t-1} + k_t k_t^T
        H_t = b_t H_{t-1} + ((S_t + ridge I) q_t) v_t^T
        o_t = H_t^T q_t

    which is `LA_b(q, LA_a(q, k, k) + ridge q, v)`. The paper keeps `C = sum q v^T` and a correction G
    instead, with `H = S C - G` (`state_form="paper"`: the same numbers, another state). Without the mask
    `o_t = C_t^T (S_t + ridge I) q_t`, and a key counts for every earlier value too.

    Decay, `g = exp(log_decay)`: `moment` (a, b) = (g, g^2), pair weight `g^(t-i) g^(t-j)`; `cascade` (g, g),
    weight `g^(t-i)`; `mask` (g^2, g), the literal `W_g W_g^T`, weight `g^(t-i) g^(j-i)`, no paper state;
    `published`, the paper's own update `G = g G + k (k^T C')`, which lets forbidden pairs leak in: kept to
    be measured. Unmasked has `none` and `moment`.

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`, Q a multiple of H; log_decay `[B, T, H]`,
    natural log, <= 0; mask `[B, T]`, true at real tokens. `readout="ratio"` divides by the same sums with v = 1; with
    signed q and k that denominator is negative for about 40 % of the tokens, and `clamped` counts those within eps of
    0.

    Dtypes: float64, float32, bfloat16, float16; states and everything between the scans in float64 for
    float64 inputs, else float32 (bfloat16 between the Triton scans where that suffices); `o` has the dtype of v.

    Raises `ValueError` for shapes, dtypes, options and states that do not fit.

    Source: HLA (arXiv 2510.27258), sections 3 and 4.

    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> hla2(q, k, v).o.flatten().tolist()
    [1.0, 3.0, 6.0]
    >>> hla2(q, k, v, masked=False).o.flatten().tolist()
    [1.0, 4.0, 9.0]
    """
    options = _Options.checked(decay, masked, state_form, ridge)
    check_inputs(q, k, v, log_decay=log_decay, decay=decay, readout=readout, mask=mask, chunk_size=chunk_size)
    _check_carried(initial_state, q, k, v, options, readout)
    resolved = resolved_impl(impl, v)
    if initial_state is not None and decodes(resolved, ("linear_scan",), (v, q, k, log_decay), mask, initial_state):
        return _step(q, k, v, log_decay, options, feature_map, eps, initial_state)
    with torch.autocast(q.device.type, enabled=False):
        dtype = scan_dtype(v, resolved, readout) if not options.paper else None
        qf, kf, vf, log = prepare(q, k, v, log_decay, feature_map, readout, mask, resolved, dtype)
        state = _matrices(initial_state)
        if resolved == "reference":
            o, *matrices = _serial(qf, kf, vf, log, options, state)
        elif resolved == "scan":
            o, *matrices = _scan(qf, kf, vf, log, options, state, chunk_size)
        else:
            o, *matrices = _compose(qf, kf, vf, log, options, state, chunk_size, resolved)
        o, clamped = finish(o, readout, eps, v.dtype, mask)
    return FormOutput(o, _state(matrices, options, readout), clamped, resolved)


def hla2_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    masked: bool = True,
    readout: str = "raw",
    ridge: float = 0.0,
    decay: str = "none",
    state_form: str = "summary",
    feature_map: str = "identity",
    eps: float = EPS,
    mask: Tensor | None = None,
    initial_state: Hla2State | Hla2PaperState | None = None,
) -> FormOutput:
    """The oracle of `hla2`: the streaming updates, one token at a time (`_serial` below)."""
    return hla2(
        q,
        k,
        v,
        log_decay=log_decay,
        masked=masked,
        readout=readout,
        ridge=ridge,
        decay=decay,
        state_form=state_form,
        feature_map=feature_map,
        eps=eps,
        mask=mask,
        initial_state=initial_state,
        impl="reference",
    )


class _Options(NamedTuple):
    decay: str
    masked: bool
    paper: bool
    ridge: float

    @classmethod
    def checked(cls, decay: str, masked: bool, state_form: str, ridge: float) -> _Options:
        check_choice("decay", decay, DECAYS)
        check_choice("state_form", state_form, STATE_FORMS)
        if not masked and decay not in ("none", "moment"):
            raise ValueError(
                f"decay={decay!r} weighs the order of key and value, which masked=False does not know; "
                "use decay='moment' or masked=True"
            )
        if decay == "mask" and state_form == "paper":
            raise ValueError("decay='mask' has no (S, C, G) state, C would have to grow; use state_form='summary'")
        if ridge and state_form == "paper" and masked and decay in ("moment", "cascade"):
            raise ValueError(
                f"ridge with decay={decay!r} has no (S, C, G) state: there it would decay as C does, not as "
                "H does; use state_form='summary' or ridge=0"
            )
        if not ridge >= 0:
            raise ValueError(f"ridge must be >= 0, got {ridge!r}")
        return cls(decay, masked, state_form == "paper" or not masked or decay == "published", float(ridge))


def _stages(decay: str, log: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Log-decays of S and of H in the summary form."""
    if log is None:
        return None, None
    return {"moment": (log, 2 * log), "cascade": (log, log), "mask": (2 * log, log)}[decay]


def _moments(decay: str, log: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Log-decays of S and of C in the paper's form."""
    return (log, None) if decay == "cascade" else (log, log)


def _serial(q, k, v, log, options: _Options, state):
    """Token by token; in here `[B, H, G, ...]`, with a group of 1 for what is held once per key head."""
    heads = k.shape[2]
    qs, ks, vs = (grouped(x, heads).unbind(1) for x in (q, k, v))
    if state is None:
        S = k.new_zeros(*ks[0].shape, k.shape[-1])
        H = C = G = q.new_zeros(*qs[0].shape, v.shape[-1])
    else:
        S, H, G = (None if x is None else as_segment(x, heads).squeeze(1) for x in (*state, None)[:3])
        C = H
    stages = _moments(options.decay, log) if options.paper else _stages(options.decay, log)
    first, second = (decays(x, len(qs)) for x in stages)
    outputs = []
    for q_t, k_t, v_t, a, b in zip(qs, ks, vs, first, second, strict=True):
        if options.paper:
            if options.masked and options.decay == "published":
                G = a * G + outer(k_t, apply(C, k_t))
            elif options.masked:
                G = a * b * G + b * outer(k_t, apply(C, k_t))
            S = a * S + outer(k_t, k_t)
            C = b * C + outer(q_t, v_t)
            o = apply(C, apply(S, q_t) + options.ridge * q_t)
            outputs.append(o - apply(G, q_t) if options.masked else o)
        else:
            S = a * S + outer(k_t, k_t)
            H = b * H + outer(apply(S, q_t) + options.ridge * q_t, v_t)
            outputs.append(apply(H, q_t))
    o = torch.stack(outputs, dim=1).flatten(2, 3)
    kept = (S, C, G if options.masked else None) if options.paper else (S, H)
    return o, *(None if x is None else x.flatten(1, 2) for x in kept)


def _step(q, k, v, log_decay, options: _Options, feature_map, eps, state) -> FormOutput:
    """One token from a carried state, in one launch; powers of the decay are those of `_stages` and `_moments`."""
    how = {"feature_map": feature_map, "log_decay": log_decay, "ridge": options.ridge, "eps": eps}
    if not options.paper:
        a, b = {"moment": (1, 2), "cascade": (1, 1), "mask": (2, 1)}.get(options.decay, (0, 0))
        carried = dict(zip("SHh", state, strict=True))
        o, clamped, after = hla_step("hla2", q, k, v, carried, powers=(a, 0, b, 0, 0), **how)
        return FormOutput(o, Hla2State._make(after[name] for name in "SHh"), clamped, "triton")
    a, b = (1, 0) if options.decay == "cascade" else (1, 1)
    leak = 0 if options.decay == "published" else b
    form = "paper" if options.masked else "unmasked"
    carried = dict(zip("SHGhg", state, strict=True))
    o, clamped, after = hla_step(form, q, k, v, carried, powers=(a, 0, b, a + leak, leak), **how)
    return FormOutput(o, Hla2PaperState._make(after[name] for name in "SHGhg"), clamped, "triton")


def _compose(q, k, v, log, options: _Options, state, chunk_size, impl):
    """Through the linear scan: LA(q, LA(q, k, k) + ridge q, v), and the paper's form likewise."""
    query_heads = q.shape[2]
    how = {"chunk_size": chunk_size, "impl": impl}
    S, H, G = (None, None, None) if state is None else (*state, None)[:3]
    v = per_query(v, query_heads)
    if not options.paper:
        log_a, log_b = _stages(options.decay, log)
        u, S = scan(q, k, k, log_decay=log_a, initial_state=S, **how)
        u = u + options.ridge * q if options.ridge else u
        o, H = scan(q, u, v, log_decay=per_query(log_b, query_heads), initial_state=H, **how)
        return o, S, H
    log_s, log_c = _moments(options.decay, log)
    log_c = per_query(log_c, query_heads)
    u, S = scan(q, k, k, log_decay=log_s, initial_state=S, **how)
    u = u + options.ridge * q if options.ridge else u
    o, C = scan(u, q, v, log_decay=log_c, initial_state=H, **how)
    if not options.masked:
        return o, S, C, None
    k = per_query(k, query_heads)
    before, _ = scan(k, q, v, log_decay=log_c, initial_state=H, exclusive=True, **how)
    log_g = per_query(log, query_heads)
    if options.decay == "moment":  # G = g^2 G + g k (k^T C')
        before, log_g = log_g.exp().unsqueeze(-1) * before, 2 * log_g
    leak, G = scan(q, k, before, log_decay=log_g, initial_state=G, **how)
    return o - leak, S, C, G


def _scan(q, k, v, log, options: _Options, state, chunk_size):
    """Through the associative operator of the state form."""
    heads = k.shape[2]
    logs = _moments(options.decay, log) if options.paper else _stages(options.decay, log)
    inputs = [grouped(x, heads) for x in (q, k, v, *logs)]
    published = options.decay == "published"
    if not options.paper:
        family = monoid.HLA2

        def token(q, k, v, log_a, log_b):
            return monoid.token(q, k, v, log_a, log_b, options.ridge)

        def read(x, q, *_):
            return monoid.read(x, q)
    else:
        family = monoid.HLA2_PUBLISHED if published else monoid.HLA2_PAPER

        def token(q, k, v, log_s, log_c):
            return monoid.token_published(q, k, v, log_s) if published else monoid.token_paper(q, k, v, log_s, log_c)

        def read(x, q, *_):
            return monoid.read_paper(x, q, options.ridge, options.masked)

    initial = None
    if state is not None:
        empty = family.identity(token(*(None if x is None else x[:, :1] for x in inputs)))
        S, H, G = (None if x is None else as_segment(x, heads) for x in (*state, None)[:3])
        carried = {"S": S, "C": H, "G": empty.C if G is None else G} if options.paper else {"S": S, "H": H}
        initial = empty._replace(**carried)
    o, total = scan_tokens(family, inputs, token=token, read=read, initial=initial, chunk_size=chunk_size)
    kept = (total.S, total.C, total.G if options.masked else None) if options.paper else (total.S, total.H)
    return o.flatten(2, 3), *(None if x is None else ungrouped(x) for x in kept)


def _check_carried(state, q: Tensor, k: Tensor, v: Tensor, options: _Options, readout: str) -> None:
    batch, _, heads, key_dim = k.shape
    S, matrix = (batch, heads, key_dim, key_dim), (batch, q.shape[2], key_dim, v.shape[3])
    mass = matrix[:3] if readout == "ratio" else ()
    if not options.paper:
        check_state(state, Hla2State, {"S": S, "H": matrix, "h": mass}, k)
        return
    corrected = options.masked
    shapes: dict[str, tuple[int, ...]] = {
        "S": S,
        "C": matrix,
        "G": matrix if corrected else (),
        "m": mass,
        "h": mass if corrected else (),
    }
    check_state(state, Hla2PaperState, shapes, k)


def _matrices(state: Hla2State | Hla2PaperState | None) -> tuple | None:
    """A public state with its denominators as columns."""
    if state is None:
        return None
    if isinstance(state, Hla2State):
        return state.S, join_mass(state.H, state.h)
    return state.S, join_mass(state.C, state.m), None if state.G is None else join_mass(state.G, state.h)


def _state(matrices: list, options: _Options, readout: str) -> Hla2State | Hla2PaperState:
    if not options.paper:
        S, H = matrices
        return Hla2State(S, *split_mass(H, readout))
    S, C, G = matrices
    C, m = split_mass(C, readout)
    G, h = (None, None) if G is None else split_mass(G, readout)
    return Hla2PaperState(S, C, G, m, h)
