"""Triton kernels of the delta scan's backward pass; `triton.py` launches them.

The adjoint of a chunk has the shape of the chunk itself, run the other way (MATH.md section 7). D is the
gradient of the state, E the gradient of the residual where a caller used it:

    dV = (I + N)^-T (M^T dO + E + A' D1) = U* + W* D1
    D0 = g D1 + Q'^T dO - P'^T dV = F^T D1 + Y*

F is the one of the forward pass, transposed. With D1 and S0 of every chunk at hand the rest is products:

    dQ =  dO S0^T + (dO R^T) A          dP = -dV S0^T - (dV R^T) A
    dA =  R D1^T + (dO R^T)^T Q - (dV R^T)^T P
"""

from __future__ import annotations

import triton.language as tl

from linattn_cli.kernels.delta.triton_forward import edge_weights, pair_weights
from linattn_cli.kernels.launch import kernel
from linattn_cli.kernels.triton_common import dot, load_matrix, load_rows, store_matrix, store_rows


@kernel
def prepare_adjoint_kernel(
    p_q, p_a, p_decay, p_inverse, p_do, p_dresidual, p_w, p_u, T, chunks, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, RESIDUAL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`W* = (I + N)^-T A'` and a block of columns of `U* = (I + N)^-T (M^T dO + E)` of one chunk."""
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_c, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v, o_c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    o_t = i_c * C + o_c
    row = i_b.to(tl.int64) * T * H + i_h
    b_x = tl.trans(load_rows(p_inverse + row * C, o_t, T, H * C, o_c, C, C))
    b_a = load_rows(p_a + row * K, o_t, T, H * K, o_k, K, BK)
    _, b_m = pair_weights(p_decay + row, o_t, T, H, C, DECAY, REVERSE)
    b_y = tl.zeros((C, BV), tl.float32)
    if RESIDUAL:
        b_y += load_rows(p_dresidual + row * V, o_t, T, H * V, o_v, V, BV)
    for j in range(G):
        b_q = load_rows(p_q + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK)
        b_do = load_rows(p_do + (row * G + j) * V, o_t, T, H * G * V, o_v, V, BV)
        b_score = b_m * dot(b_q, tl.trans(b_a), DOT, PRECISION)
        b_y += dot(tl.trans(b_score), b_do, DOT, PRECISION)
    store_rows(p_u + row * V, dot(b_x, b_y, DOT, PRECISION), o_t, T, H * V, o_v, V, BV)
    if DECAY:
        _, _, b_write, _ = edge_weights(p_decay + row, o_t, T, H, REVERSE)
        b_a = b_a * b_write[:, None]
    if i_v == 0:
        store_rows(p_w + row * K, dot(b_x, b_a, DOT, PRECISION), o_t, T, H * K, o_k, K, BK)


@kernel
def adjoint_offset_kernel(
    p_q, p_p, p_decay, p_do, p_w, p_u, p_offset, T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns of Y* of one super-chunk. REVERSE is the direction of the forward scan."""
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    row = i_b.to(tl.int64) * T * H + i_h
    b_D = tl.zeros((BK, BV), tl.float32)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + n if REVERSE else first + count - 1 - n
        o_t = i_c * C + tl.arange(0, C)
        b_w = load_rows(p_w + row * K, o_t, T, H * K, o_k, K, BK)
        b_u = load_rows(p_u + row * V, o_t, T, H * V, o_v, V, BV)
        b_p = load_rows(p_p + row * K, o_t, T, H * K, o_k, K, BK)
        b_dv = b_u + dot(b_w, b_D, DOT, PRECISION)
        if DECAY:
            b_read, b_query, _, b_total = edge_weights(p_decay + row, o_t, T, H, REVERSE)
            b_p = b_p * b_read[:, None]
            b_D *= b_total
        for j in range(G):
            b_q = load_rows(p_q + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK)
            b_do = load_rows(p_do + (row * G + j) * V, o_t, T, H * G * V, o_v, V, BV)
            if DECAY:
                b_q = b_q * b_query[:, None]
            b_D += dot(tl.trans(b_q), b_do, DOT, PRECISION)
        b_D -= dot(tl.trans(b_p), b_dv, DOT, PRECISION)
    i_out = (i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s
    store_matrix(p_offset + i_out * K * V, b_D, o_k, K, V, o_v, V)


@kernel
def adjoint_kernel(
    p_q, p_p, p_a, p_decay, p_do, p_residual, p_w, p_u, p_start, p_dv, p_da, p_dots, p_final,
    T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk D over one super-chunk and write dV, dA and the gradient of the initial state.

    Sums over the value columns of one block: dA (and `a . dA`) is a partial result where there are several.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    supers = tl.cdiv(chunks, length)
    row = i_b.to(tl.int64) * T * H + i_h
    part = i_v.to(tl.int64) * B * T * H
    state = (i_b * H + i_h).to(tl.int64)
    b_D = load_matrix(p_start + (state * supers + i_s) * K * V, o_k, K, V, o_v, V, 1)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + n if REVERSE else first + count - 1 - n
        o_t = i_c * C + tl.arange(0, C)
        b_w = load_rows(p_w + row * K, o_t, T, H * K, o_k, K, BK)
        b_u = load_rows(p_u + row * V, o_t, T, H * V, o_v, V, BV)
        b_p = load_rows(p_p + row * K, o_t, T, H * K, o_k, K, BK)
        b_r = load_rows(p_residual + row * V, o_t, T, H * V, o_v, V, BV)
        b_n, b_m = pair_weights(p_decay + row, o_t, T, H, C, DECAY, REVERSE)
        b_dv = b_u + dot(b_w, b_D, DOT, PRECISION)
        store_rows(p_dv + row * V, b_dv, o_t, T, H * V, o_v, V, BV)
        b_da = dot(b_r, tl.trans(b_D), DOT, PRECISION)
        b_n *= dot(b_dv, tl.trans(b_r), DOT, PRECISION)
        if DECAY:
            b_read, b_query, b_write, b_total = edge_weights(p_decay + row, o_t, T, H, REVERSE)
            b_da *= b_write[:, None]
            b_D *= b_total
        b_da -= dot(tl.trans(b_n), b_p, DOT, PRECISION)
        if DECAY:
            b_p = b_p * b_read[:, None]
        b_D -= dot(tl.trans(b_p), b_dv, DOT, PRECISION)
        for j in range(G):
            b_q = load_rows(p_q + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK)
            b_do = load_rows(p_do + (row * G + j) * V, o_t, T, H * G * V, o_v, V, BV)
            b_score = b_m * dot(b_do, tl.trans(b_r), DOT, PRECISION)
            b_da += dot(tl.trans(b_score), b_q, DOT, PRECISION)
            if DECAY:
                b_q = b_q * b_query[:, None]
            b_D += dot(tl.trans(b_q), b_do, DOT, PRECISION)
        store_rows(p_da + (part + row) * K, b_da, o_t, T, H * K, o_k, K, BK)
        if DECAY:
            b_a = load_rows(p_a + row * K, o_t, T, H * K, o_k, K, BK).to(tl.float32)
            p_row = p_dots + part + row + o_t.to(tl.int64) * H
            tl.store(p_row, tl.sum(b_a * b_da, axis=1), mask=o_t < T)
    if i_s == (supers - 1 if REVERSE else 0):
        store_matrix(p_final + state * K * V, b_D, o_k, K, V, o_v, V)


@kernel
def read_gradient_kernel(
    p_q, p_p, p_a, p_decay, p_do, p_residual, p_dv, p_start, p_dq, p_dp, p_qdots, p_pdots,
    T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk S over one super-chunk again, from the known residuals, and write dQ and dP."""
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    supers = tl.cdiv(chunks, length)
    row = i_b.to(tl.int64) * T * H + i_h
    part = i_v.to(tl.int64) * B * T * H
    state = (i_b * H + i_h).to(tl.int64)
    b_S = load_matrix(p_start + (state * supers + i_s) * K * V, o_k, K, V, o_v, V, 1)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        b_a = load_rows(p_a + row * K, o_t, T, H * K, o_k, K, BK)
        b_dv = load_rows(p_dv + row * V, o_t, T, H * V, o_v, V, BV)
        b_r = load_rows(p_residual + row * V, o_t, T, H * V, o_v, V, BV)
        b_n, b_m = pair_weights(p_decay + row, o_t, T, H, C, DECAY, REVERSE)
        b_dp = dot(b_dv, tl.trans(b_S), DOT, PRECISION)
        if DECAY:
            b_read, b_query, b_write, b_total = edge_weights(p_decay + row, o_t, T, H, REVERSE)
            b_dp *= b_read[:, None]
        b_n *= dot(b_dv, tl.trans(b_r), DOT, PRECISION)
        b_dp += dot(b_n, b_a, DOT, PRECISION)
        store_rows(p_dp + (part + row) * K, -b_dp, o_t, T, H * K, o_k, K, BK)
        if DECAY:
            b_p = load_rows(p_p + row * K, o_t, T, H * K, o_k, K, BK).to(tl.float32)
            p_row = p_pdots + part + row + o_t.to(tl.int64) * H
            tl.store(p_row, -tl.sum(b_p * b_dp, axis=1), mask=o_t < T)
        for j in range(G):
            b_do = load_rows(p_do + (row * G + j) * V, o_t, T, H * G * V, o_v, V, BV)
            b_dq = dot(b_do, tl.trans(b_S), DOT, PRECISION)
            if DECAY:
                b_dq *= b_query[:, None]
            b_score = b_m * dot(b_do, tl.trans(b_r), DOT, PRECISION)
            b_dq += dot(b_score, b_a, DOT, PRECISION)
            store_rows(p_dq + ((part + row) * G + j) * K, b_dq, o_t, T, H * G * K, o_k, K, BK)
            if DECAY:
                b_q = load_rows(p_q + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK).to(tl.float32)
                p_row = p_qdots + (part + row) * G + j + o_t.to(tl.int64) * H * G
                tl.store(p_row, tl.sum(b_q * b_dq, axis=1), mask=o_t < T)
        if DECAY:
            b_a = b_a * b_write[:, None]
            b_S *= b_total
        b_S += dot(tl.trans(b_a), b_r, DOT, PRECISION)
