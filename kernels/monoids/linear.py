"""Segments of the linear scan: `S_t = g_t S_{t-1} + k_t v_t^T`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn_cli.kernels.monoids.base import Monoid, decay_of, neutral, outer, scale


class LinearSegment(NamedTuple):
    """r `[...]`, product of the decays; S `[..., K, V]`, the state a segment leaves from an empty start."""

    r: Tensor
    S: Tensor


def token(k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> LinearSegment:
    """One token, k `[..., K]`, v `[..., V]`, log_decay `[...]`."""
    return LinearSegment(decay_of(log_decay, k), outer(k, v))


def combine(A: LinearSegment, B: LinearSegment) -> LinearSegment:
    """A first: `r = rA rB`, `S = rB SA + SB`.

    >>> import torch
    >>> one, two = torch.ones(1), torch.full((1,), 2.0)
    >>> combine(token(one, one), token(one, two)).S.item()
    3.0
    """
    return LinearSegment(A.r * B.r, scale(B.r, A.S) + B.S)


def identity(x: LinearSegment) -> LinearSegment:
    return neutral(x, ("r",))


LINEAR = Monoid("linear", combine, identity)
