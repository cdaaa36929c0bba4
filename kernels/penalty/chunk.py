"""The chunkwise penalty gain in PyTorch: exact, differentiable, on CPU and CUDA. Derivation: README.md.

No loop over tokens and no conjugate gradient: M is additive, so the A at the start of every chunk is one
batch of inverses, and inside a chunk one Cholesky factor holds the downdates of all its tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn_cli.kernels.chunk_algebra import masked
from linattn_cli.kernels.layout import choose_chunk_size, queries_from_chunks, queries_to_chunks, to_chunks
from linattn_cli.kernels.penalty.inverse import REFRESH, inverse, start
from linattn_cli.kernels.types import PenaltyState, state_dtype


def penalty_gain_chunk(
    u: Tensor,
    k: Tensor,
    *,
    lambda0: float,
    initial_state: PenaltyState | None,
    chunk_size: int | None,
) -> tuple[Tensor, PenaltyState]:
    """`penalty_gain` in chunks; see its docstring for the recurrence and shapes.

    The gradient of a carried state flows through its mass: the inverse beside it is a function of the mass.
    """
    tokens, heads = u.shape[1], u.shape[2]
    size = choose_chunk_size(tokens, chunk_size)
    dtype = state_dtype(u.dtype)
    mass, first_inverse, age = start(u, lambda0, initial_state)
    # only short calls, decoding above all, pass on an inverse that carries their own downdates
    fresh = age + tokens >= REFRESH
    x, final_mass, final_inverse = _PenaltyChunk.apply(
        to_chunks(u, size, dtype),
        queries_to_chunks(k, heads, size, dtype),
        mass,
        first_inverse.detach(),
        lambda0,
        fresh,
    )
    x = queries_from_chunks(x, size, tokens, k.dtype)
    return x, PenaltyState(final_mass, final_inverse, 0 if fresh else age + tokens)


class _PenaltyChunk(torch.autograd.Function):
    """Chunked tensors u `[N, B, H, C, K]`, k `[N, B, H, G C, K]`; mass and inverse `[B, H, K, K]`.

    With y = gain(u, dx), the same operator on the upstream gradient, `dk = y` and the gradient of M_t is
    `-y_t x_t^T`; u_s entered every M_t with t >= s.
    """

    @staticmethod
    def forward(ctx: Any, u, k, mass, first_inverse, lambda0: float, fresh: bool):
        sums = (u.mT @ u).cumsum(0)
        starts = torch.cat((first_inverse.unsqueeze(0), inverse(mass + sums[:-1], lambda0)))
        projected = u @ starts
        gram = projected @ u.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(1)
        downdates = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), projected, upper=False)
        x = _apply_inverse(k, starts, downdates)
        final_mass = mass + sums[-1]
        final_inverse = inverse(final_mass, lambda0) if fresh else starts[-1] - downdates[-1].mT @ downdates[-1]
        ctx.save_for_backward(u, x, starts, downdates, final_inverse)
        return x, final_mass, final_inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x, d_final_mass, d_final_inverse):  # type: ignore[override]
        u, x, starts, downdates, final_inverse = ctx.saved_tensors
        with torch.autocast(u.device.type, enabled=False):
            y = _apply_inverse(d_x, starts, downdates)
            d_final = _symmetric(d_final_mass - final_inverse @ d_final_inverse @ final_inverse)
            later = -_symmetric(y.mT @ x).flip(0).cumsum(0).flip(0)
            d_ends = torch.cat((later[1:], torch.zeros_like(later[:1]))) + d_final
            d_u = u @ d_ends - masked(x @ u.mT, None, 0).mT @ y - masked(y @ u.mT, None, 0).mT @ x
            d_mass = (later[0] + d_final) / 2
        return d_u, y, d_mass, None, None, None


def _apply_inverse(k: Tensor, starts: Tensor, downdates: Tensor) -> Tensor:
    """`X = K A0 - tril(K W^T) W`: row t sees the downdates of the tokens up to t."""
    return k @ starts - masked(k @ downdates.mT, None, 0) @ downdates


def _symmetric(matrix: Tensor) -> Tensor:
    return matrix + matrix.mT
