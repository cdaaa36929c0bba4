"""Triton kernels of the penalty gain; `triton.py` launches them.

M = lambda0 I + sum u u^T is additive, so M at the edge of every super-chunk is a cumulative sum, and its
inverse A is taken there, all at once. Inside, C tokens at a time (MATH.md section 3):

    G = I + U A U^T = L D L^T        W = D^-1/2 L^-1 U A        A <- A - W^T W

so that `A_t = A_end + sum_{s>t} w_s w_s^T`. The w of all tokens are what the backward needs: with them, the gain
of another vector is a linear scan from the end of a super-chunk, whose inverse is known too. All its terms add; from
the start, `A - sum_{s<=t} w_s w_s^T`, it would be a small difference of large ones wherever A shrinks much.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_cli.kernels.launch import kernel
from linattn_cli.kernels.triton_common import (
    dot,
    exact_dot,
    load_matrix,
    load_rows,
    pair_mask,
    store_matrix,
    store_rows,
)


@triton.jit
def spd_inverse(b_M, BK: tl.constexpr):
    """Inverse of a symmetric positive definite matrix by BK sweeps in place; no pivoting is needed."""
    o_x = tl.arange(0, BK)
    o_r, o_c = o_x[:, None], o_x[None, :]
    for i in range(BK):
        b_row = tl.sum(tl.where(o_r == i, b_M, 0.0), axis=0)
        b_column = tl.sum(tl.where(o_c == i, b_M, 0.0), axis=1)
        scale = 1.0 / tl.sum(tl.where(o_x == i, b_row, 0.0), axis=0)
        b_row *= scale
        b_swept = b_M - b_column[:, None] * b_row[None, :]
        b_swept = tl.where(o_r == i, b_row[None, :], b_swept)
        b_M = tl.where(o_c == i, tl.where(o_x == i, -scale, b_column * scale)[:, None], b_swept)
    return -b_M


@triton.jit
def unit_lower_inverse(b_G, C: tl.constexpr):
    """`(D^-1/2 L^-1)^T` of symmetric positive definite `G = L D L^T`, `[COPIES, C, C]`, by C elimination steps.

    The transpose is carried: each step then needs one row and otherwise columns.
    """
    o_r, o_c, o_x = tl.arange(0, C)[None, :, None], tl.arange(0, C)[None, None, :], tl.arange(0, C)[None, :]
    b_T = tl.where((o_r == o_c) & (b_G == b_G), 1.0, 0.0)
    for i in tl.static_range(C):
        b_row = tl.sum(tl.where(o_r == i, b_G, 0.0), axis=1)
        b_column = tl.sum(tl.where(o_c == i, b_G, 0.0), axis=2)
        b_t = tl.sum(tl.where(o_c == i, b_T, 0.0), axis=2)
        b_scale = 1.0 / tl.sum(tl.where(o_x == i, b_row, 0.0), axis=1)
        b_factor = tl.where(o_x > i, b_row * b_scale[:, None], 0.0)
        b_G -= b_column[:, :, None] * b_factor[:, None, :]
        b_T -= b_t[:, :, None] * b_factor[:, None, :]
    b_pivots = tl.sum(tl.where(o_r == o_c, b_G, 0.0), axis=1)
    return b_T * tl.rsqrt(b_pivots)[:, None, :]


@kernel
def inverse_kernel(p_mass, p_inverse, p_last, lambda0, edges, K: tl.constexpr, BK: tl.constexpr):
    """`(lambda0 I + P)^-1` of every mass; of `edges` masses a head the inverse of the last is stored twice."""
    i_p = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_M = load_matrix(p_mass + i_p * K * K, o_k, K, K, o_k, K, 1)
    b_M += tl.where(o_k[:, None] == o_k[None, :], lambda0, 0.0)
    b_A = spd_inverse(b_M, BK)
    store_matrix(p_inverse + i_p * K * K, b_A, o_k, K, K, o_k, K)
    if i_p % edges == edges - 1:
        store_matrix(p_last + i_p // edges * K * K, b_A, o_k, K, K, o_k, K)


@kernel
def downdate_kernel(
    p_u, p_inverse, p_w, p_added, p_final, T, length, supers, edges, B, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, COPIES: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """The downdates w of one super-chunk, walked from the inverse at its edge, and `trace(U A U^T)` of every step.

    Every warp holds its own copy of the C tokens at hand, as 16 rows of one tall tile: the serial elimination
    then never waits for another warp. Where A fits one warp's registers, one warp is best.
    FINAL: write the inverse after the last token.
    """
    i_p = tl.program_id(0)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_c, o_n = tl.arange(0, BK), tl.arange(0, C), tl.arange(0, COPIES * C)
    row = i_b.to(tl.int64) * T * H + i_h
    state = (i_b * H + i_h).to(tl.int64)
    b_A = load_matrix(p_inverse + (state * edges + i_s) * K * K, o_k, K, K, o_k, K, 1)
    first = i_s * length
    for i_t in range(first, tl.minimum(first + length, T), C):
        b_u = load_rows(p_u + row * K, i_t + o_c, T, H * K, o_k, K, BK)
        b_copies = load_rows(p_u + row * K, i_t + o_n % C, T, H * K, o_k, K, BK)
        b_z = exact_dot(b_copies, b_A)
        b_G = exact_dot(b_z, tl.trans(b_u)) + tl.where(o_n[:, None] % C == o_c[None, :], 1.0, 0.0)
        b_trace = tl.sum(tl.where(o_n[:, None] % C == o_c[None, :], b_G, 0.0), axis=1)
        tl.store(p_added + state * tl.cdiv(T, C) + i_t // C, tl.sum(b_trace, axis=0) * (1.0 / COPIES) - C)
        b_T = unit_lower_inverse(tl.reshape(b_G, (COPIES, C, C)), C)
        b_ws = exact_dot(tl.permute(b_T, (0, 2, 1)), tl.reshape(b_z, (COPIES, C, BK)))
        b_w = tl.sum(b_ws, axis=0) * (1.0 / COPIES)
        store_rows(p_w + row * K, b_w, i_t + o_c, T, H * K, o_k, K, BK)
        b_A -= exact_dot(tl.trans(b_w), b_w)
    if FINAL:
        store_matrix(p_final + state * K * K, b_A, o_k, K, K, o_k, K)


@triton.jit
def unit_rows(b_x, p_norm, o_t, T, stride):
    """Rows over their norms, which are stored; a zero row stays zero."""
    b_norm = tl.sqrt(tl.sum(b_x * b_x, axis=1))
    tl.store(p_norm + o_t.to(tl.int64) * stride, b_norm, mask=o_t < T)
    return b_x / tl.maximum(b_norm, 1e-12)[:, None]


@kernel
def step_kernel(
    p_u, p_k, p_mass, p_inverse, p_x, p_norm, p_w, p_added, p_inverses, p_final, p_masses, p_total,
    K: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One token of one head from its inverse: everything that several tokens take five launches for.

    Sums in plain float32: split products would lose a digit a token, and A is not taken anew for 64 of them.
    """
    i_p = tl.program_id(0)
    state = i_p.to(tl.int64)
    o_k = tl.arange(0, BK)
    b_u = tl.load(p_u + state * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_A = load_matrix(p_inverse + state * K * K, o_k, K, K, o_k, K, 1)
    b_P = load_matrix(p_mass + state * K * K, o_k, K, K, o_k, K, 1)
    b_z = tl.sum(b_A * b_u[None, :], axis=1)
    added = tl.sum(b_u * b_z, axis=0)
    store_matrix(p_inverses + state * K * K, b_A, o_k, K, K, o_k, K)
    store_matrix(p_masses + state * 2 * K * K, b_P, o_k, K, K, o_k, K)
    b_A -= b_z[:, None] * b_z[None, :] / (1.0 + added)
    b_P += b_u[:, None] * b_u[None, :]
    store_matrix(p_final + state * K * K, b_A, o_k, K, K, o_k, K)
    store_matrix(p_masses + (state * 2 + 1) * K * K, b_P, o_k, K, K, o_k, K)
    store_matrix(p_total + state * K * K, b_P, o_k, K, K, o_k, K)
    tl.store(p_w + state * K + o_k, b_z / tl.sqrt(1.0 + added), mask=o_k < K)
    tl.store(p_added + state, added)
    for j in range(G):
        row = state * G + j
        b_k = tl.load(p_k + row * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_x = tl.sum(b_A * b_k[None, :], axis=1)
        if UNIT:
            norm = tl.sqrt(tl.sum(b_x * b_x, axis=0))
            tl.store(p_norm + row, norm)
            b_x /= tl.maximum(norm, 1e-12)
        tl.store(p_x + row * K + o_k, b_x.to(p_x.dtype.element_ty), mask=o_k < K)


@kernel
def apply_kernel(
    p_k, p_end, p_w, p_x, p_norm, T, length, supers, edges, B, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, G: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """`x_t = A_t k_t` of one super-chunk from the downdates w, walked backwards from the inverse at its end.

    `p_end` holds `edges` matrices a head, of which that of super-chunk i is the i-th. UNIT: write x / |x| and |x|.
    """
    i_p = tl.program_id(0)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_c = tl.arange(0, BK), tl.arange(0, C)
    row = i_b.to(tl.int64) * T * H + i_h
    state = (i_b * H + i_h).to(tl.int64)
    b_A = load_matrix(p_end + (state * edges + i_s) * K * K, o_k, K, K, o_k, K, 1)
    first = i_s * length
    count = tl.cdiv(tl.minimum(length, T - first), C)
    for n in range(count):
        o_t = first + (count - 1 - n) * C + o_c
        b_w = load_rows(p_w + row * K, o_t, T, H * K, o_k, K, BK)
        for j in range(G):
            b_k = load_rows(p_k + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK)
            b_score = tl.where(pair_mask(C, True, True), exact_dot(b_k, tl.trans(b_w)), 0.0)
            b_x = exact_dot(b_k, b_A) + exact_dot(b_score, b_w)
            if UNIT:
                b_x = unit_rows(b_x, p_norm + row * G + j, o_t, T, H * G)
            store_rows(p_x + (row * G + j) * K, b_x, o_t, T, H * G * K, o_k, K, BK)
        b_A += exact_dot(tl.trans(b_w), b_w)


@kernel
def correct_kernel(
    p_k, p_u, p_end, p_w, p_mass, p_added, p_x, p_norm, lambda0, T, length, supers, edges, B, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, G: tl.constexpr, UNIT: tl.constexpr,
    STEP: tl.constexpr, HEAVY: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Correct gains by their residual, `x += A_t (k - M_t x)`, in the chunks that add much mass.

    There A_t is small along the directions it added and large along others; the gradient needs x relative to either,
    and the residual tells. Such chunks are few, at the start of a sequence as a rule: a program looks at SHARE
    chunks, far apart, and sums up M at the start and A at the end of those it finds from the edges of their
    super-chunk.
    """
    i_p, programs = tl.program_id(0), tl.num_programs(0)
    o_k, o_c, o_n = tl.arange(0, BK), tl.arange(0, C), tl.arange(0, SHARE)
    o_i = i_p + o_n * programs
    steps = tl.cdiv(T, STEP)
    o_step = (o_i // (B * H) * (C // STEP))[:, None] + tl.arange(0, C // STEP)[None, :]
    p_steps = p_added + (o_i % (B * H)).to(tl.int64)[:, None] * steps + o_step
    b_added = tl.sum(tl.load(p_steps, mask=o_step < steps, other=0.0), axis=1)
    for n in range(SHARE):
        if tl.sum(tl.where(o_n == n, b_added, 0.0), axis=0) > HEAVY:
            i = i_p + n * programs
            i_t, i_b, i_h = i // (B * H) * C, i % (B * H) // H, i % H
            i_s = i_t // length
            row = i_b.to(tl.int64) * T * H + i_h
            state = (i_b * H + i_h).to(tl.int64)
            b_M = load_matrix(p_mass + (state * (supers + 1) + i_s) * K * K, o_k, K, K, o_k, K, 1)
            b_M += tl.where(o_k[:, None] == o_k[None, :], lambda0, 0.0)
            for i_x in range(i_s * length, i_t, C):
                b_u = load_rows(p_u + row * K, i_x + o_c, T, H * K, o_k, K, BK).to(tl.float32)
                b_M += tl.dot(tl.trans(b_u), b_u, input_precision="tf32x3")
            b_A = load_matrix(p_end + (state * edges + i_s) * K * K, o_k, K, K, o_k, K, 1)
            for i_x in range(i_t + C, tl.minimum(i_s * length + length, T), C):
                b_w = load_rows(p_w + row * K, i_x + o_c, T, H * K, o_k, K, BK)
                b_A += tl.dot(tl.trans(b_w), b_w, input_precision="tf32x3")
            o_t = i_t + o_c
            b_u = load_rows(p_u + row * K, o_t, T, H * K, o_k, K, BK).to(tl.float32)
            b_w = load_rows(p_w + row * K, o_t, T, H * K, o_k, K, BK)
            for j in range(G):
                p_kj, p_xj = p_k + (row * G + j) * K, p_x + (row * G + j) * K
                b_x = load_rows(p_xj, o_t, T, H * G * K, o_k, K, BK).to(tl.float32)
                if UNIT:
                    p_row = p_norm + row * G + j + o_t.to(tl.int64) * H * G
                    b_x *= tl.load(p_row, mask=o_t < T, other=0.0)[:, None]
                b_r = load_rows(p_kj, o_t, T, H * G * K, o_k, K, BK).to(tl.float32)
                b_r -= tl.dot(b_x, b_M, input_precision="tf32x3")
                b_score = tl.dot(b_x, tl.trans(b_u), input_precision="tf32x3")
                b_r -= tl.dot(tl.where(pair_mask(C, False, False), b_score, 0.0), b_u, input_precision="tf32x3")
                b_score = tl.dot(b_r, tl.trans(b_w), input_precision="tf32x3")
                b_x += tl.dot(tl.where(pair_mask(C, True, True), b_score, 0.0), b_w, input_precision="tf32x3")
                b_x += tl.dot(b_r, b_A, input_precision="tf32x3")
                if UNIT:
                    b_x = unit_rows(b_x, p_norm + row * G + j, o_t, T, H * G)
                store_rows(p_xj, b_x, o_t, T, H * G * K, o_k, K, BK)


@kernel
def mass_gradient_kernel(
    p_u, p_x, p_y, p_edge, p_du, T, length, supers, B, H,
    K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`du_s = -sum_{t>=s} (y_t x_t^T + x_t y_t^T) u_s`, walked from the end; a block of columns of du.

    `p_edge` holds Z, half of the sum that enters each super-chunk from the right: the sum is Z + Z^T.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    row = i_b.to(tl.int64) * T * H + i_h
    p_edge += ((i_b * H + i_h).to(tl.int64) * supers + i_s) * K * K
    b_Z = load_matrix(p_edge, o_k, K, K, o_v, K, 1) + load_matrix(p_edge, o_k, K, 1, o_v, K, K)
    first = i_s * length
    count = tl.cdiv(tl.minimum(length, T - first), C)
    for n in range(count):
        o_t = first + (count - 1 - n) * C + tl.arange(0, C)
        b_u = load_rows(p_u + row * K, o_t, T, H * K, o_k, K, BK)
        b_du = dot(b_u, b_Z, DOT, PRECISION)
        for j in range(G):
            p_xj, p_yj = p_x + (row * G + j) * K, p_y + (row * G + j) * K
            b_x = load_rows(p_xj, o_t, T, H * G * K, o_k, K, BK)
            b_y = load_rows(p_yj, o_t, T, H * G * K, o_k, K, BK)
            b_xv = load_rows(p_xj, o_t, T, H * G * K, o_v, K, BV)
            b_yv = load_rows(p_yj, o_t, T, H * G * K, o_v, K, BV)
            b_ux = tl.where(pair_mask(C, True, False), dot(b_u, tl.trans(b_x), DOT, PRECISION), 0.0)
            b_uy = tl.where(pair_mask(C, True, False), dot(b_u, tl.trans(b_y), DOT, PRECISION), 0.0)
            b_du += dot(b_ux, b_yv, DOT, PRECISION) + dot(b_uy, b_xv, DOT, PRECISION)
            b_Z += dot(tl.trans(b_x), b_yv, DOT, PRECISION) + dot(tl.trans(b_y), b_xv, DOT, PRECISION)
        store_rows(p_du + row * K, -b_du, o_t, T, H * K, o_v, K, BV)
