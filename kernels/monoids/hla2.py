"""Segments of second-order HLA, in both state forms, with every decay that each can express.

`S = sum k k^T` is the key moment. The (S, C, H) form keeps `H = sum_j S_j q_j v_j^T` itself; the paper's
form keeps `C = sum q v^T` and the correction G, with `H = S C - G`. Normalised read-outs use the same
segments with a column of ones appended to v (the paper's m and h are that column of C and G).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, apply, decay_of, dot, neutral, outer, scale


class Hla2Segment(NamedTuple):
    """State form (S, H): S `[..., K, K]`, C and H `[..., K, V]`; ra and rb `[...]`, decays of S and of H.

    C is no state: it carries what the tokens of a segment will add to H for every key that came before.
    """

    S: Tensor
    C: Tensor
    H: Tensor
    ra: Tensor
    rb: Tensor


def token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None = None,
    log_b: Tensor | None = None,
    ridge: float = 0.0,
) -> Hla2Segment:
    """`(k k^T, ra q v^T, (k (k.q) + ridge q) v^T, ra, rb)`; q, k `[..., K]`, v `[..., V]`, logs `[...]`."""
    ra, rb = decay_of(log_a, k), decay_of(log_b, k)
    gain = dot(k, q) * k
    if ridge:
        gain = gain + ridge * q
    return Hla2Segment(outer(k, k), outer(ra.unsqueeze(-1) * q, v), outer(gain, v), ra, rb)


def combine(A: Hla2Segment, B: Hla2Segment) -> Hla2Segment:
    """A first: `S = raB SA + SB`, `C = rbB CA + raA CB`, `H = rbB HA + HB + SA CB`.

    S is symmetric; it is read as `S^T q` everywhere, so that gradients to a carried S agree too.
    """
    return Hla2Segment(
        S=scale(B.ra, A.S) + B.S,
        C=scale(B.rb, A.C) + scale(A.ra, B.C),
        H=scale(B.rb, A.H) + B.H + A.S.mT @ B.C,
        ra=A.ra * B.ra,
        rb=A.rb * B.rb,
    )


def identity(x: Hla2Segment) -> Hla2Segment:
    return neutral(x, ("ra", "rb"))


HLA2 = Monoid("hla2", combine, identity)


class Hla2PaperSegment(NamedTuple):
    """The paper's form (S, C, G): S `[..., K, K]`, C, G `[..., K, V]`; rs, rc `[...]`, decays of S and C.

    G decays by `rs rc`, so `moment` is rs = rc = g and `cascade` is rs = g, rc = 1. `mask` would need
    rc = 1 / g and has no such form.
    """

    S: Tensor
    C: Tensor
    G: Tensor
    rs: Tensor
    rc: Tensor


def token_paper(
    q: Tensor, k: Tensor, v: Tensor, log_s: Tensor | None = None, log_c: Tensor | None = None
) -> Hla2PaperSegment:
    """`(k k^T, q v^T, 0, rs, rc)`: a lone token has nothing to correct."""
    C = outer(q, v)
    return Hla2PaperSegment(outer(k, k), C, C.new_zeros(C.shape), decay_of(log_s, k), decay_of(log_c, k))


def combine_paper(A: Hla2PaperSegment, B: Hla2PaperSegment) -> Hla2PaperSegment:
    """A first: `S = rsB SA + SB`, `C = rcB CA + CB`, `G = rsB rcB GA + GB + SB (rcB CA)`.

    The paper's decayed operator multiplies GA by one decay only, which is not associative (`published.py`).
    """
    C = scale(B.rc, A.C)
    return Hla2PaperSegment(
        S=scale(B.rs, A.S) + B.S,
        C=C + B.C,
        G=scale(B.rs * B.rc, A.G) + B.G + B.S @ C,
        rs=A.rs * B.rs,
        rc=A.rc * B.rc,
    )


def identity_paper(x: Hla2PaperSegment) -> Hla2PaperSegment:
    return neutral(x, ("rs", "rc"))


HLA2_PAPER = Monoid("hla2_paper", combine_paper, identity_paper)


class Hla2PublishedSegment(NamedTuple):
    """The paper's decayed serial update (S, C, G), made associative: R `[..., K, K]`, r `[...]` one decay.

    `G_t = g_t G_{t-1} + k_t k_t^T C_{t-1}`: a C from before the segment loses every factor but that of the
    token that reads it, so `R = sum_s (r / g_s) k_s k_s^T` must be carried beside S.
    """

    S: Tensor
    C: Tensor
    G: Tensor
    R: Tensor
    r: Tensor


def token_published(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Hla2PublishedSegment:
    """`(k k^T, q v^T, 0, k k^T, g)`."""
    S, C = outer(k, k), outer(q, v)
    return Hla2PublishedSegment(S, C, C.new_zeros(C.shape), S, decay_of(log_decay, k))


def combine_published(A: Hla2PublishedSegment, B: Hla2PublishedSegment) -> Hla2PublishedSegment:
    """A first: `S, C: rB XA + XB`, `G = rB GA + GB + RB CA`, `R = rB RA + rA RB`.

    This is what the published recurrence really computes; the operator printed beside it is another one.
    """
    return Hla2PublishedSegment(
        S=scale(B.r, A.S) + B.S,
        C=scale(B.r, A.C) + B.C,
        G=scale(B.r, A.G) + B.G + B.R @ A.C,
        R=scale(B.r, A.R) + scale(A.r, B.R),
        r=A.r * B.r,
    )


def identity_published(x: Hla2PublishedSegment) -> Hla2PublishedSegment:
    return neutral(x, ("r",))


HLA2_PUBLISHED = Monoid("hla2_published", combine_published, identity_published)


def read(x: Hla2Segment, q: Tensor) -> Tensor:
    """`o = H^T q`."""
    return apply(x.H, q)


def read_paper(
    x: Hla2PaperSegment | Hla2PublishedSegment, q: Tensor, ridge: float = 0.0, masked: bool = True
) -> Tensor:
    """`o = C^T (S + ridge I) q - G^T q`; without the mask G is left out."""
    u = apply(x.S, q)
    if ridge:
        u = u + ridge * q
    o = apply(x.C, u)
    return o - apply(x.G, q) if masked else o
