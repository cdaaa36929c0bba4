"""What the one-token kernels share: how a step is cut into programs, and its device functions.

One launch makes a whole decoding step: features, gain, state update and read-out. A program owns a block of
value columns of one head's state and, where there is a K x K matrix beside it, some of its rows; what needs the
whole matrix (a product with it) every program computes for itself, in the same order. States are read from one
tensor and written to another, so no program can see what another writes: there is nothing to wait for, no
atomic, and two runs give the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from linattn_cli.kernels.rows_triton import feature
from linattn_cli.kernels.tiles import ceil_div, padded
from linattn_cli.kernels.triton_common import LOG2_E, NEVER, load_matrix, power_of_two

TILE = 2048  # numbers of a state block one program holds
LARGEST_STRIDE = 2**31 - 1  # strides are passed as int32


class StepBlocks(NamedTuple):
    """Compile-time sizes of a step: value columns and matrix rows a program takes at once; K and V decide alone."""

    BK: int
    BV: int
    BR: int
    columns: int
    num_warps: int


@lru_cache
def step_blocks(K: int, V: int) -> StepBlocks:
    """The sizes of a step.

    >>> step_blocks(64, 64)
    StepBlocks(BK=64, BV=32, BR=32, columns=2, num_warps=4)
    """
    BK = padded(K)
    BV = min(padded(V), max(16, TILE // BK))
    return StepBlocks(BK, BV, min(BK, max(16, TILE // BK)), ceil_div(V, BV), 2 if BK * BV < 1024 else 4)


def rows_of(x: Tensor) -> tuple[Tensor, int, int]:
    """One token `[B, 1, H, D]` as the kernels read it, copied only where its last dimension is not dense.

    Returns the tensor and its strides over batch and heads.
    """
    batch, _, heads, _ = x.shape
    strides = (x.stride(0) if batch > 1 else 0, x.stride(2) if heads > 1 else 0)
    if x.stride(3) != 1 or max(strides) > LARGEST_STRIDE:
        x = x.contiguous()
        strides = (x.stride(0), x.stride(2))
    return x, *strides


@triton.jit
def load_features(p_x, scale, o_d, D: tl.constexpr, MAP: tl.constexpr):
    """`scale phi(x)` at the coordinates `o_d`, float32, zero outside."""
    b_x = tl.load(p_x + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    return tl.where(o_d < D, feature(b_x, MAP) * scale, 0.0)


@triton.jit
def inverse_norm(b_x):
    """`1 / |x|`, of a zero vector a large number."""
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(b_x * b_x, axis=0)), 1e-12)


@triton.jit
def matrix_product(p_A, p_x, scale, o_k, K: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, MAP: tl.constexpr):
    """`A x` for a symmetric A `[K, K]` in memory and x = scale phi(p_x): BR rows at a time, in a fixed order."""
    b_y = tl.zeros((BK,), tl.float32)
    for i_r in range(BK // BR):
        o_r = i_r * BR + tl.arange(0, BR)
        b_A = load_matrix(p_A, o_r, K, K, o_k, K, 1)
        b_y += tl.sum(b_A * load_features(p_x, scale, o_r, K, MAP)[:, None], axis=0)
    return b_y


@triton.jit
def step_decay(p_decay, POWER: tl.constexpr):
    """`exp(POWER log_decay)`; a power of 0 means that there is no decay."""
    if POWER == 0:
        return 1.0
    return power_of_two(tl.maximum(tl.load(p_decay).to(tl.float32), NEVER).to(tl.float64) * LOG2_E * POWER)
