"""Formulas that the two papers print, each beside what is true: computed, compared and named, never used.

Every function takes tensors `[B, T, H, D]` with as many key heads as query heads (float64 is meant) and returns the
result as printed, the exact one, what this library computes instead, and one line of why the first differs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.forms.ahla import ahla
from linattn_cli.kernels.forms.hla2 import hla2
from linattn_cli.kernels.forms.hla3 import hla3
from linattn_cli.kernels.monoids import ahla as ahla_segments
from linattn_cli.kernels.monoids import hla2 as hla2_segments
from linattn_cli.kernels.monoids.base import Monoid, apply, outer, scale
from linattn_cli.kernels.monoids.blelloch import reduce


class Published(NamedTuple):
    """published, exact, corrected: tensors of one shape; why: one line.

    truth is what `corrected` is judged by where that is not `exact`, as for an operator judged by itself.
    """

    published: Tensor
    exact: Tensor
    corrected: Tensor
    why: str
    truth: Tensor | None = None


def _last_read(q: Tensor, state: Tensor) -> Tensor:
    """The last token's output from a state `[B, 1, H, K, V]`."""
    return apply(state[:, 0], q[:, -1])


def _weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthd,bshd->bhts", q, k)


def _decay_matrix(log_decay: Tensor) -> Tensor:
    """`[B, H, T, T]`, `exp(G_t - G_s)` for s <= t: float64 only, for the sums below."""
    total = log_decay.cumsum(1).transpose(1, 2)
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()


def hla2_decayed_serial(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Published:
    """HLA section 4.3 and Algorithm 1, `G = g G + k (k^T C')`, against the moment-decayed masked sum."""
    QK, D = _weights(q, k), _decay_matrix(log_decay)
    inner = torch.einsum("bhti,bhji,bhij->bhtj", D * QK, QK, torch.ones_like(QK).triu())
    exact = torch.einsum("bhtj,bhtj,bjhe->bthe", D, inner, v)
    return Published(
        hla2(q, k, v, log_decay=log_decay, decay="published", impl="reference").o,
        exact,
        hla2(q, k, v, log_decay=log_decay, decay="moment").o,
        "G decays by g where S C decays by g^2, so pairs with i > j leak in with negative weight",
    )


def hla2_decayed_operator(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Published:
    """HLA section 4.2, the decayed operator, tree against left fold: an associative operator gives one result."""

    def combine(A: hla2_segments.Hla2PaperSegment, B: hla2_segments.Hla2PaperSegment):
        C = scale(B.rc, A.C)
        G = scale(B.rs, A.G) + B.G + B.S @ C  # one decay on G, as printed
        return hla2_segments.Hla2PaperSegment(scale(B.rs, A.S) + B.S, C + B.C, G, A.rs * B.rs, A.rc * B.rc)

    tokens = hla2_segments.token_paper(q, k, v, log_decay, log_decay)
    printed = Monoid("hla2 as printed", combine, hla2_segments.identity_paper)
    left = fold(combine, _singles(tokens))
    corrected = reduce(hla2_segments.HLA2_PAPER, tokens)
    serial = fold(hla2_segments.combine_paper, _singles(tokens))
    return Published(
        reduce(printed, tokens).G,
        left.G,
        corrected.G,
        "not associative: G needs the product of the decays of S and C; with one decay the tree is not the left fold",
        serial.G,
    )


def ahla_decayed_operator(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Published:
    """HLA section 6, the decayed operator with `R = rB RA + RB`, by a tree, against the serial recurrence."""

    def combine(A: ahla_segments.AhlaSegment, B: ahla_segments.AhlaSegment):
        P = scale(B.r, A.P)
        R = scale(B.r, A.R) + B.R  # decayed, as printed
        return ahla_segments.AhlaSegment(R, P + B.P, scale(B.r, A.E) + B.E + B.R @ P, A.r * B.r)

    tokens = ahla_segments.token(q, k, v, log_decay)
    printed = Monoid("ahla as printed", combine, ahla_segments.identity)
    W = _weights(q, k) * _decay_matrix(log_decay)
    exact = torch.einsum("bhi,bhij,bjhe->bhe", W[:, :, -1], W, v)
    return Published(
        _last_read(q, reduce(printed, tokens).E),
        exact,
        ahla(q, k, v, log_decay=log_decay, decay="cascade").o[:, -1],
        "R must not decay: P met and E made lose one factor a token already; right only for segments of one token",
    )


def hla3_theorem_7_1(q: Tensor, k: Tensor, v: Tensor) -> Published:
    """HLA Theorem 7.1 and Algorithm 3, said to be the causal `W W^T W V`."""
    W = _weights(q, k).tril()
    second = (W @ W.mT).tril()
    exact = torch.einsum("bhtu,bhuj,bjhe->bthe", second, W, v)
    return Published(
        hla3(q, k, v, variant="published", impl="reference").o,
        exact,
        hla3(q, k, v, variant="causal").o,
        "the streaming form sums the triples whose maximum is attained at least twice, not those with i, j <= u <= t",
    )


def vla_proposition_2(a: Tensor, k: Tensor) -> Published:
    """VLA Proposition 2, `|I - a k^T| = 1` for unit a and k `[..., K]`, against the singular values."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    exact = torch.linalg.matrix_norm(eye - outer(a, k), ord=2)
    return Published(
        torch.ones_like(exact),
        exact,
        jacobian_norm((a * k).sum(-1)),
        "the spectral radius is 1; the norm is (1 + sqrt(5 - 4 a.k)) / 2, which is 1 only where a = k",
    )


def jacobian_norm(cosine: Tensor) -> Tensor:
    """Spectral norm of `I - a k^T` for unit a and k with `a.k = cosine`.

    >>> jacobian_norm(torch.tensor([1.0, -1.0])).tolist()
    [1.0, 2.0]
    """
    return (1 + (5 - 4 * cosine).sqrt()) / 2


def _singles(elements: NamedTuple) -> list:
    tokens = elements[0].shape[1]
    return [type(elements)(*(x[:, t : t + 1] for x in elements)) for t in range(tokens)]


class Claim(NamedTuple):
    """One printed formula: where it stands, how it is judged, and the function that compares it."""

    name: str
    source: str
    verdict: str
    compare: Callable[..., Published]
    decayed: bool = False


CLAIMS = (
    Claim("hla2 decayed serial", "HLA section 4.3, Algorithm 1", "differs", hla2_decayed_serial, True),
    Claim("hla2 decayed operator", "HLA section 4.2", "not associative", hla2_decayed_operator, True),
    Claim("ahla decayed operator", "HLA section 6", "differs", ahla_decayed_operator, True),
    Claim("hla3 theorem 7.1", "HLA Theorem 7.1, Algorithm 3", "differs", hla3_theorem_7_1),
    Claim("vla proposition 2", "VLA Proposition 2", "differs", vla_proposition_2),
)
"""What `verify-scan --published` lists."""
