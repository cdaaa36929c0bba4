"""Every mixer as an explicit sum over its index set: quadratic or cubic in T, with no state and no recurrence.

They judge the serial oracles, which judge everything else. Tensors are float64 `[B, T, H, D]` with as many
key heads as query heads; a function of a ratio read-out gives the quotient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn_cli.kernels.forms.features import FEATURE_MAPS, RATIO_EPS


def decay_matrix(log_decay: Tensor | None, like: Tensor, shift: int = 0) -> Tensor:
    """`[B, H, T, T]`, from s to t: product of the decays of s + 1 .. t - shift for s <= t - shift, else 0.

    >>> decay_matrix(torch.tensor([0.5, 0.5]).log().view(1, 2, 1), torch.ones(1, 2, 1, 1))
    tensor([[[[1.0000, 0.0000],
              [0.5000, 1.0000]]]])
    """
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


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _pairs(q, k) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhts,bshe->bthe", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def linear(q: Tensor, k: Tensor, v: Tensor, *, feature_map: str = "elu1", readout: str = "ratio") -> Tensor:
    phi = FEATURE_MAPS[feature_map]
    q, k = phi(q), phi(k)
    o = torch.einsum("bhts,bshe->bthe", _pairs(q, k).tril(), v)
    return o if readout == "raw" else o / _denominator(q, k)


def _denominator(q: Tensor, k: Tensor) -> Tensor:
    return _pairs(q, k).tril().sum(-1).transpose(1, 2).unsqueeze(-1).clamp_min(RATIO_EPS)


def delta(q: Tensor, p: Tensor, a: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Every write found at once, from the unit lower triangular system of all reads of the past.

    Token t reads before its own decay, so a write of s < t reaches it with the decays of s + 1 .. t - 1.
    """
    reads = _pairs(p, a) * decay_matrix(log_decay, p, shift=1)
    eye = torch.eye(p.shape[1], dtype=p.dtype)
    writes = torch.linalg.solve(eye + reads, v.transpose(1, 2))
    return (_pairs(q, a) * decay_matrix(log_decay, p) @ writes).transpose(1, 2)


def deltanet(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    silu = FEATURE_MAPS["silu"]
    key = _unit(silu(k))
    return delta(_unit(silu(q)), key, beta.unsqueeze(-1) * key, v)


def gated_deltanet(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    silu = FEATURE_MAPS["silu"]
    key = _unit(silu(k))
    p = log_decay.exp().unsqueeze(-1) * key
    return delta(_unit(silu(q)), p, beta.unsqueeze(-1) * key, v, log_decay)


def decay_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, feature_map: str = "elu1") -> Tensor:
    phi = FEATURE_MAPS[feature_map]
    key = _unit(phi(k))
    return delta(_unit(phi(q)), key, key, v, log_decay)


def gains(u: Tensor, k: Tensor, lambda0: float) -> Tensor:
    """`x_t = (lambda0 I + sum_{s<=t} u_s u_s^T)^-1 k_t`, each solved anew."""
    mass = torch.einsum("bthi,bthj->bthij", u, u).cumsum(1)
    eye = torch.eye(u.shape[-1], dtype=u.dtype)
    return torch.linalg.solve(mass + lambda0 * eye, k.unsqueeze(-1)).squeeze(-1)


def vla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    lambda0: float = 0.1,
    penalty: str = "learned",
    normalise_gate: bool = True,
    feature_map: str = "elu1",
    readout: str = "ratio",
) -> Tensor:
    phi = FEATURE_MAPS[feature_map]
    q, k = phi(q), phi(k)
    key = _unit(k)
    direction = {"none": torch.zeros_like(key), "key": key, "learned": u}[penalty]
    assert direction is not None  # given wherever it is learned
    write = gains(direction, key, lambda0)
    write = _unit(write) if normalise_gate else write
    write = write if beta is None else beta.unsqueeze(-1) * write
    o = delta(q, key, write, v)
    return o if readout == "raw" else o / _denominator(q, k)


def hla2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay: str = "none",
    masked: bool = True,
    ridge: float = 0.0,
) -> Tensor:
    """`sum_{i, j} w(t, i, j) (q_t.k_i)(q_j.k_i) v_j`; i <= j <= t with the mask, i, j <= t without."""
    D = decay_matrix(log_decay, k)
    at_t_i, at_t_j = D[:, :, :, :, None], D[:, :, :, None, :]  # [B, H, T, i, j]
    j_from_i = D.mT[:, :, None]
    ordered = (j_from_i > 0) & (at_t_j > 0)
    both = at_t_i * at_t_j
    if decay in ("none", "moment"):
        weight = both * ordered if masked else both
        ridge_decay = D.square() if decay == "moment" and masked else D
    elif decay == "cascade":
        weight, ridge_decay = at_t_i * ordered, D
    elif decay == "mask":
        weight, ridge_decay = at_t_i * j_from_i * ordered, D
    else:  # published: what is taken back, pairs i > j, has lost one decay fewer than what was put in
        weight, ridge_decay = both - at_t_i * decay_matrix(log_decay, k, shift=1)[:, :, None], D
    QK = _pairs(q, k)
    o = torch.einsum("bhtij,bhti,bhji,bjhe->bthe", weight, QK, QK, v)
    return o + ridge * torch.einsum("bhtj,bhtj,bjhe->bthe", ridge_decay, _pairs(q, q), v)


def ahla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, *, decay: str = "none") -> Tensor:
    """`W_g W_g V`; `decay` says whether there is one."""
    W = _pairs(q, k) * decay_matrix(log_decay, k)
    return torch.einsum("bhti,bhij,bjhe->bthe", W, W, v)


def hla3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay: str = "none",
    variant: str = "causal",
) -> Tensor:
    """`sum_{i, u, j} w (q_t.k_i)(q_u.k_i)(q_u.k_j) v_j`."""
    D = decay_matrix(log_decay, k)
    index = torch.arange(k.shape[1])
    i, u, j = index[:, None, None], index[:, None], index
    if variant == "causal":
        allowed = (i <= u) & (j <= u)
    else:
        largest = torch.maximum(torch.maximum(i, u), j)
        allowed = ((i == largest).int() + (u == largest) + (j == largest)) >= 2
    to_i, to_u, to_j = D[..., :, None, None], D[..., None, :, None], D[..., None, None, :]  # [T, i, u, j]
    u_from_i, u_from_j = D.mT[:, :, None, :, :, None], D[:, :, None, None]
    weight = {
        "none": to_u,
        "moment": to_i * to_u * to_j,
        "cascade": to_u * u_from_i * u_from_j,
        "mask": to_i * u_from_i * u_from_j,
    }[decay]
    weight = weight * ((to_i > 0) & (to_u > 0) & (to_j > 0) & allowed)
    QK = _pairs(q, k)
    return torch.einsum("bhtiuj,bhti,bhui,bhuj,bjhe->bthe", weight, QK, QK, QK, v)


def higher_order(sums: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A higher-order sum with the options that all of them share: feature map and ratio read-out."""

    def full(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        *,
        feature_map: str = "identity",
        readout: str = "raw",
        **options: object,
    ) -> Tensor:
        phi = FEATURE_MAPS[feature_map]
        q, k = phi(q), phi(k)
        o = sums(q, k, v, log_decay, **options)
        return o if readout == "raw" else o / sums(q, k, torch.ones_like(v[..., :1]), log_decay, **options)

    return full


def mesa(q: Tensor, k: Tensor, v: Tensor, *, lambda0: float = 1.0, feature_map: str = "silu") -> Tensor:
    phi = FEATURE_MAPS[feature_map]
    return ridge_regression(_unit(phi(q)), _unit(phi(k)), v, lambda0=lambda0)


def ridge_regression(q: Tensor, k: Tensor, v: Tensor, *, lambda0: float) -> Tensor:
    """The solution of ridge regression on every prefix, solved anew for each token: what rls and mesa read."""
    outputs = []
    for t in range(1, k.shape[1] + 1):
        keys, values = k[:, :t].transpose(1, 2), v[:, :t].transpose(1, 2)
        M = keys.mT @ keys + lambda0 * torch.eye(k.shape[3], dtype=k.dtype)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t - 1], torch.linalg.solve(M, keys.mT @ values)))
    return torch.stack(outputs, dim=1)


SUMS: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax,
    "linear": linear,
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "decay_delta": decay_delta,
    "vla": vla,
    "hla2": higher_order(hla2),
    "ahla": higher_order(ahla),
    "hla3": higher_order(hla3),
    "rls": mesa,
    "mesa": mesa,
}
"""The brute force of each mixer, with the arguments of its form."""
