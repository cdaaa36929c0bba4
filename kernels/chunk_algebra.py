"""Steps that the chunkwise implementations share: carrying a state over chunks, masks, and grouped rows.

Rows of queries come as `G * C`: the C tokens of a chunk for each of the G query heads of one key head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FEW_TOKENS = 4
"""Chunks up to this length carry a state without a K x K map."""


def carry(writes: Tensor, total: Tensor | None, initial_state: Tensor, *, reverse: bool = False) -> Tensor:
    """The state at every chunk boundary, `[N + 1, B, H, K, V]`: chunk n lies between boundaries n and n + 1.

    `S_{n+1} = total_n S_n + writes_n`; in reverse the state enters behind the last chunk and
    `S_n = total_n S_{n+1} + writes_n`.
    """
    states = writes.new_empty(writes.shape[0] + 1, *writes.shape[1:])
    for n, before, after in _boundaries(states, initial_state, reverse):
        if total is None:
            torch.add(before, writes[n], out=after)
        else:
            torch.addcmul(writes[n], total[n, ..., None, None], before, out=after)
    return states


def advance_states(
    initial_state: Tensor,
    total: Tensor | None,
    writing: Tensor,
    residual: Tensor,
    reading: Tensor,
    *,
    sign: int = 1,
    extra: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """The state at every chunk boundary where what a chunk writes depends on the state it meets.

    In chunk n, with S the state it meets::

        S' = total_n S + writing_n (residual_n + sign reading_n S) + extra_n

    writing `[N, B, H, K, C]`, reading `[N, B, H, C, K]`, residual `[N, B, H, C, V]`; boundaries as in `carry`.
    Every chunk is one affine map of the state: all maps are built at once, and the loop holds one product each.
    Chunks of a few tokens, of a decoding step above all, take two products as the formula has them: less work
    there, and a map would round the whole state once more for every few tokens.
    """
    chunks, batch, heads, key_dim, size = writing.shape
    states = residual.new_empty(chunks + 1, batch, heads, key_dim, residual.shape[-1])
    boundaries = _boundaries(states.flatten(1, 2), initial_state.flatten(0, 1), reverse)
    if size <= FEW_TOKENS:
        writing, residual, reading = (x.flatten(1, 2) for x in (writing, residual, reading))
        for n, before, after in boundaries:
            kept = before if total is None else before * total[n].flatten()[:, None, None]
            values = torch.baddbmm(residual[n], reading[n], before, alpha=sign)
            torch.baddbmm(kept, writing[n], values, out=after)
            if extra is not None:
                after += extra[n].flatten(0, 1)
        return states
    keep = torch.eye(key_dim, dtype=writing.dtype, device=writing.device).expand(chunks, batch, heads, -1, -1)
    if total is not None:
        keep = keep * total[..., None, None]
    maps = list(add_product(keep, writing, reading, sign=sign).flatten(1, 2))
    written = states[:-1] if reverse else states[1:]
    torch.bmm(writing.flatten(0, 2), residual.flatten(0, 2), out=written.flatten(0, 2))
    if extra is not None:
        written += extra
    for n, before, after in boundaries:
        after.baddbmm_(maps[n], before)
    return states


def _boundaries(states: Tensor, initial_state: Tensor, reverse: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Chunk by chunk: its number, the state it meets and the place of the state it leaves."""
    chunks = states.shape[0] - 1
    # a plain list: in the loop a view of every state would cost as much as its product
    state = list(states)
    state[chunks if reverse else 0].copy_(initial_state)
    for n in reversed(range(chunks)) if reverse else range(chunks):
        yield (n, state[n + 1], state[n]) if reverse else (n, state[n], state[n + 1])


def add_product(base: Tensor, left: Tensor, right: Tensor, *, sign: int = 1) -> Tensor:
    """`base + sign * left @ right` in one pass, all `[N, B, H, *, *]`."""
    flat = torch.baddbmm(base.flatten(0, 2), left.flatten(0, 2), right.flatten(0, 2), alpha=sign)
    return flat.view(base.shape)


def masked(scores: Tensor, weights: Tensor | None, diagonal: int) -> Tensor:
    """Causal mask and decay on scores `[..., G * C, C]`, in place: they are the largest tensors of a chunk.

    The G query heads share their key head's weights.
    """
    grouped = scores.unflatten(-2, (-1, scores.shape[-1]))
    if weights is None:
        grouped.tril_(diagonal)
    else:
        grouped *= weights.unsqueeze(-3)
    return scores


def sum_groups(x: Tensor, size: int) -> Tensor:
    """`[..., G * C, *]` -> `[..., C, *]` given C, summed over the query heads of a group; `*` is one dimension."""
    return x.unflatten(-2, (-1, size)).sum(-3)


def scale_rows(x: Tensor, factors: Tensor | None) -> Tensor:
    """Rows `[..., G * C, D]` times factors `[..., C]`."""
    if factors is None:
        return x
    return (x.unflatten(-2, (-1, factors.shape[-1])) * factors[..., None, :, None]).flatten(-3, -2)
