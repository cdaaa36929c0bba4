"""Segments of the delta scan (DeltaNet, VLA, RLS): affine maps `S -> F S + Y` of the state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, decay_of, outer, scale


class AffineSegment(NamedTuple):
    """F `[..., K, K]`, what a segment does to the state it meets; Y `[..., K, V]`, what it adds."""

    F: Tensor
    Y: Tensor


def token(p: Tensor, a: Tensor, v: Tensor, log_decay: Tensor | None = None) -> AffineSegment:
    """`F = g I - a p^T`, `Y = a v^T`; p, a `[..., K]`, v `[..., V]`, log_decay `[...]`."""
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return AffineSegment(scale(decay_of(log_decay, p), eye) - outer(a, p), outer(a, v))


def combine(A: AffineSegment, B: AffineSegment) -> AffineSegment:
    """A first: `F = FB FA`, `Y = FB YA + YB`.

    >>> import torch
    >>> one = torch.ones(1)
    >>> combine(token(one, one, 3 * one), token(one, one, 5 * one)).Y.item()
    5.0
    """
    return AffineSegment(B.F @ A.F, B.F @ A.Y + B.Y)


def identity(x: AffineSegment) -> AffineSegment:
    eye = torch.eye(x.F.shape[-1], dtype=x.F.dtype, device=x.F.device)
    return AffineSegment(eye.expand_as(x.F), torch.zeros_like(x.Y))


AFFINE = Monoid("affine", combine, identity)
