"""Moving between the public layout `[B, T, H, D]` and the layouts the implementations work in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels.types import state_dtype

LONGEST_CHUNK = 64
"""Longest chunk chosen for a scan: work inside a chunk grows with C, the loop over chunks with T / C."""


def choose_chunk_size(tokens: int, requested: int | None, *, longest: int = LONGEST_CHUNK) -> int:
    """Tokens a chunk: as asked for, else the split of T into equal chunks of at most `longest`.

    Equal chunks waste no padding: 73 tokens become two chunks of 37, not one of 64 and one of 9.

    >>> choose_chunk_size(73, None), choose_chunk_size(64, None), choose_chunk_size(5, None)
    (37, 64, 5)
    """
    if requested is not None:
        return min(requested, tokens)
    chunks = -(-tokens // longest)
    return -(-tokens // chunks)


def to_chunks(x: Tensor, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """`[B, T, H, D]` -> contiguous `[N, B, H, C, D]` in `dtype`, zero-padded at the end.

    Chunks come first, so that a loop over them works on contiguous slices.
    """
    return _ToChunks.apply(x, chunk_size, dtype)


def from_chunks(x: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """`[N, B, H, C, D]` -> contiguous `[B, T, H, D]` in `dtype`, the padding cut off."""
    return _FromChunks.apply(x, tokens, dtype)


class _ToChunks(torch.autograd.Function):
    """One copy for layout, padding and dtype together; the transpose of `_FromChunks`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk_size: int, dtype: torch.dtype) -> Tensor:
        ctx.tokens, ctx.dtype = x.shape[1], x.dtype
        return _chunked(x, chunk_size, dtype)

    @staticmethod
    def backward(ctx: Any, d_chunks: Tensor):  # type: ignore[override]
        return from_chunks(d_chunks, ctx.tokens, ctx.dtype), None, None


class _FromChunks(torch.autograd.Function):
    """The transpose of `_ToChunks`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
        ctx.chunk_size, ctx.dtype = x.shape[3], x.dtype
        return _unchunked(x, tokens, dtype)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor):  # type: ignore[override]
        return to_chunks(d_x, ctx.chunk_size, ctx.dtype), None, None


def _chunked(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    batch, tokens, heads, dim = x.shape
    whole, tail = divmod(tokens, size)
    chunks = x.new_empty(whole + bool(tail), batch, heads, size, dim, dtype=dtype)
    chunks[:whole] = x[:, : whole * size].unflatten(1, (whole, size)).permute(1, 0, 3, 2, 4)
    if tail:
        chunks[whole, :, :, :tail] = x[:, whole * size :].transpose(1, 2)
        chunks[whole, :, :, tail:] = 0
    return chunks


def _unchunked(chunks: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    _, batch, heads, size, dim = chunks.shape
    whole, tail = divmod(tokens, size)
    x = chunks.new_empty(batch, tokens, heads, dim, dtype=dtype)
    x[:, : whole * size].unflatten(1, (whole, size)).copy_(chunks[:whole].permute(1, 0, 3, 2, 4))
    if tail:
        x[:, whole * size :] = chunks[whole, :, :, :tail].transpose(1, 2)
    return x


def queries_to_chunks(q: Tensor, heads: int, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """`[B, T, Q, K]` -> `[N, B, H, G * C, K]`: the queries of one group share the chunk of their key head."""
    grouped = to_chunks(q, chunk_size, dtype)
    return grouped.unflatten(2, (heads, -1)).flatten(3, 4)


def queries_from_chunks(o: Tensor, chunk_size: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """`[N, B, H, G * C, D]` -> `[B, T, Q, D]`, the inverse of `queries_to_chunks`."""
    return from_chunks(o.unflatten(3, (-1, chunk_size)).flatten(2, 3), tokens, dtype)


def decay_to_chunks(log_decay: Tensor, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """`[B, T, H]` -> `[N, B, H, C]`; padding tokens do not decay."""
    return to_chunks(log_decay.unsqueeze(-1), chunk_size, dtype).squeeze(-1)


def time_first(x: Tensor) -> tuple[Tensor, ...]:
    """`[B, T, H, D]` -> T tensors `[B, H, D]` in the state dtype, for the serial loops."""
    return x.to(state_dtype(x.dtype)).transpose(0, 1).contiguous().unbind(0)


def queries_time_first(q: Tensor, heads: int) -> tuple[Tensor, ...]:
    """`[B, T, Q, K]` -> T tensors `[B, H, G, K]` in the state dtype."""
    return tuple(x.unflatten(1, (heads, q.shape[2] // heads)) for x in time_first(q))


def stack_tokens(outputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """T tensors `[B, H, G, V]` -> `[B, T, Q, V]`."""
    return torch.stack(outputs, dim=1).flatten(2, 3).to(dtype)


def flip_log_decay(log_decay: Tensor, *, shift: bool) -> tuple[Tensor, Tensor | None]:
    """Log-decays `[B, T, H]` for a scan on flipped tokens, and the factor left for the final state.

    With `shift`, each flipped token gets the decay of the token before it (in reversed time), the first none,
    and the decay of the last one, `[B, H, 1, 1]`, is left over.
    """
    flipped = log_decay.flip(1)
    if not shift:
        return flipped, None
    shifted = torch.nn.functional.pad(flipped[:, :-1], (0, 0, 1, 0))
    return shifted, flipped[:, -1].exp()[..., None, None]
