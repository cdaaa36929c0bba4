"""The chunkwise delta scan in PyTorch: exact, differentiable, on CPU and CUDA. Derivation: README.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn_cli.kernels.chunk_algebra import add_product, advance_states, masked, scale_rows, sum_groups
from linattn_cli.kernels.decay import ChunkDecay, across, chunk_decay, drop_first_row, earlier, later
from linattn_cli.kernels.layout import (
    choose_chunk_size,
    decay_to_chunks,
    flip_log_decay,
    from_chunks,
    queries_from_chunks,
    queries_to_chunks,
    to_chunks,
)
from linattn_cli.kernels.types import state_dtype


def delta_scan_chunk(
    q: Tensor,
    p: Tensor,
    a: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    return_residual: bool,
    reverse: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`delta_scan` in chunks; see its docstring for the recurrence and shapes."""
    if reverse:
        return _reversed(q, p, a, v, log_decay, initial_state, return_residual, chunk_size)
    batch, tokens, heads, key_dim = p.shape
    dtype = state_dtype(p.dtype)
    longest = _longest_chunk(batch * heads, key_dim, log_decay)
    if chunk_size is not None and dtype == torch.float32:
        chunk_size = min(chunk_size, longest)  # more would round worse than the serial recurrence may
    size = choose_chunk_size(tokens, chunk_size, longest=longest)
    if initial_state is None:
        initial_state = p.new_zeros(batch, heads, key_dim, v.shape[3], dtype=dtype)
    o, final_state, residual = _DeltaChunk.apply(
        queries_to_chunks(q, heads, size, dtype),
        to_chunks(p, size, dtype),
        to_chunks(a, size, dtype),
        to_chunks(v, size, dtype),
        None if log_decay is None else decay_to_chunks(log_decay, size, dtype),
        initial_state,
    )
    o = queries_from_chunks(o, size, tokens, v.dtype)
    return o, final_state, from_chunks(residual, tokens, dtype) if return_residual else None


def _longest_chunk(batch_heads: int, key_dim: int, log_decay: Tensor | None) -> int:
    """The inverse of a chunk costs C^3 and rounding grows with C; the loop over chunks costs a launch each.

    So: short chunks for small heads, shorter where many of them share one pass of the loop, shortest with a
    decay, whose gradient is a difference of sums over the chunk. With keys all alike, the worst case, float32
    stays within twice the serial rounding at these lengths and leaves it at twice them.
    """
    if log_decay is not None:
        return 16 if key_dim <= 64 else 24
    return 24 if batch_heads >= 32 and key_dim <= 64 else 32


def _reversed(
    q, p, a, v, log_decay, initial_state, return_residual, chunk_size
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The reversed scan is the forward one on flipped tokens.

    A token decays the state as it leaves. The forward scan reads with `p` before the decay it applies, so
    the shifted decay joins `p`.
    """
    p = p.flip(1)
    leaving = None
    if log_decay is not None:
        log_decay, leaving = flip_log_decay(log_decay.to(state_dtype(p.dtype)), shift=True)
        p = (p * log_decay.exp().unsqueeze(-1)).to(p.dtype)
    o, final_state, residual = delta_scan_chunk(
        q.flip(1),
        p,
        a.flip(1),
        v.flip(1),
        log_decay=log_decay,
        initial_state=initial_state,
        return_residual=return_residual,
        reverse=False,
        chunk_size=chunk_size,
    )
    if leaving is not None:
        final_state = leaving * final_state
    return o.flip(1), final_state, None if residual is None else residual.flip(1)


def _inverse(overwrite: Tensor) -> Tensor:
    """`(I + N)^-1`, unit lower triangular; N is what stands below the diagonal.

    Explicit, because it is applied four times, twice of them transposed, and the products are faster than
    triangular solves. Solved from the right on transposed tensors: what LAPACK calls column-major is then our
    row-major, and nothing is copied.
    """
    eye = torch.eye(overwrite.shape[-1], dtype=overwrite.dtype, device=overwrite.device).expand_as(overwrite)
    return torch.linalg.solve_triangular(overwrite.mT, eye, upper=True, left=False, unitriangular=True).mT


def _pairs(left: Tensor, right: Tensor, decay: ChunkDecay | None) -> Tensor:
    """Products of the tokens of a chunk, `left @ right^T`: in float64 with a decay.

    There they enter the gradient of the log-decay, a difference of sums over the chunk, many times their size.
    """
    return left @ right.mT if decay is None else left.double() @ right.mT.double()


class _DeltaChunk(torch.autograd.Function):
    """Chunked tensors q `[N, B, H, G C, K]`, p, a `[N, B, H, C, K]`, v `[N, B, H, C, V]`.

    Kept for the backward: the inputs, the inverse of every chunk, the residuals, and one state a chunk.
    """

    @staticmethod
    def forward(ctx: Any, q, p, a, v, log_decay, initial_state):
        ctx.set_materialize_grads(False)
        decay = None if log_decay is None else chunk_decay(log_decay)
        overwrite = _pairs(p, a, decay)
        if decay is not None:
            overwrite *= decay.before
        scores = masked(_pairs(q, a, decay), decay and decay.pair, 0).to(q.dtype)
        resolve = _inverse(overwrite).to(q.dtype)
        residual = resolve @ v
        reading = resolve @ scale_rows(p, decay and decay.ahead)
        writing = scale_rows(a, decay and decay.end).mT
        states = advance_states(initial_state, decay and decay.total, writing, residual, reading, sign=-1)
        starts, final_state = states[:-1], states[-1]
        residual = add_product(residual, reading, starts, sign=-1)
        o = add_product(scale_rows(q, decay and decay.start) @ starts, scores, residual)
        ctx.save_for_backward(q, p, a, log_decay, resolve, residual, starts)
        return o, final_state.clone(), residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o, d_final, d_residual):  # type: ignore[override]
        q, p, a, log_decay, resolve, residual, starts = ctx.saved_tensors
        d_o = q.new_zeros(*q.shape[:-1], residual.shape[-1]) if d_o is None else d_o
        d_final = torch.zeros_like(starts[0]) if d_final is None else d_final
        with torch.autocast(d_o.device.type, enabled=False):
            return _delta_backward(q, p, a, log_decay, resolve, residual, starts, d_o, d_final, d_residual)


def _delta_backward(q, p, a, log_decay, resolve, residual, starts, d_o, d_final, d_residual):
    size = p.shape[-2]
    decay = None if log_decay is None else chunk_decay(log_decay)
    score_products = _pairs(q, a, decay)
    scores = masked(score_products.clone(), decay and decay.pair, 0).to(q.dtype)
    a_to_end = scale_rows(a, decay and decay.end)
    read = scores.mT @ d_o if d_residual is None else add_product(d_residual, scores.mT, d_o)
    d_v = resolve.mT @ read
    through = resolve.mT @ a_to_end
    q_writing = scale_rows(q, decay and decay.start).mT @ d_o
    p_writing = scale_rows(p, decay and decay.ahead).mT.neg()
    d_states = advance_states(d_final, decay and decay.total, p_writing, d_v, through, extra=q_writing, reverse=True)
    d_ends, d_initial = d_states[1:], d_states[0]
    d_v = add_product(d_v, through, d_ends)

    pair_d_overwrite = masked(_pairs(d_v, residual, decay), decay and decay.before, -1)
    pair_d_scores = masked(_pairs(d_o, residual, decay), decay and decay.pair, 0)
    d_overwrite, d_scores = pair_d_overwrite.to(q.dtype), pair_d_scores.to(q.dtype)
    q_from_start = scale_rows(d_o @ starts.mT, decay and decay.start)
    p_from_start = scale_rows(d_v @ starts.mT, decay and decay.ahead)
    a_end = scale_rows(residual @ d_ends.mT, decay and decay.end)
    d_q = add_product(q_from_start, d_scores, a)
    d_p = add_product(p_from_start, d_overwrite, a).neg()
    d_a = add_product(add_product(a_end, d_scores.mT, q), d_overwrite.mT, p, sign=-1)
    d_log_decay = None
    if decay is not None:
        # d_scores and scores both carry the decay: pair the first with the bare products
        score_pairs = sum_groups(pair_d_scores * score_products, size)
        overwrite_pairs = pair_d_overwrite * _pairs(p, a, decay)
        reads = sum_groups((q * q_from_start).sum(-1, keepdim=True), size).squeeze(-1)
        d_log_decay = (
            across(score_pairs)
            - across(drop_first_row(overwrite_pairs))
            + later(reads)
            - later((p * p_from_start).sum(-1), strict=True)
            + earlier((a * a_end).sum(-1))
            + (decay.total * (starts * d_ends).sum((-2, -1))).unsqueeze(-1)
        )
    return d_q, d_p, d_a, d_v, d_log_decay, d_initial
