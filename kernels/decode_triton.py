"""One decoding step of the mixers whose state is a matrix of keys by values, in one launch.

With x^ = phi(x) or phi(x) / |phi(x)|, as a mixer wants it, a step is

    A' = A - z z^T / (1 + u.z),  z = A u;   P' = P + u u^T           where there is a penalty
    a  = key, A' key, or that over its norm;   times beta
    S' = g S + a (v - S^T p)^T,  p = key or g key                     (linear rule: S' = S + key v^T)
    o  = S'^T q^  or  S'^T A' q^;   over max(phi(q).z', floor), z' = z + phi(key)

and every mixer is a choice among these (`forms/decode.py` names them). How the work is cut is in
`decode_common.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from linattn_cli.kernels.decode_common import (
    inverse_norm,
    load_features,
    matrix_product,
    rows_of,
    step_blocks,
    step_decay,
)
from linattn_cli.kernels.launch import kernel, launch
from linattn_cli.kernels.triton_common import load_matrix, store_matrix


@kernel
def _step_kernel(
    p_q, p_k, p_v, p_u, p_beta, p_decay, p_S, p_P, p_A, p_z,
    p_o, p_clamped, p_newS, p_newP, p_newA, p_newz,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, u_batch, u_head, scale, floor, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, G: tl.constexpr,
    MAP: tl.constexpr, UNIT_QUERY: tl.constexpr, UNIT_KEY: tl.constexpr, DELTA: tl.constexpr,
    GAIN: tl.constexpr, DIRECTION: tl.constexpr, NORMALISE: tl.constexpr,
    BETA: tl.constexpr, DECAY: tl.constexpr, DECAYED_READ: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """The step of one key head and its G query heads, for BV value columns and every BR-th block of matrix rows.

    GAIN: `none` (the write is scale times the key), `write` (along A' key) or `read` (by A' q).
    DIRECTION: the penalty has a u of its own; otherwise u is the key.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_p // H).to(tl.int64), i_p % H
    state = i_p.to(tl.int64)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    p_q += i_b * q_batch + i_h * G * q_head
    p_k += i_b * k_batch + i_h * k_head
    p_v += i_b * v_batch + i_h * v_head
    p_u += i_b * u_batch + i_h * u_head
    p_P += state * K * K
    p_A += state * K * K
    p_newP += state * K * K
    p_newA += state * K * K
    b_phi = load_features(p_k, 1.0, o_k, K, MAP)
    key_scale = inverse_norm(b_phi) if UNIT_KEY else 1.0
    b_key = b_phi * key_scale
    b_v = tl.load(p_v + o_v, mask=o_v < V, other=0.0).to(tl.float32)

    b_a = b_key * scale
    if GAIN != "none":
        if DIRECTION:
            b_u = load_features(p_u, 1.0, o_k, K, "identity")
            b_z = matrix_product(p_A, p_u, 1.0, o_k, K, BK, BR, "identity")
        else:
            b_u = b_key
            b_z = matrix_product(p_A, p_k, key_scale, o_k, K, BK, BR, MAP)
        shrink = 1.0 / (1.0 + tl.sum(b_u * b_z, axis=0))
    if GAIN == "write":
        if DIRECTION:
            b_a = matrix_product(p_A, p_k, key_scale, o_k, K, BK, BR, MAP)
            b_a -= b_z * (tl.sum(b_z * b_key, axis=0) * shrink)
        else:
            b_a = b_z * shrink
    if NORMALISE:
        b_a *= inverse_norm(b_a)
    if BETA:
        b_a *= tl.load(p_beta + state).to(tl.float32)

    b_S = load_matrix(p_S + state * K * V, o_k, K, V, o_v, V, 1)
    decay = step_decay(p_decay + state, 1 if DECAY else 0)
    if DELTA:
        b_r = tl.sum(b_S * b_key[:, None], axis=0)
        if DECAYED_READ:
            b_r *= decay
        b_r = b_v - b_r
    else:
        b_r = b_v
    b_S = b_S * decay + b_a[:, None] * b_r[None, :]
    store_matrix(p_newS + state * K * V, b_S, o_k, K, V, o_v, V)
    if RATIO:
        b_sum = tl.load(p_z + state * K + o_k, mask=o_k < K, other=0.0) + b_phi
        if i_v == 0:
            tl.store(p_newz + state * K + o_k, b_sum, mask=o_k < K)
    for j in range(G):
        b_phi_q = load_features(p_q + j * q_head, 1.0, o_k, K, MAP)
        query_scale = inverse_norm(b_phi_q) if UNIT_QUERY else 1.0
        b_q = b_phi_q * query_scale
        if GAIN == "read":
            b_x = matrix_product(p_A, p_q + j * q_head, query_scale, o_k, K, BK, BR, MAP)
            b_q = b_x - b_z * (tl.sum(b_z * b_q, axis=0) * shrink)
        b_o = tl.sum(b_S * b_q[:, None], axis=0)
        if RATIO:
            denominator = tl.sum(b_q * b_sum, axis=0)
            b_o /= tl.maximum(denominator, floor)
            if i_v == 0:
                tl.store(p_clamped + state * G + j, (denominator < floor).to(tl.int64))
        tl.store(p_o + (state * G + j) * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)

    if GAIN != "none":
        for i_r in range(i_v, BK // BR, tl.num_programs(1)):
            o_r = i_r * BR + tl.arange(0, BR)
            b_A = load_matrix(p_A, o_r, K, K, o_k, K, 1)
            b_ur = (
                load_features(p_u, 1.0, o_r, K, "identity") if DIRECTION else load_features(p_k, key_scale, o_r, K, MAP)
            )
            b_zr = tl.sum(b_A * b_u[None, :], axis=1)
            store_matrix(p_newA, b_A - b_zr[:, None] * b_z[None, :] * shrink, o_r, K, K, o_k, K)
            b_P = load_matrix(p_P, o_r, K, K, o_k, K, 1)
            store_matrix(p_newP, b_P + b_ur[:, None] * b_u[None, :], o_r, K, K, o_k, K)


def matrix_step(
    q, k, v, u, beta, log_decay, S, mass, inverse, z,
    feature_map, unit_query, unit_key, delta, gain, normalise, decayed_read, scale, floor,
):  # fmt: skip
    """o `[B, 1, Q, V]`, the clamped read-outs `[B, Q]`, and the new S, mass, inverse and z (empty where there is none).

    Options are those of `_step_kernel`; `gain` other than `none` needs mass and inverse, and a z asks for the ratio.
    """
    B, _, H, K = k.shape
    Q, V = q.shape[2], v.shape[3]
    blocks = step_blocks(K, V)
    q, *q_strides = rows_of(q)
    k, *k_strides = rows_of(k)
    v, *v_strides = rows_of(v)
    direction, *u_strides = (k, 0, 0) if u is None else rows_of(u)
    o, clamped, *states = _empty_outputs(q, v, S, mass, inverse, z)
    S = S.contiguous()
    launch(
        _step_kernel, (B * H, blocks.columns),
        q, k, v, direction, _dense(beta, k), _dense(log_decay, k), S, _dense(mass, S), _dense(inverse, S),
        _dense(z, S), o, clamped, *states,
        *q_strides, *k_strides, *v_strides, *u_strides, scale, floor, H,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, BR=blocks.BR, G=Q // H,
        MAP=feature_map, UNIT_QUERY=unit_query, UNIT_KEY=unit_key, DELTA=delta,
        GAIN=gain, DIRECTION=u is not None, NORMALISE=normalise,
        BETA=beta is not None, DECAY=log_decay is not None, DECAYED_READ=decayed_read, RATIO=z is not None,
        num_warps=blocks.num_warps, num_stages=1, fused=False,
    )  # fmt: skip
    return o, clamped, *states


def _dense(x, otherwise):
    return otherwise if x is None else x.contiguous()


def _empty_outputs(q, v, S, mass, inverse, z):
    wide: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
    clamped = torch.empty(q.shape[0] if z is not None else 0, q.shape[2], dtype=torch.int64, device=v.device)
    return o, clamped, *(torch.empty(0 if x is None else x.shape, **wide) for x in (S, mass, inverse, z))


matrix_step_operator = torch.library.custom_op(
    "linattn::matrix_step",
    matrix_step,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? u, Tensor? beta, Tensor? log_decay, Tensor S, Tensor? mass, "
    "Tensor? inverse, Tensor? z, str feature_map, bool unit_query, bool unit_key, bool delta, str gain, "
    "bool normalise, bool decayed_read, float scale, float floor) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@matrix_step_operator.register_fake
def _(q, k, v, u, beta, log_decay, S, mass, inverse, z, *_):
    return _empty_outputs(q, v, S, mass, inverse, z)
