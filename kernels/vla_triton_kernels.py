"""Triton kernels that only VLA's fused path has; `vla_triton.py` launches them.

Neither phi(q) nor phi(k) is ever written in the forward pass: queries are mapped where they are loaded, and
phi(k) is the unit key times its norm. The read-out is divided where it is made.
"""

from __future__ import annotations

import triton.language as tl

from linattn_cli.kernels.launch import kernel
from linattn_cli.kernels.rows_triton import feature, feature_slope
from linattn_cli.kernels.triton_common import dot, load_matrix, load_rows, pair_mask, store_matrix, store_rows


@kernel
def vla_output_kernel(
    p_q, p_key, p_norm, p_a, p_w, p_u, p_start, p_zstart, p_o, p_den, p_residual, p_final,
    T, chunks, length, B, H, floor,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    MAP: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The walk of the delta scan's `output_kernel`, with the ratio read-out.

    Beside S it carries `z = sum phi(k)` and divides by `max(phi(q_t).z_t, floor)`.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    supers = tl.cdiv(chunks, length)
    row = i_b.to(tl.int64) * T * H + i_h
    state = (i_b * H + i_h).to(tl.int64)
    b_S = load_matrix(p_start + (state * supers + i_s) * K * V, o_k, K, V, o_v, V, 1)
    b_z = tl.load(p_zstart + (state * supers + i_s) * K + o_k, mask=o_k < K, other=0.0)
    first = i_s * length
    for i_c in range(first, tl.minimum(first + length, chunks)):
        o_t = i_c * C + tl.arange(0, C)
        b_w = load_rows(p_w + row * K, o_t, T, H * K, o_k, K, BK)
        b_a = load_rows(p_a + row * K, o_t, T, H * K, o_k, K, BK)
        b_u = load_rows(p_u + row * V, o_t, T, H * V, o_v, V, BV)
        b_key = load_rows(p_key + row * K, o_t, T, H * K, o_k, K, BK)
        b_norm = tl.load(p_norm + row + o_t.to(tl.int64) * H, mask=o_t < T, other=0.0)
        b_r = b_u - dot(b_w, b_S, DOT, PRECISION)
        if KEEP:
            store_rows(p_residual + row * V, b_r, o_t, T, H * V, o_v, V, BV)
        for j in range(G):
            b_q = load_rows(p_q + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK)
            b_q = feature(b_q.to(tl.float32), MAP).to(p_q.dtype.element_ty)
            b_score = tl.where(pair_mask(C, False, False), dot(b_q, tl.trans(b_a), DOT, PRECISION), 0.0)
            b_o = dot(b_q, b_S, DOT, PRECISION) + dot(b_score, b_r, DOT, PRECISION)
            b_score = tl.where(pair_mask(C, False, False), dot(b_q, tl.trans(b_key), DOT, PRECISION), 0.0)
            b_den = tl.sum(b_score * b_norm[None, :], axis=1) + tl.sum(b_q.to(tl.float32) * b_z[None, :], axis=1)
            if i_v == 0:
                tl.store(p_den + row * G + j + o_t.to(tl.int64) * H * G, b_den, mask=o_t < T)
            b_o /= tl.maximum(b_den, floor)[:, None]
            store_rows(p_o + (row * G + j) * V, b_o, o_t, T, H * G * V, o_v, V, BV)
        b_S += dot(tl.trans(b_a), b_r, DOT, PRECISION)
        b_z += tl.sum(b_key.to(tl.float32) * b_norm[:, None], axis=0)
    if i_s == supers - 1:
        store_matrix(p_final + state * K * V, b_S, o_k, K, V, o_v, V)


@kernel
def query_gradient_kernel(
    p_q, p_key, p_norm, p_dden, p_zstart, p_dphi, p_dq, T, chunks, length, B, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dq = phi'(q) (dphi(q) + dden z)` of one query head: dphi from the scan, dden of the denominators."""
    i_p = tl.program_id(0)
    i_s, i_b, i_q = i_p // (B * H * G), i_p % (B * H * G) // (H * G), i_p % (H * G)
    i_h = i_q // G
    o_k = tl.arange(0, BK)
    row_q = i_b.to(tl.int64) * T * H * G + i_q
    row = i_b.to(tl.int64) * T * H + i_h
    p_zstart += ((i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s) * K
    b_z = tl.load(p_zstart + o_k, mask=o_k < K, other=0.0)
    b_mask = tl.where(pair_mask(C, False, False), 1.0, 0.0)
    first = i_s * length
    for i_c in range(first, tl.minimum(first + length, chunks)):
        o_t = i_c * C + tl.arange(0, C)
        b_norm = tl.load(p_norm + row + o_t.to(tl.int64) * H, mask=o_t < T, other=0.0)
        b_phi = load_rows(p_key + row * K, o_t, T, H * K, o_k, K, BK).to(tl.float32) * b_norm[:, None]
        b_d = b_z[None, :] + dot(b_mask, b_phi, DOT, PRECISION)
        b_d *= tl.load(p_dden + row_q + o_t.to(tl.int64) * H * G, mask=o_t < T, other=0.0)[:, None]
        b_d += load_rows(p_dphi + row_q * K, o_t, T, H * G * K, o_k, K, BK)
        b_q = load_rows(p_q + row_q * K, o_t, T, H * G * K, o_k, K, BK).to(tl.float32)
        store_rows(p_dq + row_q * K, b_d * feature_slope(b_q, MAP), o_t, T, H * G * K, o_k, K, BK)
        b_z += tl.sum(b_phi, axis=0)


@kernel
def key_gradient_kernel(
    p_k, p_key, p_norm, p_phiq, p_dden, p_edge, p_dread, p_dgain, p_du, p_dk, T, chunks, length, B, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    MAP: tl.constexpr, OWN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk of one key head, walked from the end: through z, and through the unit key.

    The unit key was read along, was what the gain was taken of, and is u where the penalty has none of its own
    (OWN is false).
    """
    i_p = tl.program_id(0)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k = tl.arange(0, BK)
    row = i_b.to(tl.int64) * T * H + i_h
    p_edge += ((i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s) * K
    b_z = tl.load(p_edge + o_k, mask=o_k < K, other=0.0)
    b_mask = tl.where(pair_mask(C, True, False), 1.0, 0.0)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        o_t = (first + count - 1 - n) * C + tl.arange(0, C)
        b_d = tl.zeros((C, BK), tl.float32) + b_z[None, :]
        for j in range(G):
            b_q = load_rows(p_phiq + (row * G + j) * K, o_t, T, H * G * K, o_k, K, BK).to(tl.float32)
            p_row = p_dden + row * G + j + o_t.to(tl.int64) * H * G
            b_q *= tl.load(p_row, mask=o_t < T, other=0.0)[:, None]
            b_d += dot(b_mask, b_q, DOT, PRECISION)
            b_z += tl.sum(b_q, axis=0)
        b_key = load_rows(p_key + row * K, o_t, T, H * K, o_k, K, BK).to(tl.float32)
        b_norm = tl.load(p_norm + row + o_t.to(tl.int64) * H, mask=o_t < T, other=0.0)
        b_g = load_rows(p_dread + row * K, o_t, T, H * K, o_k, K, BK).to(tl.float32)
        b_g += load_rows(p_dgain + row * K, o_t, T, H * K, o_k, K, BK)
        if not OWN:
            b_g += load_rows(p_du + row * K, o_t, T, H * K, o_k, K, BK)
        b_along = tl.where(b_norm > 1e-12, tl.sum(b_key * b_g, axis=1), 0.0)
        b_d += (b_g - b_key * b_along[:, None]) / tl.maximum(b_norm, 1e-12)[:, None]
        b_k = load_rows(p_k + row * K, o_t, T, H * K, o_k, K, BK).to(tl.float32)
        store_rows(p_dk + row * K, b_d * feature_slope(b_k, MAP), o_t, T, H * K, o_k, K, BK)
