"""The chunkwise penalty gain in PyTorch: exact, differentiable, on CPU and CUDA. Derivation: README.md.

No loop over tokens and no conjugate gradient: M is additive, so the A at the start of every chunk is one
batch of inverses, and inside a chunk one Cholesky factor holds the downdates of all its tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn_cli.kernels.chunk_algebra import add_product, carry, masked
from linattn_cli.kernels.layout import choose_chunk_size, queries_from_chunks, queries_to_chunks, to_chunks
from linattn_cli.kernels.penalty.inverse import REFRESH, inverse, regularised, start
from linattn_cli.kernels.types import PenaltyState, state_dtype

LONGEST_CHUNK = 40
"""The Cholesky factor of a chunk costs C^3 on few tokens; beyond 40 that outweighs the fewer inverses."""

HEAVY = 4.0
"""A chunk that may shrink A more than 1 + this in some direction has its gains corrected by their residual."""


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
    size = choose_chunk_size(tokens, chunk_size, longest=LONGEST_CHUNK)
    dtype = state_dtype(u.dtype)
    mass, first_inverse, age = start(u, lambda0, initial_state)
    # only decoding passes on an inverse that carries its own downdate: those of several tokens at once cancel
    fresh = tokens > 1 or age + tokens >= REFRESH
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


class _Chunks(NamedTuple):
    """What applies `A_t` to a vector for every token of every chunk.

    u          [N, B, H, C, K]  penalty directions
    matrices   [N, B, H, K, K]  M at the start of the chunk
    inverses   [N, B, H, K, K]  A there
    downdates  [N, B, H, C, K]  W = L^-1 U A with L L^T = I + U A U^T: `A_t = A - W_{<=t}^T W_{<=t}`
    """

    u: Tensor
    matrices: Tensor
    inverses: Tensor
    downdates: Tensor

    def gains(self, k: Tensor, heavy: Tensor | None) -> Tensor:
        """`A_t k_t` for rows `[N, B, H, G C, K]`, refined once by its residual in the chunks numbered `heavy`.

        Where a chunk adds much mass, `A_t` is a small difference of large terms; the residual `k - M_t x` has
        no such cancellation, and one correction brings x to what the conditioning of `M_t` itself allows.
        """
        x = self._downdated(k)
        if heavy is None:
            return x + self._correction(k, x)
        if heavy.numel():
            chunks = _Chunks(*(tensor[heavy] for tensor in self))
            x[heavy] += chunks._correction(k[heavy], x[heavy])
        return x

    def last_inverse(self) -> Tensor:
        """A after the last token, `[B, H, K, K]`."""
        return self.inverses[-1] - self.downdates[-1].mT @ self.downdates[-1]

    def _correction(self, k: Tensor, x: Tensor) -> Tensor:
        through_start = add_product(k, x, self.matrices, sign=-1)
        residual = add_product(through_start, masked(x @ self.u.mT, None, 0), self.u, sign=-1)
        return self._downdated(residual)

    def _downdated(self, k: Tensor) -> Tensor:
        scores = masked(k @ self.downdates.mT, None, 0)
        return add_product(k @ self.inverses, scores, self.downdates, sign=-1)


def _heavy_chunks(gram: Tensor) -> Tensor | None:
    """Numbers of the chunks whose gains need the correction, from `I + U A U^T`; None is all of them.

    `trace(U A U^T)` bounds by how much the chunk can shrink A in any direction, and so what the downdate cancels.
    Only a CPU is asked: the answer would make a GPU wait, and there the correction is cheaper than waiting.
    """
    if gram.is_cuda:
        return None
    added = gram.diagonal(dim1=-2, dim2=-1).sum(-1) - gram.shape[-1]
    return (added.flatten(1).amax(1) > HEAVY).nonzero().squeeze(-1)


class _PenaltyChunk(torch.autograd.Function):
    """Chunked tensors u `[N, B, H, C, K]`, k `[N, B, H, G C, K]`; mass and inverse `[B, H, K, K]`.

    With y = gain(u, dx), the same operator on the upstream gradient, `dk = y` and the gradient of M_t is
    `-y_t x_t^T`; u_s entered every M_t with t >= s.
    """

    @staticmethod
    def forward(ctx: Any, u, k, mass, first_inverse, lambda0: float, fresh: bool):
        masses = carry(u.mT @ u, None, mass)
        final_mass = masses[-1].clone()
        inverses = torch.cat((first_inverse.unsqueeze(0), inverse(masses[1:-1], lambda0)))
        projected = u @ inverses
        gram = projected @ u.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(1)
        # one token is one downdate: nothing cancels that a correction would not lose again
        heavy = _heavy_chunks(gram) if u.shape[-2] > 1 else u.new_empty(0, dtype=torch.int64)
        # solved from the right on transposed tensors, whose layout LAPACK takes without a copy
        factor = torch.linalg.cholesky(gram)
        downdates = torch.linalg.solve_triangular(factor.mT, projected.mT, upper=True, left=False).mT
        chunks = _Chunks(u, regularised(masses[:-1], lambda0), inverses, downdates)
        x = chunks.gains(k, heavy)
        final_inverse = inverse(final_mass, lambda0) if fresh else chunks.last_inverse()
        ctx.save_for_backward(x, final_inverse, heavy, *chunks)
        return x, final_mass, final_inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x, d_final_mass, d_final_inverse):  # type: ignore[override]
        x, final_inverse, heavy, *saved = ctx.saved_tensors
        chunks = _Chunks(*saved)
        u = chunks.u
        with torch.autocast(u.device.type, enabled=False):
            y = chunks.gains(d_x, heavy)
            d_final = _symmetric(d_final_mass - final_inverse @ d_final_inverse @ final_inverse)
            d_masses = carry(-_symmetric(y.mT @ x), None, d_final, reverse=True)
            d_u = add_product(u @ d_masses[1:], masked(x @ u.mT, None, 0).mT, y, sign=-1)
            d_u = add_product(d_u, masked(y @ u.mT, None, 0).mT, x, sign=-1)
        return d_u, y, d_masses[0] / 2, None, None, None


def _symmetric(matrix: Tensor) -> Tensor:
    return matrix + matrix.mT
