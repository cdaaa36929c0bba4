"""Segments of the penalty gain: the mass `P = sum u u^T` is additive, and A is the inverse of lambda0 I + P."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, neutral, outer


class PenaltySegment(NamedTuple):
    """P `[..., K, K]`, the penalty mass of a segment, without lambda0 I."""

    P: Tensor


def token(u: Tensor) -> PenaltySegment:
    """One penalty direction, u `[..., K]`."""
    return PenaltySegment(outer(u, u))


def combine(A: PenaltySegment, B: PenaltySegment) -> PenaltySegment:
    """Additive: `P = PA + PB`.

    >>> import torch
    >>> combine(token(torch.ones(1)), token(torch.full((1,), 2.0))).P.item()
    5.0
    """
    return PenaltySegment(A.P + B.P)


def identity(x: PenaltySegment) -> PenaltySegment:
    return neutral(x, ())


PENALTY = Monoid("penalty", combine, identity)
