"""Small steps shared by the serial oracles of the forms."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn_cli.kernels.types import state_dtype


def start_state(state: Tensor | None, k: Tensor, value_dim: int) -> Tensor:
    """The carried state `[B, H, K, V]`, or zeros in the state dtype."""
    if state is not None:
        return state
    batch, _, heads, key_dim = k.shape
    return torch.zeros(batch, heads, key_dim, value_dim, dtype=state_dtype(k.dtype), device=k.device)


def token_masks(mask: Tensor | None, tokens: int) -> list[Tensor | None]:
    """One mask `[B]` a token, or None where nothing is padded."""
    return [None] * tokens if mask is None else list(mask.unbind(1))


def pick(real: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the sequences whose token is real, `old` in the others."""
    if real is None:
        return new
    return torch.where(real.view(-1, *(1,) * (new.dim() - 1)), new, old)
