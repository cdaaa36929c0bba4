"""One decoding step of the higher-order mixers in one launch: HLA2 in both its states, AHLA, HLA3 in both its sets.

Every one of them keeps, of some of these, what it needs, and reads S, SQ and P before or after their update::

    S' = s S + k k^T     SQ' = s SQ + q q^T     P' = p P + k v^T          (S and P once per key head)
    H' = h H + L1 R1^T + L2 R2^T                                          (once per query head)
    G' = g G + l k (H^T k)^T                                              (the paper's correction of HLA2)

    hla2      L1 = u = (S' + ridge I) q   R1 = v                  o = H'^T q
    paper     L1 = q                      R1 = v                  o = H'^T u - G'^T q   (unmasked: no G)
    ahla      L1 = k                      R1 = w = P'^T q         o = H'^T q
    hla3      L1 = S' q                   R1 = w                  o = H'^T q
    published L1 = s S q  R1 = d v;  L2 = k  R2 = (c + d^2) v + d p P^T q;  d = q.k, c = s k.SQ k;  o = H'^T q

A ratio divides by the same sums with v = 1, whose states are vectors. How the work is cut is in
`decode_common.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from linattn_cli.kernels.decode_common import load_features, matrix_product, rows_of, step_blocks, step_decay
from linattn_cli.kernels.launch import kernel, launch
from linattn_cli.kernels.triton_common import load_matrix, store_matrix

STATES = ("S", "SQ", "P", "H", "G", "m", "h", "g")
"""Order of the states: matrices, then the masses of P, H and G (the same sums with v = 1)."""


@triton.jit
def _load_mass(p_x, o_k, K: tl.constexpr):
    return tl.load(p_x + o_k, mask=o_k < K, other=0.0)


@kernel
def _hla_step_kernel(
    p_q, p_k, p_v, p_decay, p_S, p_SQ, p_P, p_H, p_G, p_m, p_h, p_g,
    p_o, p_clamped, p_newS, p_newSQ, p_newP, p_newH, p_newG, p_newm, p_newh, p_newg,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, ridge, eps, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, G: tl.constexpr,
    MAP: tl.constexpr, FORM: tl.constexpr, RATIO: tl.constexpr,
    S_POWER: tl.constexpr, P_POWER: tl.constexpr, H_POWER: tl.constexpr,
    G_POWER: tl.constexpr, LEAK_POWER: tl.constexpr,
):  # fmt: skip
    """The step of one query head, for BV value columns and every BR-th block of matrix rows.

    The first query head of a group writes what belongs to the key head.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_q = (i_p // (H * G)).to(tl.int64), i_p % (H * G)
    i_h = i_q // G
    first, key_state, state = i_q % G == 0, i_b * H + i_h, i_p.to(tl.int64)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    p_q += i_b * q_batch + i_q * q_head
    p_k += i_b * k_batch + i_h * k_head
    p_v += i_b * v_batch + i_h * v_head
    p_decay += key_state
    p_S += key_state * K * K
    p_SQ += state * K * K
    b_q = load_features(p_q, 1.0, o_k, K, MAP)
    b_k = load_features(p_k, 1.0, o_k, K, MAP)
    b_v = tl.load(p_v + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    along = tl.sum(b_q * b_k, axis=0)
    s_decay = step_decay(p_decay, S_POWER)

    if FORM != "ahla":
        b_u = matrix_product(p_S, p_q, 1.0, o_k, K, BK, BR, MAP) * s_decay
        if FORM != "published":
            b_u += b_k * along + b_q * ridge
    if FORM == "ahla" or FORM == "hla3" or FORM == "published":
        p_decayed = step_decay(p_decay, P_POWER)
        b_P = load_matrix(p_P + key_state * K * V, o_k, K, V, o_v, V, 1) * p_decayed
        if FORM == "published":
            b_w = tl.sum(b_P * b_q[:, None], axis=0)
        b_P += b_k[:, None] * b_v[None, :]
        if FORM != "published":
            b_w = tl.sum(b_P * b_q[:, None], axis=0)
        if first:
            store_matrix(p_newP + key_state * K * V, b_P, o_k, K, V, o_v, V)
        if RATIO:
            b_m = _load_mass(p_m + key_state * K, o_k, K) * p_decayed
            if FORM == "published":
                w_mass = tl.sum(b_m * b_q, axis=0)
            b_m += b_k
            if FORM != "published":
                w_mass = tl.sum(b_m * b_q, axis=0)
            if first and i_v == 0:
                tl.store(p_newm + key_state * K + o_k, b_m, mask=o_k < K)
    if FORM == "hla2":
        b_left, b_right, mass = b_u, b_v, 1.0
    elif FORM == "ahla":
        b_left, b_right = b_k, b_w
        mass = w_mass if RATIO else 1.0
    elif FORM == "hla3":
        b_left, b_right = b_u, b_w
        mass = w_mass if RATIO else 1.0
    elif FORM == "published":
        b_left, b_right, mass = b_u, b_v * along, along
    else:
        b_left, b_right, mass = b_q, b_v, 1.0

    h_decay = step_decay(p_decay, H_POWER)
    b_H = load_matrix(p_H + state * K * V, o_k, K, V, o_v, V, 1)
    if FORM == "paper":
        leak = step_decay(p_decay, LEAK_POWER)
        g_decay = step_decay(p_decay, G_POWER)
        b_x = tl.sum(b_H * b_k[:, None], axis=0) * leak
        b_G = load_matrix(p_G + state * K * V, o_k, K, V, o_v, V, 1) * g_decay + b_k[:, None] * b_x[None, :]
        store_matrix(p_newG + state * K * V, b_G, o_k, K, V, o_v, V)
    b_H = b_H * h_decay + b_left[:, None] * b_right[None, :]
    if FORM == "published":
        cross = tl.sum(matrix_product(p_SQ, p_k, 1.0, o_k, K, BK, BR, MAP) * b_k, axis=0) * s_decay
        b_H += b_k[:, None] * ((cross + along * along) * b_v + along * b_w)[None, :]
    store_matrix(p_newH + state * K * V, b_H, o_k, K, V, o_v, V)
    b_read = b_u if FORM == "paper" or FORM == "unmasked" else b_q
    b_o = tl.sum(b_H * b_read[:, None], axis=0)
    if FORM == "paper":
        b_o -= tl.sum(b_G * b_q[:, None], axis=0)

    if RATIO:
        b_h = _load_mass(p_h + state * K, o_k, K)
        if FORM == "paper":
            b_g = _load_mass(p_g + state * K, o_k, K) * g_decay + b_k * (tl.sum(b_h * b_k, axis=0) * leak)
            if i_v == 0:
                tl.store(p_newg + state * K + o_k, b_g, mask=o_k < K)
        b_h = b_h * h_decay + b_left * mass
        if FORM == "published":
            b_h += b_k * (cross + along * along + along * w_mass)
        if i_v == 0:
            tl.store(p_newh + state * K + o_k, b_h, mask=o_k < K)
        denominator = tl.sum(b_h * b_read, axis=0)
        if FORM == "paper":
            denominator -= tl.sum(b_g * b_q, axis=0)
        clamped = tl.abs(denominator) < eps
        if i_v == 0:
            tl.store(p_clamped + state, clamped.to(tl.int64))
        b_o /= tl.where(clamped, tl.where(denominator < 0, -eps, eps), denominator)
    tl.store(p_o + state * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)

    if FORM != "ahla":
        for i_r in range(i_v, BK // BR, tl.num_programs(1)):
            o_r = i_r * BR + tl.arange(0, BR)
            if first:
                b_S = load_matrix(p_S, o_r, K, K, o_k, K, 1) * s_decay
                b_S += load_features(p_k, 1.0, o_r, K, MAP)[:, None] * b_k[None, :]
                store_matrix(p_newS + key_state * K * K, b_S, o_r, K, K, o_k, K)
            if FORM == "published":
                b_SQ = load_matrix(p_SQ, o_r, K, K, o_k, K, 1) * s_decay
                b_SQ += load_features(p_q, 1.0, o_r, K, MAP)[:, None] * b_q[None, :]
                store_matrix(p_newSQ + state * K * K, b_SQ, o_r, K, K, o_k, K)


def hla_step(q, k, v, log_decay, S, SQ, P, H, G, m, h, g, form, feature_map, powers, ridge, eps):
    """o `[B, 1, Q, V]`, the clamped read-outs `[B, Q]`, and the new states in the order of `STATES`.

    `powers` are those of the decay in S, P, H, G and the leak into G; all 0 without one. A state that the form does
    not keep is None, and comes back empty; an h asks for the ratio.
    """
    B, _, heads, K = k.shape
    Q, V = q.shape[2], v.shape[3]
    blocks = step_blocks(K, V)
    q, *q_strides = rows_of(q)
    k, *k_strides = rows_of(k)
    v, *v_strides = rows_of(v)
    states = [None if x is None else x.contiguous() for x in (S, SQ, P, H, G, m, h, g)]
    o, clamped, *outputs = _empty_outputs(q, v, *states)
    decay = H if log_decay is None else log_decay.contiguous()
    launch(
        _hla_step_kernel, (B * Q, blocks.columns),
        q, k, v, decay, *(H if x is None else x for x in states), o, clamped, *outputs,
        *q_strides, *k_strides, *v_strides, ridge, eps, heads,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, BR=blocks.BR, G=Q // heads,
        MAP=feature_map, FORM=form, RATIO=h is not None,
        S_POWER=powers[0], P_POWER=powers[1], H_POWER=powers[2], G_POWER=powers[3], LEAK_POWER=powers[4],
        num_warps=blocks.num_warps, num_stages=1, fused=False,
    )  # fmt: skip
    return o, clamped, *outputs


def _empty_outputs(q, v, *states):
    wide: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
    clamped = torch.empty(q.shape[0] if states[6] is not None else 0, q.shape[2], dtype=torch.int64, device=v.device)
    return o, clamped, *(torch.empty(0 if x is None else x.shape, **wide) for x in states)


hla_step_operator = torch.library.custom_op(
    "linattn::hla_step",
    hla_step,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? S, Tensor? SQ, Tensor? P, Tensor H, "
    "Tensor? G, Tensor? m, Tensor? h, Tensor? g, str form, str feature_map, int[] powers, float ridge, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@hla_step_operator.register_fake
def _(q, k, v, log_decay, S, SQ, P, H, G, m, h, g, *_):
    return _empty_outputs(q, v, S, SQ, P, H, G, m, h, g)
