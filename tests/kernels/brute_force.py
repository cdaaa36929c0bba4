"""Every higher-order form as an explicit sum over its index set: quadratic and cubic in T, independent of
any state.

Tensors are `[B, T, H, D]` with as many key heads as query heads. A function returns the numerator for the
given v; the denominator of a ratio is the same function with v = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decay_matrix(log_decay: Tensor | None, like: Tensor, shift: int = 0) -> Tensor:
    """`[B, H, T, T]`, from s to t: product of the decays of s + 1 .. t - shift for s <= t - shift, else 0."""
    batch, tokens, heads = like.shape[:3]
    if log_decay is None:
        log_decay = like.new_zeros(batch, tokens, heads)
    matrix = like.new_zeros(batch, heads, tokens, tokens)
    for t in range(tokens):
        for s in range(t - shift + 1):
            matrix[:, :, t, s] = log_decay[:, s + 1 : t - shift + 1].sum(1).exp()
    return matrix


def _pairs(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthd,bshd->bhts", q, k)


def linear(q, k, v, log_decay=None) -> Tensor:
    return torch.einsum("bhts,bshe->bthe", _pairs(q, k) * decay_matrix(log_decay, k), v)


def hla2(q, k, v, *, log_decay=None, decay="none", masked=True, ridge=0.0) -> Tensor:
    """`sum_{i, j} w(t, i, j) (q_t.k_i)(q_j.k_i) v_j`; i <= j <= t with the mask, i, j <= t without."""
    D = decay_matrix(log_decay, k)
    at_t_i, at_t_j = D[:, :, :, :, None], D[:, :, :, None, :]  # [B, H, T, i, j]
    j_from_i = D.mT[:, :, None]
    ordered = (j_from_i > 0) & (at_t_j > 0)
    both = at_t_i * at_t_j
    if decay in ("none", "moment"):
        weight = both * ordered if masked else both
        ridge_decay = at_t_j[:, :, :, 0] * (at_t_j[:, :, :, 0] if decay == "moment" and masked else 1)
    elif decay == "cascade":
        weight, ridge_decay = at_t_i * ordered, D
    elif decay == "mask":
        weight, ridge_decay = at_t_i * j_from_i * ordered, D
    elif decay == "published":
        weight, ridge_decay = both - at_t_i * decay_matrix(log_decay, k, shift=1)[:, :, None], D
    QK = _pairs(q, k)
    o = torch.einsum("bhtij,bhti,bhji,bjhe->bthe", weight, QK, QK, v)
    return o + ridge * torch.einsum("bhtj,bhtj,bjhe->bthe", ridge_decay, _pairs(q, q), v)


def ahla(q, k, v, *, log_decay=None) -> Tensor:
    """`W_g W_g V`."""
    W = _pairs(q, k) * decay_matrix(log_decay, k)
    return torch.einsum("bhti,bhij,bjhe->bthe", W, W, v)


def hla3(q, k, v, *, log_decay=None, decay="none", variant="causal") -> Tensor:
    """`sum_{i, u, j} w (q_t.k_i)(q_u.k_i)(q_u.k_j) v_j`."""
    D = decay_matrix(log_decay, k)
    tokens = k.shape[1]
    index = torch.arange(tokens)
    i, u, j = index[:, None, None], index[:, None], index
    if variant == "causal":
        allowed = (i <= u) & (j <= u)
    else:
        largest = torch.maximum(torch.maximum(i, u), j)
        allowed = ((i == largest).int() + (u == largest) + (j == largest)) >= 2
    to_i, to_u, to_j = (
        D[..., :, None, None],
        D[..., None, :, None],
        D[..., None, None, :],
    )  # over [T, i, u, j]
    u_from_i, u_from_j = D.mT[:, :, None, :, :, None], D[:, :, None, None]
    inside = (to_i > 0) & (to_u > 0) & (to_j > 0) & allowed
    weight = {
        "none": to_u,
        "moment": to_i * to_u * to_j,
        "cascade": to_u * u_from_i * u_from_j,
        "mask": to_i * u_from_i * u_from_j,
    }[decay] * inside
    QK = _pairs(q, k)
    return torch.einsum("bhtiuj,bhti,bhui,bhuj,bjhe->bthe", weight, QK, QK, QK, v)


def mesa(q, k, v, *, lambda0) -> Tensor:
    """Ridge regression on every prefix, solved anew for each token."""
    outputs = []
    for t in range(1, k.shape[1] + 1):
        keys, values = k[:, :t].transpose(1, 2), v[:, :t].transpose(1, 2)
        M = keys.mT @ keys + lambda0 * torch.eye(k.shape[3], dtype=k.dtype)
        weights = torch.linalg.solve(M, keys.mT @ values)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t - 1], weights))
    return torch.stack(outputs, dim=1)


def gated_delta(q, k, v, beta, log_decay) -> Tensor:
    """Each write found by solving the unit lower triangular system of all reads of the past."""
    D = decay_matrix(log_decay, k)
    strict = D.tril(-1) * _pairs(k, beta.unsqueeze(-1) * k)
    eye = torch.eye(k.shape[1], dtype=k.dtype)
    residual = torch.linalg.solve_triangular(eye + strict, v.transpose(1, 2), upper=False, unitriangular=True)
    return (D * _pairs(q, beta.unsqueeze(-1) * k) @ residual).transpose(1, 2)
