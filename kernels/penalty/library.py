"""The gain of keys wider than a GPU program's registers, from batched library factorisations."""

from __future__ import annotations

import torch
from torch import Tensor

WIDE_CHUNK = 64


def _chunked(x: Tensor) -> Tensor:
    """`[B, T, H, K]` -> `[B, H, N, C, K]` float32, zero-padded."""
    B, T, H, K = x.shape
    chunks = -(-T // WIDE_CHUNK)
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, chunks * WIDE_CHUNK - T))
    return x.view(B, chunks, WIDE_CHUNK, H, K).permute(0, 3, 1, 2, 4)


def _tokens(x: Tensor, T: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `_chunked`."""
    B, H, N, C, K = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(B, N * C, H, K)[:, :T].to(dtype).contiguous()


def wide_gain(u: Tensor, k: Tensor, masses: Tensor, lambda0: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, the downdates w `[B, T, H, K]`, and the inverse at the edge of every chunk.

    `masses` `[B, H, N + 1, K, K]` are the masses at the chunk edges.
    """
    eye = torch.eye(u.shape[3], dtype=torch.float32, device=u.device)
    inverses = torch.cholesky_inverse(torch.linalg.cholesky(masses + lambda0 * eye))
    u_chunks = _chunked(u)
    z = u_chunks @ inverses[:, :, :-1]
    gram = z @ u_chunks.mT + torch.eye(WIDE_CHUNK, dtype=torch.float32, device=u.device)
    w = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), z, upper=False)
    w = _tokens(w, u.shape[1], torch.float32)
    return wide_apply(k, inverses, w), w, inverses


def wide_apply(k: Tensor, inverses: Tensor, w: Tensor) -> Tensor:
    """`X = K A1 + triu(K W^T, 1) W` in every chunk, A1 the inverse at its end, for all query heads."""
    H, groups = w.shape[2], k.shape[2] // w.shape[2]
    w_chunks, ends = _chunked(w), inverses[:, :, 1:]
    heads = []
    for group in range(groups):
        k_chunks = _chunked(k.unflatten(2, (H, groups))[:, :, :, group])
        heads.append(_tokens(k_chunks @ ends + (k_chunks @ w_chunks.mT).triu(1) @ w_chunks, k.shape[1], k.dtype))
    return torch.stack(heads, dim=3).flatten(2, 3)
