"""The inverse of `M = lambda0 I + P`, where it is taken anew, and how a call starts from a carried state."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn_cli.kernels.types import PenaltyState, state_dtype

REFRESH = 64
"""Tokens added to A by rank-one updates before it is inverted from P again."""


def regularised(mass: Tensor, lambda0: float) -> Tensor:
    """`M = lambda0 I + P`, `[..., K, K]`."""
    return mass + lambda0 * torch.eye(mass.shape[-1], dtype=mass.dtype, device=mass.device)


def inverse(mass: Tensor, lambda0: float) -> Tensor:
    """`A = (lambda0 I + P)^-1` by Cholesky, `[..., K, K]`, symmetric."""
    return torch.cholesky_inverse(torch.linalg.cholesky(regularised(mass, lambda0)))


def start(u: Tensor, lambda0: float, state: PenaltyState | None) -> tuple[Tensor, Tensor, int]:
    """P, A and the age of A at the first token of a call, in the state dtype."""
    batch, _, heads, key_dim = u.shape
    dtype = state_dtype(u.dtype)
    if state is None:
        mass = torch.zeros(batch, heads, key_dim, key_dim, dtype=dtype, device=u.device)
        eye = torch.eye(key_dim, dtype=dtype, device=u.device) / lambda0
        return mass, eye.expand_as(mass), 0
    if state.age >= REFRESH:
        return state.mass, inverse(state.mass, lambda0), 0
    return state.mass, state.inverse, state.age
