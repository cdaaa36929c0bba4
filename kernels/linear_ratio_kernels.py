"""Triton kernels of linear attention with a feature map and the ratio read-out; `linear_ratio_triton.py` launches them.

They are the linear scan's, with two things added: what is multiplied is mapped where it is loaded, and beside S goes
`z = sum phi(k)`, the state of a value that is 1 at every token. Scores then serve both the output and its
denominator, and neither phi(q) nor phi(k) is ever written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_cli.kernels.launch import kernel
from linattn_cli.kernels.rows_triton import feature, feature_slope
from linattn_cli.kernels.triton_common import dot, load_matrix, load_rows, pair_mask, store_matrix, store_rows


@triton.jit
def load_mapped(p_x, o_t, T, stride, o_d, D: tl.constexpr, BD: tl.constexpr, MAP: tl.constexpr):
    """Rows of `phi(x)`, rounded to the dtype of x, zero outside: phi(0) need not be 0."""
    b_x = load_rows(p_x, o_t, T, stride, o_d, D, BD).to(tl.float32)
    b_x = tl.where((o_t < T)[:, None] & (o_d < D)[None, :], feature(b_x, MAP), 0.0)
    return b_x.to(p_x.dtype.element_ty)


@kernel
def ratio_sum_kernel(
    p_x, p_y, p_weight, p_sum, p_zsum, T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
    MAP: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sum_t phi(x_t) y_t^T` and `sum_t weight_t phi(x_t)` of one super-chunk, over the J heads of one state head."""
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    row = (i_b.to(tl.int64) * T * H + i_h) * J
    b_S = tl.zeros((BK, BV), tl.float32)
    b_z = tl.zeros((BK,), tl.float32)
    first = i_s * length
    for i_c in range(first, tl.minimum(first + length, chunks)):
        o_t = i_c * C + tl.arange(0, C)
        for j in range(J):
            b_x = load_mapped(p_x + (row + j) * K, o_t, T, H * J * K, o_k, K, BK, MAP)
            b_y = load_rows(p_y + (row + j) * V, o_t, T, H * J * V, o_v, V, BV)
            b_S += dot(tl.trans(b_x), b_y, DOT, PRECISION)
            b_wide = b_x.to(tl.float32)
            if WEIGHTED:
                b_wide *= tl.load(p_weight + row + j + o_t.to(tl.int64) * H * J, mask=o_t < T, other=0.0)[:, None]
            b_z += tl.sum(b_wide, axis=0)
    i_out = (i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s
    store_matrix(p_sum + i_out * K * V, b_S, o_k, K, V, o_v, V)
    if i_v == 0:
        tl.store(p_zsum + i_out * K + o_k, b_z, mask=o_k < K)


@kernel
def ratio_output_kernel(
    p_x, p_y, p_v, p_start, p_zstart, p_o, p_den, T, chunks, length, B, H, floor,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, MAP: tl.constexpr, RATIO: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one super-chunk of one output head from its edge state: reads along phi(x), writes of v along phi(y).

    RATIO: the quotients by `max(phi(x_t).z_t, floor)`, and these denominators before they are clamped. Without it and
    in REVERSE, with x = k, y = q and v the gradient of the outputs, what is written is the gradient of the values.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_q = i_p // (B * H * G), i_p % (B * H * G) // (H * G), i_p % (H * G)
    i_h = i_q // G
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    row_x = i_b.to(tl.int64) * T * H * G + i_q
    row_y = (i_b.to(tl.int64) * T * H + i_h) * J
    edge = (i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s
    b_S = load_matrix(p_start + edge * K * V, o_k, K, V, o_v, V, 1)
    b_z = tl.load(p_zstart + edge * K + o_k, mask=o_k < K, other=0.0)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        b_x = load_mapped(p_x + row_x * K, o_t, T, H * G * K, o_k, K, BK, MAP)
        b_o = dot(b_x, b_S, DOT, PRECISION)
        b_den = tl.sum(b_x.to(tl.float32) * b_z[None, :], axis=1)
        for j in range(J):
            b_y = load_mapped(p_y + (row_y + j) * K, o_t, T, H * J * K, o_k, K, BK, MAP)
            b_v = load_rows(p_v + (row_y + j) * V, o_t, T, H * J * V, o_v, V, BV)
            b_score = tl.where(pair_mask(C, REVERSE, False), dot(b_x, tl.trans(b_y), DOT, PRECISION), 0.0)
            b_o += dot(b_score, b_v, DOT, PRECISION)
            b_S += dot(tl.trans(b_y), b_v, DOT, PRECISION)
            if RATIO:
                b_den += tl.sum(b_score, axis=1)
                b_z += tl.sum(b_y.to(tl.float32), axis=0)
        if RATIO:
            b_o /= tl.maximum(b_den, floor)[:, None]
            if i_v == 0:
                tl.store(p_den + row_x + o_t.to(tl.int64) * H * G, b_den, mask=o_t < T)
        store_rows(p_o + row_x * V, b_o, o_t, T, H * G * V, o_v, V, BV)


@kernel
def ratio_gradient_kernel(
    p_x, p_a, p_b, p_y, p_weight, p_start, p_zstart, p_dx, T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, MAP: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dx_t = phi'(x_t) (S a_t + z-term + sum_s (a_t.b_s + weight) phi(y_s))`, BK columns; S and z as at the edge.

    Forward, for a query head: x = q, a = dO, b = v, y = k; the weight is dden of the reading token t, and times z.
    REVERSE, for a key head: x = k, a = v, b = dO, y = q over its J query heads; the weight is dden of token s, and z
    has it already.
    """
    i_p, i_k = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_q = i_p // (B * H * G), i_p % (B * H * G) // (H * G), i_p % (H * G)
    i_h = i_q // G
    o_k, o_v = i_k * BK + tl.arange(0, BK), tl.arange(0, BV)
    row_x = i_b.to(tl.int64) * T * H * G + i_q
    row_y = (i_b.to(tl.int64) * T * H + i_h) * J
    edge = (i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s
    b_S = load_matrix(p_start + edge * K * V, o_v, V, 1, o_k, K, V)
    b_z = tl.load(p_zstart + edge * K + o_k, mask=o_k < K, other=0.0)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        b_a = load_rows(p_a + row_x * V, o_t, T, H * G * V, o_v, V, BV)
        b_d = dot(b_a, b_S, DOT, PRECISION)
        if REVERSE:
            b_d += b_z[None, :]
        else:
            b_weight = tl.load(p_weight + row_x + o_t.to(tl.int64) * H * G, mask=o_t < T, other=0.0)
            b_d += b_weight[:, None] * b_z[None, :]
        for j in range(J):
            b_b = load_rows(p_b + (row_y + j) * V, o_t, T, H * J * V, o_v, V, BV)
            b_y = load_mapped(p_y + (row_y + j) * K, o_t, T, H * J * K, o_k, K, BK, MAP)
            b_score = dot(b_a, tl.trans(b_b), DOT, PRECISION)
            b_wide = b_y.to(tl.float32)
            if REVERSE:
                b_other = tl.load(p_weight + row_y + j + o_t.to(tl.int64) * H * J, mask=o_t < T, other=0.0)
                b_score += b_other[None, :]
                b_z += tl.sum(b_wide * b_other[:, None], axis=0)
            else:
                b_score += b_weight[:, None]
                b_z += tl.sum(b_wide, axis=0)
            b_d += dot(tl.where(pair_mask(C, REVERSE, False), b_score, 0.0), b_y, DOT, PRECISION)
            b_S += dot(tl.trans(b_b), b_y, DOT, PRECISION)
        b_x = load_rows(p_x + row_x * K, o_t, T, H * G * K, o_k, K, BK).to(tl.float32)
        store_rows(p_dx + row_x * K, b_d * feature_slope(b_x, MAP), o_t, T, H * G * K, o_k, K, BK)
