"""Row-wise operators of the forms, each one pass over memory: feature maps and unit vectors.

In PyTorch's eager mode each of them is five to ten kernels, which together take longer than the scans between
them. Rows are the last dimension; arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_cli.kernels.launch import kernel, launch
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.tiles import ceil_div, power_of_two_above

UNIT_EPS = tl.constexpr(1e-12)  # floor of a norm, as in torch.nn.functional.normalize


@triton.jit
def feature(b_x, MAP: tl.constexpr):
    """The feature map of that name, float32."""
    if MAP == "elu1":
        return tl.where(b_x > 0, b_x + 1, tl.exp(tl.minimum(b_x, 0.0)))
    if MAP == "silu":
        return b_x * tl.sigmoid(b_x)
    return b_x


@triton.jit
def feature_slope(b_x, MAP: tl.constexpr):
    """The derivative of that feature map, float32."""
    if MAP == "elu1":
        return tl.where(b_x > 0, 1.0, tl.exp(tl.minimum(b_x, 0.0)))
    if MAP == "silu":
        b_gate = tl.sigmoid(b_x)
        return b_gate * (1 + b_x * (1 - b_gate))
    return tl.full(b_x.shape, 1.0, tl.float32)


@triton.jit
def _rows(rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Offsets of this program's rows and which of them exist."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    return o_r[:, None] * D + o_d[None, :], (o_r < rows)[:, None] & (o_d < D)[None, :]


@kernel
def _features_kernel(
    p_x, p_y, p_norm, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`f(x)`, over its norm if UNIT; the norm is written too if NORM."""
    o_x, keep = _rows(rows, D, BD, BR)
    b_y = tl.where(keep, feature(tl.load(p_x + o_x, mask=keep, other=0.0).to(tl.float32), MAP), 0.0)
    if UNIT:
        b_norm = tl.sqrt(tl.sum(b_y * b_y, axis=1))
        b_y /= tl.maximum(b_norm, UNIT_EPS)[:, None]
        if NORM:
            o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
            tl.store(p_norm + o_r, b_norm, mask=o_r < rows)
    tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=keep)


@kernel
def _features_backward_kernel(
    p_x, p_dy, p_dx, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr
):
    o_x, keep = _rows(rows, D, BD, BR)
    b_x = tl.load(p_x + o_x, mask=keep, other=0.0).to(tl.float32)
    b_d = tl.load(p_dy + o_x, mask=keep, other=0.0).to(tl.float32)
    if UNIT:
        b_y = tl.where(keep, feature(b_x, MAP), 0.0)
        b_norm = tl.sqrt(tl.sum(b_y * b_y, axis=1))
        b_y /= tl.maximum(b_norm, UNIT_EPS)[:, None]
        b_along = tl.where(b_norm > UNIT_EPS, tl.sum(b_y * b_d, axis=1), 0.0)
        b_d = (b_d - b_y * b_along[:, None]) / tl.maximum(b_norm, UNIT_EPS)[:, None]
    tl.store(p_dx + o_x, (b_d * feature_slope(b_x, MAP)).to(p_dx.dtype.element_ty), mask=keep)


@kernel
def _gate_gradient_kernel(p_a, p_da, p_norm, p_x, p_dx, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    o_x, keep = _rows(rows, D, BD, BR)
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    b_a = tl.load(p_a + o_x, mask=keep, other=0.0).to(tl.float32)
    b_d = tl.load(p_da + o_x, mask=keep, other=0.0).to(tl.float32)
    b_norm = tl.load(p_norm + o_r, mask=o_r < rows, other=0.0)
    b_along = tl.where(b_norm > UNIT_EPS, tl.sum(b_a * b_d, axis=1), 0.0)
    b_d = (b_d - b_a * b_along[:, None]) / tl.maximum(b_norm, UNIT_EPS)[:, None]
    tl.store(p_x + o_x, (b_a * b_norm[:, None]).to(p_x.dtype.element_ty), mask=keep)
    tl.store(p_dx + o_x, b_d.to(p_dx.dtype.element_ty), mask=keep)


def _launch(function: Any, *tensors: Tensor, **options: Any) -> None:
    """Run a kernel over the rows of its tensors: about 4,096 elements a program."""
    D = tensors[0].shape[-1]
    BD = power_of_two_above(D)
    BR = max(1, 4096 // BD)
    rows = tensors[0].numel() // D
    launch(function, (ceil_div(rows, BR),), *tensors, rows, D=D, BD=BD, BR=BR, num_warps=4, **options)


def features_forward(x, feature_map, unit, wide):
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=torch.float32 if wide else x.dtype, device=x.device)
    _launch(_features_kernel, x, y, y, MAP=feature_map, UNIT=unit, NORM=False)
    return y


_features = torch.library.custom_op(
    "linattn::features",
    features_forward,
    mutates_args=(),
    schema="(Tensor x, str feature_map, bool unit, bool wide) -> Tensor",
)


@_features.register_fake
def _(x, feature_map, unit, wide):
    return torch.empty(x.shape, dtype=torch.float32 if wide else x.dtype, device=x.device)


def features_backward(x, d_y, feature_map, unit):
    x, d_y = x.contiguous(), d_y.contiguous()
    d_x = torch.empty_like(x)
    _launch(_features_backward_kernel, x, d_y, d_x, MAP=feature_map, UNIT=unit)
    return d_x


_features_backward = torch.library.custom_op(
    "linattn::features_backward",
    features_backward,
    mutates_args=(),
    schema="(Tensor x, Tensor d_y, str feature_map, bool unit) -> Tensor",
)


@_features_backward.register_fake
def _(x, d_y, feature_map, unit):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _features_setup(ctx: Any, inputs, output) -> None:
    x, ctx.feature_map, ctx.unit, _ = inputs
    ctx.save_for_backward(x)


def _features_gradient(gradient, ctx: Any, d_y):
    return gradient(*ctx.saved_tensors, d_y, ctx.feature_map, ctx.unit), None, None, None


_operator = Operator(
    features_forward, _features, _features_setup, _features_gradient, features_backward, _features_backward
)


def unit_features(x: Tensor, feature_map: str) -> tuple[Tensor, Tensor]:
    """`f(x) / |f(x)|` and `|f(x)|` in float32, of a contiguous x; has no gradient."""
    y, norm = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _launch(_features_kernel, x, y, norm, MAP=feature_map, UNIT=True, NORM=True)
    return y, norm


def gate_gradient(a: Tensor, norm: Tensor, d_a: Tensor) -> tuple[Tensor, Tensor]:
    """Of `a = x / |x|` and `norm = |x|`: x again, and its gradient from that of a."""
    x, d_x = torch.empty_like(a), torch.empty_like(a)
    _launch(_gate_gradient_kernel, a, d_a, norm, x, d_x)
    return x, d_x


def features_triton(x: Tensor, feature_map: str = "identity", *, unit: bool = False, wide: bool = False) -> Tensor:
    """`f(x)`, or `f(x) / |f(x)|` over the last dimension; f is `elu1`, `silu` or `identity`; in float32 if `wide`."""
    return _operator(x, feature_map, unit, wide)
