"""Segments of third-order HLA as published, with the dense segment maps `M^KQP[Z] = sum DK Z DP`.

`DK = k k^T`, `DQ = q q^T`, `DP = k v^T`. It sums the index triples whose maximum is attained at least twice,
which is not the causal third order of the paper's Theorem 7.1. The map holds K^3 V numbers a segment: fine
for checking the operator at small K, never for training. With a column of ones appended to v, M also holds
`M^KQm`, and F holds eta.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, apply, decay_of, dot, neutral, outer, scale

MAX_KEY_DIM = 16
"""Largest K for which the dense maps are offered."""


class Hla3PublishedSegment(NamedTuple):
    """SK, SQ, U `[..., K, K]`; P, R, F `[..., K, V]`; M `[..., K, K, K, V]`; r `[...]`, decay of a moment."""

    SK: Tensor
    SQ: Tensor
    P: Tensor
    R: Tensor
    U: Tensor
    M: Tensor
    F: Tensor
    r: Tensor


def token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Hla3PublishedSegment:
    """With `d = q.k`: `R = d q v^T`, `U = d k q^T`, `M = k k^T (x) k v^T`, `F = d^2 k v^T`."""
    d, DK, DP = dot(q, k), outer(k, k), outer(k, v)
    return Hla3PublishedSegment(
        SK=DK,
        SQ=outer(q, q),
        P=DP,
        R=outer(d * q, v),
        U=outer(d * k, q),
        M=DK.unsqueeze(-1).unsqueeze(-1) * DP.unsqueeze(-3).unsqueeze(-4),
        F=outer(d.square() * k, v),
        r=decay_of(log_decay, k),
    )


def combine(A: Hla3PublishedSegment, B: Hla3PublishedSegment) -> Hla3PublishedSegment:
    """A first, r the decay of B: moments `r XA + XB`, pairs (R, U, M) `r^2 XA + XB`, and
    `F = r^3 FA + FB + r (SKA RB + MB[SQA] + UB PA)`."""
    r, r2 = B.r, B.r.square()
    mapped = torch.einsum("...abce,...bc->...ae", B.M, A.SQ)
    return Hla3PublishedSegment(
        SK=scale(r, A.SK) + B.SK,
        SQ=scale(r, A.SQ) + B.SQ,
        P=scale(r, A.P) + B.P,
        R=scale(r2, A.R) + B.R,
        U=scale(r2, A.U) + B.U,
        M=r2[..., None, None, None, None] * A.M + B.M,
        F=scale(r2 * r, A.F) + B.F + scale(r, A.SK.mT @ B.R + mapped + B.U @ A.P),
        r=A.r * B.r,
    )


def identity(x: Hla3PublishedSegment) -> Hla3PublishedSegment:
    return neutral(x, ("r",))


def read(x: Hla3PublishedSegment, q: Tensor) -> Tensor:
    """`o = F^T q`."""
    return apply(x.F, q)


HLA3_PUBLISHED = Monoid("hla3_published", combine, identity)
