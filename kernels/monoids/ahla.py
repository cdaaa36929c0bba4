"""Segments of asymmetric HLA: `P = sum k v^T`, `E = sum k (P^T q)^T`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, apply, decay_of, dot, neutral, outer, scale


class AhlaSegment(NamedTuple):
    """R `[..., K, K]`, `sum k q^T`, never decayed; P, E `[..., K, V]`; r `[...]`, the decay of P and E.

    R carries what the queries of a segment read from every P that came before. Both the P it meets and the
    E it makes lose exactly one factor per token, so R itself must not.
    """

    R: Tensor
    P: Tensor
    E: Tensor
    r: Tensor


def token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> AhlaSegment:
    """`(k q^T, k v^T, k (q.k) v^T, g)`; q, k `[..., K]`, v `[..., V]`, log_decay `[...]`."""
    return AhlaSegment(outer(k, q), outer(k, v), outer(dot(q, k) * k, v), decay_of(log_decay, k))


def combine(A: AhlaSegment, B: AhlaSegment) -> AhlaSegment:
    """A first: `R = RA + RB`, `P = rB PA + PB`, `E = rB EA + EB + RB (rB PA)`."""
    P = scale(B.r, A.P)
    return AhlaSegment(A.R + B.R, P + B.P, scale(B.r, A.E) + B.E + B.R @ P, A.r * B.r)


def identity(x: AhlaSegment) -> AhlaSegment:
    return neutral(x, ("r",))


def read(x: AhlaSegment, q: Tensor) -> Tensor:
    """`o = E^T q`."""
    return apply(x.E, q)


AHLA = Monoid("ahla", combine, identity)
