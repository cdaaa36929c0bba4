"""What the forms share: feature maps, padding, unit vectors and the ratio read-out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.types import Impl, state_dtype
from linattn_cli.kernels.validate import check_device, check_shape

RATIO_EPS = 1e-4
"""Floor of the denominator of a ratio read-out."""

UNIT_EPS = 1e-12
"""Floor of a norm that is divided by."""

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu1": lambda x: torch.nn.functional.elu(x) + 1,
    "silu": torch.nn.functional.silu,
    "identity": lambda x: x,
}


def feature_map(
    name: str, *, normalise: bool = False, wide: bool = False, impl: str | Impl = Impl.CHUNK
) -> Callable[[Tensor], Tensor]:
    """The feature map phi of that name: `elu1` is elu(x) + 1, positive; `silu` and `identity` are signed.

    With `normalise`, phi(x) / |phi(x)| over the last dimension; with `wide`, in the state dtype. `impl` is that of
    the scans it belongs to.
    """
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}; got {name!r}")

    def apply(x: Tensor) -> Tensor:
        if one_pass(impl, x):
            from linattn_cli.kernels.rows_triton import features_triton

            if normalise or name != "identity":
                return features_triton(x, name, unit=normalise, wide=wide)
            return x.float() if wide else x
        x = x.to(state_dtype(x.dtype)) if wide else x
        return unit(FEATURE_MAPS[name](x)) if normalise else FEATURE_MAPS[name](x)

    return apply


def one_pass(impl: str | Impl, x: Tensor) -> bool:
    """Whether row-wise work on `x` runs as one Triton kernel: where the scans beside it do.

    In eager PyTorch it takes longer than they do.
    """
    if Impl.parse(impl) not in (Impl.AUTO, Impl.TRITON) or x.dtype == torch.float64:
        return False
    return dispatch.resolve("linear_scan", impl, x) == "triton"


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless a named option has one of its values."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def check_mask(mask: Tensor | None, k: Tensor) -> None:
    """Raise unless a padding mask is `[B, T]`, bool, true at real tokens."""
    if mask is None:
        return
    check_shape("mask", mask, "BT", (k.shape[0], k.shape[1]))
    check_device("mask", mask, "k", k)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, true at real tokens, got {mask.dtype}; pass mask.bool()")


def keep(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x`, `[B, T, ...]`, set to zero at padded tokens: a zero key, gate or log-decay changes no state."""
    if mask is None:
        return x
    return x.masked_fill(~mask.view(*mask.shape, *(1,) * (x.dim() - 2)), 0)


def unit(x: Tensor, *, impl: str | Impl = Impl.CHUNK) -> Tensor:
    """`x / |x|` over the last dimension, the norm in the state dtype; zero stays zero."""
    if one_pass(impl, x):
        from linattn_cli.kernels.rows_triton import features_triton

        return features_triton(x, unit=True)
    return _Unit.apply(x.to(state_dtype(x.dtype))).to(x.dtype)


class _Unit(torch.autograd.Function):
    """`y = x / |x|`, `dx = (dy - y (y . dy)) / |x|`: autograd's own path takes three times the passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(UNIT_EPS)
        y = x / norm
        ctx.save_for_backward(y, norm)
        ctx.save_for_forward(y, norm)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor):  # type: ignore[override]
        y, norm = ctx.saved_tensors
        along = (y * d_y).sum(-1, keepdim=True)
        return torch.addcmul(d_y, y, along, value=-1) / norm

    @staticmethod
    def jvp(ctx: Any, d_x: Tensor):  # type: ignore[override]
        return _Unit.backward(ctx, d_x)  # the Jacobian is symmetric


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H, D]` -> `[B, T, heads, D]`: each key head repeated for its group of query heads."""
    groups = heads // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def ratio_readout(
    o: Tensor, q: Tensor, k: Tensor, z: Tensor | None, *, impl: str | Impl = Impl.CHUNK
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide `o` by `max(q_t . z_t, eps)` with `z_t = z_{t-1} + k_t`.

    o `[B, T, Q, V]`, q `[B, T, Q, K]` and k `[B, T, H, K]` after their feature maps; z `[B, H, K]` or None.
    Returns the quotient, the last z and the number of clamped denominators.
    """
    if one_pass(impl, k):
        from linattn_cli.kernels.ratio_triton import ratio_readout_triton

        quotient, denominator, last = ratio_readout_triton(o, q, k, z, RATIO_EPS)
        return quotient, last, (denominator < RATIO_EPS).sum()
    sums = k.to(state_dtype(k.dtype)).cumsum(1)
    if z is not None:
        sums = sums + z.unsqueeze(1)
    denominator = (q * repeat_heads(sums, q.shape[2])).sum(-1, keepdim=True)
    clamped = (denominator.detach() < RATIO_EPS).sum()
    return (o / denominator.clamp_min(RATIO_EPS)).to(o.dtype), sums[:, -1], clamped
