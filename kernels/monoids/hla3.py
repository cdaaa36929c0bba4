"""Segments of causal third-order HLA, `LA_h(q, LA_a(q, k, k), LA_p(q, k, v))`, with three decays."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, apply, decay_of, dot, neutral, outer, scale


class Hla3Segment(NamedTuple):
    """State form (SK, P, H), `H = sum_u (SK_u q_u)(P_u^T q_u)^T`; SQ, X, Y serve the combination only.

    SK, SQ and Y are `[..., K, K]`, P, X and H `[..., K, V]`; a, p, h `[...]` are the decays of SK, P and H.
    """

    SK: Tensor
    SQ: Tensor
    P: Tensor
    X: Tensor
    Y: Tensor
    H: Tensor
    a: Tensor
    p: Tensor
    h: Tensor


def token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None = None,
    log_p: Tensor | None = None,
    log_h: Tensor | None = None,
) -> Hla3Segment:
    """With `d = q.k`: `SQ = a p q q^T`, `X = a d q v^T`, `Y = p d k q^T`, `H = d^2 k v^T`."""
    a, p, h = decay_of(log_a, k), decay_of(log_p, k), decay_of(log_h, k)
    d = dot(q, k)
    return Hla3Segment(
        SK=outer(k, k),
        SQ=outer((a * p).unsqueeze(-1) * q, q),
        P=outer(k, v),
        X=outer(a.unsqueeze(-1) * d * q, v),
        Y=outer(p.unsqueeze(-1) * d * k, q),
        H=outer(d.square() * k, v),
        a=a,
        p=p,
        h=h,
    )


def combine(A: Hla3Segment, B: Hla3Segment) -> Hla3Segment:
    """A first::

        SK = aB SKA + SKB
        P  = pB PA + PB
        SQ = hB SQA + aA pA SQB
        X  = hB XA + aA (XB + SQB PA)
        Y  = hB YA + pA (YB + SKA SQB)
        H  = hB HA + HB + SKA XB + YB PA + SKA SQB PA

    SK is symmetric; it is read as `SK^T q` everywhere, so that gradients to a carried SK agree too.
    """
    X = B.X + B.SQ @ A.P
    return Hla3Segment(
        SK=scale(B.a, A.SK) + B.SK,
        SQ=scale(B.h, A.SQ) + scale(A.a * A.p, B.SQ),
        P=scale(B.p, A.P) + B.P,
        X=scale(B.h, A.X) + scale(A.a, X),
        Y=scale(B.h, A.Y) + scale(A.p, B.Y + A.SK.mT @ B.SQ),
        H=scale(B.h, A.H) + B.H + A.SK.mT @ X + B.Y @ A.P,
        a=A.a * B.a,
        p=A.p * B.p,
        h=A.h * B.h,
    )


def identity(x: Hla3Segment) -> Hla3Segment:
    return neutral(x, ("a", "p", "h"))


def read(x: Hla3Segment, q: Tensor) -> Tensor:
    """`o = H^T q`."""
    return apply(x.H, q)


HLA3 = Monoid("hla3", combine, identity)
