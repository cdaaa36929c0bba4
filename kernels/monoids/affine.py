"""Segments of the delta scan (DeltaNet, VLA, RLS): affine maps `S -> F S + Y` of the state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, apply, decay_of, neutral, outer, scale


class AffineSegment(NamedTuple):
    """`F = r I + E` is what a segment does to the state it meets, `Y` what it adds.

    r `[...]`, product of the decays; E `[..., K, K]`; Y `[..., K, V]`. Kept apart from the identity, E holds digits
    that F would round away: a write of size 0.01 in float32 loses two of seven beside a 1 on the diagonal.
    """

    r: Tensor
    E: Tensor
    Y: Tensor


def token(p: Tensor, a: Tensor, v: Tensor, log_decay: Tensor | None = None) -> AffineSegment:
    """`F = g I - a p^T`, `Y = a v^T`; p, a `[..., K]`, v `[..., V]`, log_decay `[...]`."""
    return AffineSegment(decay_of(log_decay, p), -outer(a, p), outer(a, v))


def combine(A: AffineSegment, B: AffineSegment) -> AffineSegment:
    """A first: `F = FB FA`, `Y = FB YA + YB`.

    >>> import torch
    >>> one = torch.ones(1)
    >>> combine(token(one, one, 3 * one), token(one, one, 5 * one)).Y.item()
    5.0
    """
    return AffineSegment(
        r=A.r * B.r,
        E=scale(B.r, A.E) + scale(A.r, B.E) + B.E @ A.E,
        Y=scale(B.r, A.Y) + B.Y + B.E @ A.Y,
    )


def identity(x: AffineSegment) -> AffineSegment:
    return neutral(x, ("r",))


def matrix(x: AffineSegment) -> Tensor:
    """F itself, `[..., K, K]`."""
    return scale(x.r, torch.eye(x.E.shape[-1], dtype=x.E.dtype, device=x.E.device)) + x.E


def read(x: AffineSegment, q: Tensor) -> Tensor:
    """`o = Y^T q`, for a segment that starts from an empty state or from a carried one."""
    return apply(x.Y, q)


AFFINE = Monoid("affine", combine, identity)
