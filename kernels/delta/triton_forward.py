"""Triton kernels of the delta scan's forward pass; `triton.py` launches them.

In a chunk (MATH.md section 3), with N the reads of earlier writes and M the queries of them:

    R  = (I + N)^-1 (V - P' S0) = U - W S0          P' = rows of P, decayed from the chunk's edge
    O  = Q' S0 + M R
    S1 = g S0 + A'^T R                              A' = rows of A, decayed to the chunk's other edge

so the state of a whole super-chunk is an affine map `S -> F S + Y`. F and Y of every super-chunk are walked
side by side, the few maps are chained, and a second walk writes the outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_cli.kernels.launch import kernel
from linattn_cli.kernels.triton_common import (
    dot,
    edge_decay,
    exact_dot,
    load_decay,
    load_matrix,
    load_rows,
    pair_decay,
    pair_mask,
    power_of_two,
    store_matrix,
    store_rows,
)


@triton.jit
def pair_weights(p_decay, o_t, T, H, C: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr):
    """Weights of N (a read before the token's own decay and write) and of M (a query after them)."""
    if DECAY:
        o_r, o_c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        b_decay, b_sum, _ = load_decay(p_decay, o_t, T, H)
        if REVERSE:
            b_m = pair_decay(b_decay, b_sum, C, True, False)
            b_n = tl.where(o_r < o_c, b_m, 0.0)
        else:
            b_n = pair_decay(b_decay, b_sum, C, False, True)
            b_m = tl.where(o_r == o_c, 1.0, b_n * power_of_two(b_decay)[:, None])
    else:
        b_n = tl.where(pair_mask(C, REVERSE, True), 1.0, 0.0)
        b_m = tl.where(pair_mask(C, REVERSE, False), 1.0, 0.0)
    return b_n, b_m


@triton.jit
def edge_weights(p_decay, o_t, T, H, REVERSE: tl.constexpr):
    """Decay from the entering edge to the reads and to the queries, from the writes to the leaving edge, overall."""
    b_decay, b_sum, b_total = load_decay(p_decay, o_t, T, H)
    b_query = edge_decay(b_decay, b_sum, b_total, REVERSE, REVERSE)
    b_read = edge_decay(b_decay, b_sum, b_total, REVERSE, True)
    b_write = edge_decay(b_decay, b_sum, b_total, not REVERSE, not REVERSE)
    return b_read, b_query, b_write, power_of_two(b_total)


@triton.jit
def unit_inverse(b_n, C: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + N)^-1` of a strictly triangular N, upper or lower.

    Diagonal blocks of 2, 4, 8, ... are inverted from their halves, `X <- X - X B X` with B the coupling of
    the halves: as stable as substitution, where a power series of N would cancel. Blocks up to 16 stay
    inside one warp each, as a batch.
    """
    S: tl.constexpr = C // 16
    o_b = tl.arange(0, S)
    o_r, o_c = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    on_diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_d = tl.sum(tl.where(on_diagonal, tl.reshape(b_n, (S, 16, S, 16)), 0.0), axis=2)
    b_y = tl.where(o_r == o_c, 1.0, 0.0) - tl.where(o_r // 2 == o_c // 2, b_d, 0.0)
    for level in tl.static_range(1, 4):
        coupled = (o_r // (2 << level) == o_c // (2 << level)) & (o_r // (1 << level) != o_c // (1 << level))
        b_half = dot(tl.where(coupled, b_d, 0.0), b_y, tl.float32, PRECISION)
        b_y -= dot(b_y, b_half, tl.float32, PRECISION)
    b_x = tl.reshape(tl.where(on_diagonal, b_y[:, :, None, :], 0.0), (C, C))
    o_r, o_c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for level in tl.static_range(4, LEVELS):
        coupled = (o_r // (2 << level) == o_c // (2 << level)) & (o_r // (1 << level) != o_c // (1 << level))
        b_half = dot(tl.where(coupled, b_n, 0.0), b_x, DOT, PRECISION)
        b_x -= dot(b_x, b_half, DOT, PRECISION)
    return b_x


@kernel
def prepare_kernel(
    p_p, p_a, p_v, p_decay, p_w, p_u, p_inverse, T, chunks, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, SAVE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`(I + N)^-1` of one chunk, `W = (I + N)^-1 P'` and `U = (I + N)^-1 V`."""
    i_p = tl.program_id(0)
    i_c, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v, o_c = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    o_t = i_c * C + o_c
    row = i_b.to(tl.int64) * T * H + i_h
    b_p = load_rows(p_p + row * K, o_t, T, H * K, o_k, K, BK)
    b_a = load_rows(p_a + row * K, o_t, T, H * K, o_k, K, BK)
    b_n, _ = pair_weights(p_decay + row, o_t, T, H, C, DECAY, REVERSE)
    b_x = unit_inverse(b_n * dot(b_p, tl.trans(b_a), DOT, PRECISION), C, LEVELS, DOT, PRECISION)
    if SAVE:
        store_rows(p_inverse + row * C, b_x, o_t, T, H * C, o_c, C, C)
    if DECAY:
        b_read, _, _, _ = edge_weights(p_decay + row, o_t, T, H, REVERSE)
        b_p = b_p * b_read[:, None]
    store_rows(p_w + row * K, dot(b_x, b_p, DOT, PRECISION), o_t, T, H * K, o_k, K, BK)
    for i_v in tl.static_range((V + BV - 1) // BV):
        b_v = load_rows(p_v + row * V, o_t, T, H * V, i_v * BV + o_v, V, BV)
        store_rows(p_u + row * V, dot(b_x, b_v, DOT, PRECISION), o_t, T, H * V, i_v * BV + o_v, V, BV)


@kernel
def map_kernel(
    p_a, p_w, p_u, p_decay, p_transition, p_offset, T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns of one super-chunk's affine map: of Y (walked from zero), or of F (from the identity)."""
    i_p, i_x = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    value_blocks = (V + BV - 1) // BV
    is_offset = i_x < value_blocks
    o_k, o_x = tl.arange(0, BK), tl.arange(0, BV) + (i_x if is_offset else i_x - value_blocks) * BV
    row = i_b.to(tl.int64) * T * H + i_h
    b_S = tl.where((o_k[:, None] == o_x[None, :]) & (i_x >= value_blocks), 1.0, 0.0)
    T_u = tl.where(is_offset, T, 0)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        b_w = load_rows(p_w + row * K, o_t, T, H * K, o_k, K, BK)
        b_a = load_rows(p_a + row * K, o_t, T, H * K, o_k, K, BK)
        b_u = load_rows(p_u + row * V, o_t, T_u, H * V, o_x, V, BV)
        b_r = b_u - dot(b_w, b_S, DOT, PRECISION)
        if DECAY:
            _, _, b_write, b_total = edge_weights(p_decay + row, o_t, T, H, REVERSE)
            b_a = b_a * b_write[:, None]
            b_S *= b_total
        b_S += dot(tl.trans(b_a), b_r, DOT, PRECISION)
    i_out = (i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s
    if is_offset:
        store_matrix(p_offset + i_out * K * V, b_S, o_k, K, V, o_x, V)
    else:
        store_matrix(p_transition + i_out * K * K, b_S, o_k, K, K, o_x, K)


@kernel
def chain_kernel(
    p_transition, p_offset, p_initial, p_start, supers,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """States at the edges, `start_{i+1} = F_i start_i + Y_i`, always to full float32.

    TRANSPOSED: chain the transposes of F, as the backward does. A K above 128 does not fit the registers; the
    state then goes from step to step through `p_start` itself.
    """
    row: tl.constexpr = 1 if TRANSPOSED else K
    column: tl.constexpr = K if TRANSPOSED else 1
    i_h, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    p_transition += i_h * supers * K * K
    p_offset += i_h * supers * K * V
    p_start += i_h * supers * K * V
    b_S = tl.zeros((BK, BV), tl.float32)
    if INITIAL:
        b_S = load_matrix(p_initial + i_h * K * V, o_k, K, V, o_v, V, 1)
    first = supers - 1 if REVERSE else 0
    store_matrix(p_start + first * K * V, b_S, o_k, K, V, o_v, V)
    for n in range(supers - 1):
        i_s = supers - 1 - n if REVERSE else n
        i_next = i_s - 1 if REVERSE else i_s + 1
        if BK <= 128:
            b_F = load_matrix(p_transition + i_s * K * K, o_k, K, row, o_k, K, column)
            b_S = load_matrix(p_offset + i_s * K * V, o_k, K, V, o_v, V, 1) + exact_dot(b_F, b_S, ROUNDED=True)
            store_matrix(p_start + i_next * K * V, b_S, o_k, K, V, o_v, V)
        else:
            tl.debug_barrier()
            for i_r in range(BK // 64):
                o_r = i_r * 64 + tl.arange(0, 64)
                b_row = load_matrix(p_offset + i_s * K * V, o_r, K, V, o_v, V, 1)
                for i_k in range(BK // 64):
                    o_x = i_k * 64 + tl.arange(0, 64)
                    b_F = load_matrix(p_transition + i_s * K * K, o_r, K, row, o_x, K, column)
                    b_x = load_matrix(p_start + i_s * K * V, o_x, K, V, o_v, V, 1)
                    b_row += exact_dot(b_F, b_x, ROUNDED=True)
                store_matrix(p_start + i_next * K * V, b_row, o_r, K, V, o_v, V)


@kernel
def output_kernel(
    p_q, p_a, p_w, p_u, p_decay, p_start, p_o, p_residual, p_final, T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one super-chunk from its edge state and write outputs and residuals; the last one writes the final state."""
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    supers = tl.cdiv(chunks, length)
    row = i_b.to(tl.int64) * T * H + i_h
    state = (i_b * H + i_h).to(tl.int64)
    b_S = load_matrix(p_start + (state * supers + i_s) * K * V, o_k, K, V, o_v, V, 1)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        b_w = load_rows(p_w + row * K, o_t, T, H * K, o_k, K, BK)
        b_a = load_rows(p_a + row * K, o_t, T, H * K, o_k, K, BK)
        b_u = load_rows(p_u + row * V, o_t, T, H * V, o_v, V, BV)
        b_r = b_u - dot(b_w, b_S, DOT, PRECISION)
        if KEEP:
            store_rows(p_residual + row * V, b_r, o_t, T, H * V, o_v, V, BV)
        _, b_m = pair_weights(p_decay + row, o_t, T, H, C, DECAY, REVERSE)
        if DECAY:
            _, b_query, b_write, b_total = edge_weights(p_decay + row, o_t, T, H, REVERSE)
        for j in range(G):
            b_q = load_rows(p_q + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK)
            b_score = b_m * dot(b_q, tl.trans(b_a), DOT, PRECISION)
            if DECAY:
                b_q = b_q * b_query[:, None]
            b_o = dot(b_q, b_S, DOT, PRECISION) + dot(b_score, b_r, DOT, PRECISION)
            store_rows(p_o + (row * G + j) * V, b_o, o_t, T, H * G * V, o_v, V, BV)
        if DECAY:
            b_a = b_a * b_write[:, None]
            b_S *= b_total
        b_S += dot(tl.trans(b_a), b_r, DOT, PRECISION)
    if i_s == (0 if REVERSE else supers - 1):
        store_matrix(p_final + state * K * V, b_S, o_k, K, V, o_v, V)
