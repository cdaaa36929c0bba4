"""The chunkwise linear scan in PyTorch: exact, differentiable, on CPU and CUDA. Derivation: README.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn_cli.kernels.chunk_algebra import add_product, carry, masked, scale_rows, sum_groups
from linattn_cli.kernels.decay import ChunkDecay, across, chunk_decay, drop_first_row, earlier, later
from linattn_cli.kernels.layout import (
    choose_chunk_size,
    decay_to_chunks,
    flip_log_decay,
    queries_from_chunks,
    queries_to_chunks,
    to_chunks,
)
from linattn_cli.kernels.types import state_dtype


def linear_scan_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    exclusive: bool,
    reverse: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """`linear_scan` in chunks; see its docstring for the recurrence and shapes."""
    if reverse:
        return _reversed(q, k, v, log_decay, initial_state, exclusive, chunk_size)
    batch, tokens, heads, key_dim = k.shape
    size = choose_chunk_size(tokens, chunk_size)
    dtype = state_dtype(k.dtype)
    if initial_state is None:
        initial_state = k.new_zeros(batch, heads, key_dim, v.shape[3], dtype=dtype)
    o, final_state = _LinearChunk.apply(
        queries_to_chunks(q, heads, size, dtype),
        to_chunks(k, size, dtype),
        to_chunks(v, size, dtype),
        None if log_decay is None else decay_to_chunks(log_decay, size, dtype),
        initial_state,
        exclusive,
    )
    return queries_from_chunks(o, size, tokens, v.dtype), final_state


def _reversed(q, k, v, log_decay, initial_state, exclusive, chunk_size) -> tuple[Tensor, Tensor]:
    """The adjoint direction is the forward scan on flipped tokens.

    A token decays the state as it leaves, so a read that includes the token sees the decay of the token
    before it in reversed time, and the last decay falls on the final state.
    """
    leaving = None
    if log_decay is not None:
        log_decay, leaving = flip_log_decay(log_decay.to(state_dtype(k.dtype)), shift=not exclusive)
    o, final_state = linear_scan_chunk(
        q.flip(1),
        k.flip(1),
        v.flip(1),
        log_decay=log_decay,
        initial_state=initial_state,
        exclusive=exclusive,
        reverse=False,
        chunk_size=chunk_size,
    )
    return o.flip(1), final_state if leaving is None else leaving * final_state


class _LinearChunk(torch.autograd.Function):
    """Chunked tensors q `[N, B, H, G C, K]`, k `[N, B, H, C, K]`, v `[N, B, H, C, V]`, log-decay `[N, B, H, C]`.

    The backward recomputes the scores and runs the same two sweeps: one over chunks for the gradient of the
    state, one batch of matrix products for everything else.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, log_decay, initial_state, exclusive: bool):
        decay = None if log_decay is None else chunk_decay(log_decay)
        read, weights = _reading(decay, exclusive)
        writes = scale_rows(k, decay and decay.end).mT @ v
        states = carry(writes, decay and decay.total, initial_state)
        starts, final_state = states[:-1], states[-1].clone()
        scores = masked(q @ k.mT, weights, -1 if exclusive else 0)
        o = add_product(scale_rows(q, read) @ starts, scores, v)
        ctx.save_for_backward(q, k, v, log_decay, starts)
        ctx.exclusive = exclusive
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o, d_final):  # type: ignore[override]
        q, k, v, log_decay, starts = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return *_linear_backward(q, k, v, log_decay, starts, ctx.exclusive, d_o, d_final), None


def _reading(decay: ChunkDecay | None, exclusive: bool) -> tuple[Tensor | None, Tensor | None]:
    """Decay of the start state at each read, and pair weights, for either kind of read."""
    if decay is None:
        return None, None
    return (decay.ahead, decay.before) if exclusive else (decay.start, decay.pair)


def _linear_backward(q, k, v, log_decay, starts, exclusive, d_o, d_final):
    size = k.shape[-2]
    diagonal = -1 if exclusive else 0
    decay = None if log_decay is None else chunk_decay(log_decay)
    read, weights = _reading(decay, exclusive)
    d_states = carry(scale_rows(q, read).mT @ d_o, decay and decay.total, d_final, reverse=True)
    d_initial, d_ends = d_states[0], d_states[1:]

    d_scores = masked(d_o @ v.mT, weights, diagonal)
    scores = q @ k.mT
    pairs = None if decay is None else sum_groups(d_scores * scores, size)
    q_from_start = scale_rows(d_o @ starts.mT, read)
    k_to_end = scale_rows(v @ d_ends.mT, decay and decay.end)
    d_q = add_product(q_from_start, d_scores, k)
    d_k = add_product(k_to_end, d_scores.mT, q)
    v_to_end = scale_rows(k, decay and decay.end) @ d_ends
    d_v = add_product(v_to_end, masked(scores, weights, diagonal).mT, d_o)
    d_log_decay = None
    if decay is not None and pairs is not None:
        reads = sum_groups((q * q_from_start).sum(-1, keepdim=True), size).squeeze(-1)
        d_log_decay = (
            across(drop_first_row(pairs) if exclusive else pairs)
            + later(reads, strict=exclusive)
            + earlier((k * k_to_end).sum(-1))
            + (decay.total * (starts * d_ends).sum((-2, -1))).unsqueeze(-1)
        )
    return d_q, d_k, d_v, d_log_decay, d_initial
