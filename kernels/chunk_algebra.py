"""Steps that the chunkwise implementations share: carrying a state over chunks, masks, and grouped rows.

Rows of queries come as `G * C`: the C tokens of a chunk for each of the G query heads of one key head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def carry(
    writes: Tensor, total: Tensor | None, initial_state: Tensor, *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The state at the start of every chunk, `[B, H, N, K, V]`, and after the last one.

    `S_{n+1} = total_n S_n + writes_n`; in reverse the state enters behind the last chunk.
    """
    starts = torch.empty_like(writes)
    state = initial_state
    chunks = range(writes.shape[2])
    for n in reversed(chunks) if reverse else chunks:
        starts[:, :, n] = state
        state = writes[:, :, n] + (state if total is None else total[:, :, n, None, None] * state)
    return starts, state


def masked(scores: Tensor, weights: Tensor | None, diagonal: int) -> Tensor:
    """Causal mask and decay on scores `[..., G * C, C]`; the G query heads share their key head's weights."""
    size = scores.shape[-1]
    grouped = scores.unflatten(-2, (-1, size))
    grouped = grouped.tril(diagonal) if weights is None else grouped * weights.unsqueeze(-3)
    return grouped.flatten(-3, -2)


def sum_groups(x: Tensor, size: int) -> Tensor:
    """`[..., G * C, *]` -> `[..., C, *]` given C, summed over the query heads of a group; `*` is one dimension."""
    return x.unflatten(-2, (-1, size)).sum(-3)


def scale_rows(x: Tensor, factors: Tensor | None) -> Tensor:
    """Rows `[..., G * C, D]` times factors `[..., C]`."""
    if factors is None:
        return x
    return (x.unflatten(-2, (-1, factors.shape[-1])) * factors[..., None, :, None]).flatten(-3, -2)
