"""Rotary positions (Su et al. 2021) on queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + d/2}) of every head by `position * BASE^(-2i/d)`.

    x `[B, T, H, d]`, d even; positions `[B, T]`. Angles are float32 or better whatever the dtype of x.

    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> rotate(x, torch.tensor([[0]])).flatten().tolist()
    [1.0, 0.0]
    """
    half = x.shape[-1] // 2
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequency = BASE ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angle = positions.to(dtype)[:, :, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
