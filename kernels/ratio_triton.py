"""The ratio read-out on a GPU: `y_t = o_t / max(q_t . z_t, floor)` with `z_t = z_{t-1} + k_t`.

z is the state of a linear scan whose value is the number 1. It is walked like one (see `triton_common`), but
as a vector, and the division happens in the same pass: z is never written for every token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from linattn_cli.kernels.edges_triton import carry_kernel
from linattn_cli.kernels.launch import kernel, launch
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.tiles import ceil_div, choose_blocks, padded, power_of_two_above, split_time
from linattn_cli.kernels.triton_common import dot, load_rows, pair_mask, store_rows


@kernel
def _edge_sum_kernel(
    p_x, p_weight, p_sum, T, chunks, length, B, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, J: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """`sum_t weight_t x_t` of one super-chunk, over the J heads of one state head."""
    i_p = tl.program_id(0)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k = tl.arange(0, BK)
    row = (i_b.to(tl.int64) * T * H + i_h) * J
    b_z = tl.zeros((BK,), tl.float32)
    first = i_s * length
    for i_c in range(first, tl.minimum(first + length, chunks)):
        o_t = i_c * C + tl.arange(0, C)
        for j in range(J):
            b_x = load_rows(p_x + (row + j) * K, o_t, T, H * J * K, o_k, K, BK).to(tl.float32)
            if WEIGHTED:
                b_x *= tl.load(p_weight + row + j + o_t.to(tl.int64) * H * J, mask=o_t < T, other=0.0)[:, None]
            b_z += tl.sum(b_x, axis=0)
    i_out = (i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s
    tl.store(p_sum + i_out * K + o_k, b_z, mask=o_k < K)


@kernel
def _ratio_kernel(
    p_o, p_q, p_k, p_start, p_y, p_den, T, chunks, length, B, H, floor,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Denominators and quotients of one query head over one super-chunk."""
    i_p = tl.program_id(0)
    i_s, i_b, i_q = i_p // (B * H * G), i_p % (B * H * G) // (H * G), i_p % (H * G)
    i_h = i_q // G
    o_k = tl.arange(0, BK)
    row = i_b.to(tl.int64) * T * H * G + i_q
    p_k += (i_b.to(tl.int64) * T * H + i_h) * K
    p_start += ((i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s) * K
    b_z = tl.load(p_start + o_k, mask=o_k < K, other=0.0)
    first = i_s * length
    for i_c in range(first, tl.minimum(first + length, chunks)):
        o_t = i_c * C + tl.arange(0, C)
        b_q = load_rows(p_q + row * K, o_t, T, H * G * K, o_k, K, BK)
        b_k = load_rows(p_k, o_t, T, H * K, o_k, K, BK)
        b_score = tl.where(pair_mask(C, False, False), dot(b_q, tl.trans(b_k), DOT, PRECISION), 0.0)
        b_den = tl.sum(b_score, axis=1) + tl.sum(b_q.to(tl.float32) * b_z[None, :], axis=1)
        b_z += tl.sum(b_k.to(tl.float32), axis=0)
        tl.store(p_den + row + o_t.to(tl.int64) * H * G, b_den, mask=o_t < T)
        b_scale = 1.0 / tl.maximum(b_den, floor)
        for i_v in tl.static_range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            b_o = load_rows(p_o + row * V, o_t, T, H * G * V, o_v, V, BV)
            store_rows(p_y + row * V, b_o * b_scale[:, None], o_t, T, H * G * V, o_v, V, BV)


@kernel
def _quotient_gradient_kernel(
    p_y, p_den, p_dy, p_do, p_dden, rows, floor, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr
):
    """`dO = dY / den` and `dden = -y . dO`, which is 0 where the denominator was clamped."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    o_x = o_r[:, None] * V + o_v[None, :]
    keep = (o_r < rows)[:, None] & (o_v < V)[None, :]
    b_den = tl.load(p_den + o_r, mask=o_r < rows, other=1.0)
    b_y = tl.load(p_y + o_x, mask=keep, other=0.0).to(tl.float32)
    b_do = tl.load(p_dy + o_x, mask=keep, other=0.0).to(tl.float32) / tl.maximum(b_den, floor)[:, None]
    tl.store(p_do + o_x, b_do.to(p_do.dtype.element_ty), mask=keep)
    tl.store(p_dden + o_r, tl.where(b_den >= floor, -tl.sum(b_y * b_do, axis=1), 0.0), mask=o_r < rows)


@kernel
def _running_sum_kernel(
    p_x, p_dden, p_start, p_dx, T, chunks, length, B, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, G: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Forward, for one query head: `dq_t = dden_t z_t`. Reverse, for one key head: `dk_s = sum_{t>=s} dden_t q_t`."""
    i_p = tl.program_id(0)
    HO = H if REVERSE else H * G
    i_s, i_b, i_o = i_p // (B * HO), i_p % (B * HO) // HO, i_p % HO
    i_h = i_o if REVERSE else i_o // G
    J: tl.constexpr = G if REVERSE else 1
    o_k = tl.arange(0, BK)
    row_x = (i_b.to(tl.int64) * T * H + i_h) * J
    row_o = i_b.to(tl.int64) * T * HO + i_o
    p_start += ((i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s) * K
    b_z = tl.load(p_start + o_k, mask=o_k < K, other=0.0)
    b_mask = tl.where(pair_mask(C, REVERSE, False), 1.0, 0.0)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        b_sum = tl.zeros((C, BK), tl.float32) + b_z[None, :]
        for j in range(J):
            b_x = load_rows(p_x + (row_x + j) * K, o_t, T, H * J * K, o_k, K, BK)
            if REVERSE:
                b_x = b_x * tl.load(p_dden + row_x + j + o_t.to(tl.int64) * H * J, mask=o_t < T, other=0.0)[:, None]
            b_sum += dot(b_mask, b_x, DOT, PRECISION)
            b_z += tl.sum(b_x.to(tl.float32), axis=0)
        if not REVERSE:
            b_sum *= tl.load(p_dden + row_o + o_t.to(tl.int64) * HO, mask=o_t < T, other=0.0)[:, None]
        store_rows(p_dx + row_o * K, b_sum, o_t, T, HO * K, o_k, K, BK)


def _plan(k: Tensor):
    B, T, H, K = k.shape
    blocks = choose_blocks(K, K, k.dtype, None)
    return blocks, split_time(T, blocks.C, B * H, k.device, per_unit=4)


def edge_sums(x: Tensor, weight: Tensor | None, initial: Tensor | None, heads: int, blocks, split, *, reverse: bool):
    """Running (weighted) sums of x at the edges of the super-chunks, `[B, H, N, K]`, and the last, `[B, H, K]`."""
    (B, T, _, K), H = x.shape, heads
    chunks, length, supers = split
    sums = torch.empty(B, H, supers, K, dtype=torch.float32, device=x.device)
    starts, last = torch.empty_like(sums), torch.empty(B, H, K, dtype=torch.float32, device=x.device)
    launch(
        _edge_sum_kernel, (supers * B * H,),
        x, sums if weight is None else weight, sums, T, chunks, length, B, H,
        K=K, BK=blocks.BK, C=blocks.C, J=x.shape[2] // H, WEIGHTED=weight is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    block = padded(K)
    launch(
        carry_kernel, (B * H, 1),
        sums, sums, sums if initial is None else initial.contiguous(), starts, last, supers,
        SIZE=K, BLOCK=block, DECAY=False, INITIAL=initial is not None, REVERSE=reverse, END=False, num_warps=1,
    )  # fmt: skip
    return starts, last


def _ratio_forward(o, q, k, z, floor):
    o, q, k = o.contiguous(), q.contiguous(), k.contiguous()
    B, T, H, K = k.shape
    Q, V = o.shape[2:]
    blocks, (chunks, length, supers) = _plan(k)
    starts, last = edge_sums(k, None, z, H, blocks, (chunks, length, supers), reverse=False)
    y, den = torch.empty_like(o), torch.empty(B, T, Q, dtype=torch.float32, device=o.device)
    launch(
        _ratio_kernel, (supers * B * Q,),
        o, q, k, starts, y, den, T, chunks, length, B, H, floor,
        K=K, V=V, BK=blocks.BK, BV=min(64, padded(V)), C=blocks.C, G=Q // H,
        DOT=blocks.dot, PRECISION=blocks.precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y, den, last, starts


_ratio_readout = torch.library.custom_op(
    "linattn::ratio_readout",
    _ratio_forward,
    mutates_args=(),
    schema="(Tensor o, Tensor q, Tensor k, Tensor? z, float floor) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_ratio_readout.register_fake
def _(o, q, k, z, floor):
    B, T, H, K = k.shape
    _, (_, _, supers) = _plan(k)
    options = {"dtype": torch.float32, "device": o.device}
    y, den = torch.empty(o.shape, dtype=o.dtype, device=o.device), torch.empty(B, T, o.shape[2], **options)
    return y, den, torch.empty(B, H, K, **options), torch.empty(B, H, supers, K, **options)


def quotient_gradient(y: Tensor, den: Tensor, d_y: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Of `y = o / max(den, floor)`, contiguous: the gradients of o and of den."""
    d_o, d_den = torch.empty_like(y), torch.empty_like(den)
    V = y.shape[-1]
    BV = power_of_two_above(V)
    BR = max(1, 4096 // BV)
    launch(
        _quotient_gradient_kernel, (ceil_div(den.numel(), BR),),
        y, den, d_y, d_o, d_den, den.numel(), floor,
        V=V, BV=BV, BR=BR, num_warps=4,
    )  # fmt: skip
    return d_o, d_den


def _ratio_gradient(d_y, d_last, y, q, k, den, starts, floor):
    d_y, q, k = d_y.contiguous(), q.contiguous(), k.contiguous()
    B, T, H, K = k.shape
    Q = y.shape[2]
    blocks, (chunks, length, supers) = _plan(k)
    d_o, d_den = quotient_gradient(y, den, d_y, floor)
    d_starts, d_z = edge_sums(q, d_den, d_last, H, blocks, (chunks, length, supers), reverse=True)
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    for x, edges, d_x, reverse in ((k, starts, d_q, False), (q, d_starts, d_k, True)):
        launch(
            _running_sum_kernel, (supers * B * d_x.shape[2],),
            x, d_den, edges, d_x, T, chunks, length, B, H,
            K=K, BK=blocks.BK, C=blocks.C, G=Q // H, REVERSE=reverse,
            DOT=blocks.dot, PRECISION=blocks.precision, num_warps=4, num_stages=2,
        )  # fmt: skip
    return d_o, d_q, d_k, d_z


_ratio_readout_backward = torch.library.custom_op(
    "linattn::ratio_readout_backward",
    _ratio_gradient,
    mutates_args=(),
    schema="(Tensor d_y, Tensor? d_last, Tensor y, Tensor q, Tensor k, Tensor den, Tensor starts, float floor) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@_ratio_readout_backward.register_fake
def _(d_y, d_last, y, q, k, den, starts, floor):
    B, _, H, K = k.shape
    d_z = torch.empty(B, H, K, dtype=torch.float32, device=k.device)
    return *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (y, q, k)), d_z


def _setup(ctx: Any, inputs, output) -> None:
    _, q, k, z, ctx.floor = inputs
    y, den, _, starts = output
    ctx.set_materialize_grads(False)
    ctx.has_z = z is not None
    ctx.save_for_backward(y, q, k, den, starts)
    ctx.mark_non_differentiable(den, starts)


def _backward(gradient, ctx: Any, d_y, _d_den, d_last, _d_starts):
    y, q, k, den, starts = ctx.saved_tensors
    d_y = torch.zeros_like(y) if d_y is None else d_y
    d_o, d_q, d_k, d_z = gradient(d_y, d_last, y, q, k, den, starts, ctx.floor)
    return d_o, d_q, d_k, d_z if ctx.has_z else None, None


_operator = Operator(_ratio_forward, _ratio_readout, _setup, _backward, _ratio_gradient, _ratio_readout_backward)


def ratio_readout_triton(
    o: Tensor, q: Tensor, k: Tensor, z: Tensor | None, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The quotients, the denominators `[B, T, Q]` in float32 (not differentiable), and the last z `[B, H, K]`.

    o `[B, T, Q, V]`, q `[B, T, Q, K]` and k `[B, T, H, K]` after their feature maps; z `[B, H, K]` or None.
    """
    y, den, last, _ = _operator(o, q, k, z, floor)
    return y, den, last
