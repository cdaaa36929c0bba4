"""Third-order HLA as the paper's streaming form computes it; `hla3(variant="published")` is the entry.

With primes for values at t-1 and every moment decaying by g::

    G1 = g^3 G1 + g^2 k k^T SQ' P';  G2 = g^3 G2 + g^2 SK' q q^T P';  G3 = g^3 G3 + g^2 SK' SQ' k v^T
    SK = g SK' + k k^T;  SQ = g SQ' + q q^T;  P = g P' + k v^T
    o  = (SK SQ P - G1 - G2 - G3)^T q

The paper decays G1..G3 by g alone, which is not consistent with its own moments. A column of ones in v holds
h1..h3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels.forms.higher_order import as_segment, decays, grouped, per_query, scan, ungrouped
from linattn_cli.kernels.monoids import hla3_published as monoid
from linattn_cli.kernels.monoids.base import apply, dot, outer
from linattn_cli.kernels.monoids.stream import scan_tokens

State = tuple[Tensor, ...] | None
Result = tuple[Tensor, ...]


def run(q: Tensor, k: Tensor, v: Tensor, log: Tensor | None, state: State, chunk_size: int | None, impl: str) -> Result:
    """Output and the matrices SK, SQ, P, F, through the implementation named."""
    if impl == "reference":
        return _serial(q, k, v, log, state)
    if impl == "scan":
        return _scan(q, k, v, log, state, chunk_size)
    return _compose(q, k, v, log, state, chunk_size, impl)


def _serial(q, k, v, log, state: State) -> Result:
    """Token by token; in here `[B, H, G, ...]`, with a group of 1 for what is held once per key head.

    SK and SQ are symmetric: which of them is transposed matters only to the gradients of a carried state.
    """
    heads = k.shape[2]
    qs, ks, vs = (grouped(x, heads).unbind(1) for x in (q, k, v))
    zeros = q.new_zeros(*qs[0].shape, v.shape[-1])
    G1 = G2 = G3 = zeros
    if state is None:
        SK, P = k.new_zeros(*ks[0].shape, k.shape[-1]), k.new_zeros(*ks[0].shape, v.shape[-1])
        SQ = q.new_zeros(*qs[0].shape, q.shape[-1])
    else:
        SK, SQ, P, F = (as_segment(x, heads).squeeze(1) for x in state)
        G1 = SK.mT @ SQ @ P - F  # the three decay alike and only their sum is read
    outputs = []
    for q_t, k_t, v_t, g in zip(qs, ks, vs, decays(log, len(qs)), strict=True):
        G1 = g**3 * G1 + g**2 * outer(k_t, apply(P, apply(SQ, k_t)))
        G2 = g**3 * G2 + g**2 * outer(apply(SK, q_t), apply(P, q_t))
        G3 = g**3 * G3 + g**2 * outer(apply(SK, apply(SQ.mT, k_t)), v_t)
        SK, SQ, P = g * SK + outer(k_t, k_t), g * SQ + outer(q_t, q_t), g * P + outer(k_t, v_t)
        read = apply(P, apply(SQ, apply(SK.mT, q_t)))
        outputs.append(read - apply(G1, q_t) - apply(G2, q_t) - apply(G3, q_t))
    F = SK.mT @ SQ @ P - G1 - G2 - G3
    return torch.stack(outputs, dim=1).flatten(2, 3), *(x.flatten(1, 2) for x in (SK, SQ, P, F))


def _compose(q, k, v, log, state: State, chunk_size, impl) -> Result:
    """Through the linear scan, each new triple named by its two or three newest indices.

    With the moments before token s, decayed once: `a = g LAx(q, k, k)`, `b = g LAx(q, k, v)`,
    `c = g k.LAx(k, q, q)`, `d = q.k`; then `o = LA(q, a, d v) + LA(q, k, c v + d b + d^2 v)`.
    """
    query_heads, widths = q.shape[2], (k.shape[-1], v.shape[-1])
    how = {"chunk_size": chunk_size, "impl": impl}
    SK, SQ, P, F = (None, None, None, None) if state is None else state
    both = None if SK is None or P is None else torch.cat((SK, P), dim=-1)
    both_values = torch.cat((k, v), dim=-1)
    read, both = scan(q, k, both_values, log_decay=log, initial_state=both, exclusive=True, **how)
    a, b = read.split(widths, dim=-1)
    SK, P = both.split(widths, dim=-1)
    k, v, log = (per_query(x, query_heads) for x in (k, v, log))
    kSQ, SQ = scan(k, q, q, log_decay=log, initial_state=SQ, exclusive=True, **how)
    c, d = dot(k, kSQ), dot(q, k)
    if log is not None:
        g = log.exp().unsqueeze(-1)
        a, b, c, log = g * a, g * b, g * c, 3 * log
    o1, F1 = scan(q, a, d * v, log_decay=log, initial_state=F, **how)
    o2, F2 = scan(q, k, c * v + d * b + d.square() * v, log_decay=log, initial_state=None, **how)
    return o1 + o2, SK, SQ, P, F1 + F2


def _scan(q, k, v, log, state: State, chunk_size) -> Result:
    """Through the associative operator with its dense maps."""
    if k.shape[-1] > monoid.MAX_KEY_DIM:
        raise ValueError(
            f"impl='scan' of hla3 variant='published' holds K^3 V numbers a segment and takes "
            f"K <= {monoid.MAX_KEY_DIM}, got K = {k.shape[-1]}; use impl='chunk'"
        )
    heads = k.shape[2]
    inputs = [grouped(x, heads) for x in (q, k, v, log)]
    initial = None
    if state is not None:
        start: list[Any] = [None if x is None else x[:, :1] for x in inputs]
        first = monoid.token(*start)
        SK, SQ, P, F = (as_segment(x, heads) for x in state)
        initial = monoid.identity(first)._replace(SK=SK, SQ=SQ, P=P, F=F)
    o, total = scan_tokens(
        monoid.HLA3_PUBLISHED,
        inputs,
        token=monoid.token,
        read=lambda x, q, *_: monoid.read(x, q),
        initial=initial,
        chunk_size=chunk_size,
    )
    return o.flatten(2, 3), *(ungrouped(x) for x in (total.SK, total.SQ, total.P, total.F))
