"""Decay factors inside a chunk, from sums of log-decays over segments and never from their ratios.

`exp(G_t - G_s)` with two long cumulative sums loses digits once one strong decay sits in the chunk, and
`exp(G_t) * exp(-G_s)` overflows. Summing only the log-decays between s and t does neither.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ChunkDecay(NamedTuple):
    """Decay factors of every chunk, each in (0, 1].

    pair    [..., C, C]  from the write of token s to the read of token t >= s (zero above the diagonal)
    before  [..., C, C]  the same for a read before token t's own decay and write (zero on the diagonal too)
    start   [..., C]     from the start of the chunk to the read of token t
    ahead   [..., C]     the same for a read before token t's own decay
    end     [..., C]     from the write of token s to the end of the chunk
    total   [...]        over the whole chunk
    """

    pair: Tensor
    before: Tensor
    start: Tensor
    ahead: Tensor
    end: Tensor
    total: Tensor


def chunk_decay(log_decay: Tensor) -> ChunkDecay:
    """The factors of log-decays `[..., C]`.

    >>> chunk_decay(torch.log(torch.tensor([0.5, 0.5]))).pair
    tensor([[1.0000, 0.0000],
            [0.5000, 1.0000]])
    """
    size = log_decay.shape[-1]
    segments = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).tril(-1).cumsum(-2)
    pair = segments.exp().tril()
    before = shift_rows(pair)
    start = log_decay.cumsum(-1).exp()
    ahead = torch.nn.functional.pad(start[..., :-1], (1, 0), value=1.0)
    return ChunkDecay(pair, before, start, ahead, pair[..., -1, :], start[..., -1])


def shift_rows(matrix: Tensor) -> Tensor:
    """Row t becomes row t - 1; the first row becomes zero."""
    return torch.nn.functional.pad(matrix[..., :-1, :], (0, 0, 1, 0))


def drop_first_row(pairs: Tensor) -> Tensor:
    """The transpose of `shift_rows`: row t becomes row t + 1, the last row zero."""
    return torch.nn.functional.pad(pairs[..., 1:, :], (0, 0, 0, 1))


def later(x: Tensor, *, strict: bool = False) -> Tensor:
    """Sums over tokens t >= r (or t > r) along the last dimension."""
    total = x.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(total[..., 1:], (0, 1)) if strict else total


def earlier(x: Tensor) -> Tensor:
    """Sums over tokens s < r along the last dimension."""
    return torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))


def across(pairs: Tensor) -> Tensor:
    """Sums over t >= r > s of `pairs[t, s]`, `[..., C, C]` -> `[..., C]`: what token r's log-decay acts on."""
    return pairs.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
