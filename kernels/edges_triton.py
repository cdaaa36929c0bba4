"""The states at the edges of super-chunks, from two kernels that every scan shares.

What a program needs to start, the state at its super-chunk's edge, comes from a cheap first pass: every super-chunk's
own contribution (`outer_sum_kernel`), then a scan over the few edges (`carry_kernel`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from linattn_cli.kernels.launch import kernel, launch
from linattn_cli.kernels.tiles import Blocks, ceil_div, padded
from linattn_cli.kernels.triton_common import dot, edge_decay, load_decay, load_rows, power_of_two, store_matrix


@kernel
def outer_sum_kernel(
    p_k, p_v, p_decay, p_sum, p_total,
    T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sum_s k_s v_s^T` of one super-chunk, decayed to the edge where the scan leaves it.

    State head h sums the J key heads h J .. h J + J - 1.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_h = i_p // (B * H), i_p % (B * H) // H, i_p % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    row = i_b.to(tl.int64) * T
    p_k += (row * H + i_h) * J * K
    p_v += (row * H + i_h) * J * V
    p_decay += row * H + i_h
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    b_S = tl.zeros((BK, BV), tl.float32)
    total = 1.0
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        if DECAY:
            b_decay, b_sum, b_total = load_decay(p_decay, o_t, T, H)
            b_write = edge_decay(b_decay, b_sum, b_total, not REVERSE, STRICT or not REVERSE)
            b_S *= power_of_two(b_total)
            total *= power_of_two(b_total)
        for j in range(J):
            b_k = load_rows(p_k + j * K, o_t, T, H * J * K, o_k, K, BK)
            b_v = load_rows(p_v + j * V, o_t, T, H * J * V, o_v, V, BV)
            if DECAY:
                b_k = b_k * b_write[:, None]
            b_S += dot(tl.trans(b_k), b_v, DOT, PRECISION)
    i_out = (i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s
    store_matrix(p_sum + i_out * K * V, b_S, o_k, K, V, o_v, V)
    if DECAY:
        tl.store(p_total + i_out, total)


@kernel
def carry_kernel(
    p_sum, p_total, p_initial, p_start, p_final, supers,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DECAY: tl.constexpr, INITIAL: tl.constexpr, REVERSE: tl.constexpr,
    END: tl.constexpr,
):  # fmt: skip
    """States at the edges: `start_i` enters super-chunk i, `start_{i+1} = decay_i start_i + sum_i`.

    END: the last state is also stored after the starts, as one more edge (of a scan that is not reversed).
    """
    i_h, i_x = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_x = i_x * BLOCK + tl.arange(0, BLOCK)
    keep = o_x < SIZE
    b_S = tl.zeros((BLOCK,), tl.float32)
    if INITIAL:
        b_S = tl.load(p_initial + i_h * SIZE + o_x, mask=keep, other=0.0)
    for n in range(supers):
        i_s = i_h * supers + (supers - 1 - n if REVERSE else n)
        b_sum = tl.load(p_sum + i_s * SIZE + o_x, mask=keep, other=0.0)
        i_edge = i_s + i_h if END else i_s
        tl.store(p_start + i_edge * SIZE + o_x, b_S, mask=keep)
        if DECAY:
            b_S *= tl.load(p_total + i_s)
        b_S += b_sum
    tl.store(p_final + i_h * SIZE + o_x, b_S, mask=keep)
    if END:
        tl.store(p_start + (i_h * (supers + 1) + supers) * SIZE + o_x, b_S, mask=keep)


def edge_states(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    heads: int,
    blocks: Blocks,
    split: tuple[int, int, int],
    *,
    exclusive: bool = False,
    reverse: bool = False,
    end: bool = False,
) -> tuple[Tensor, Tensor]:
    """The states entering every super-chunk, `[B, H, N, K, V]`, and the one leaving the last, `[B, H, K, V]`.

    With `end` the first are `[B, H, N + 1, K, V]`, the last state after them.
    """
    B, T, Q, K = k.shape
    V = v.shape[3]
    chunks, length, supers = split
    options: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    starts = torch.empty(B, heads, supers + end, K, V, **options)
    final = torch.empty(B, heads, K, V, **options)
    sums = torch.empty(B, heads, supers, K, V, **options)
    totals = torch.empty(B, heads, supers, **options) if log_decay is not None else sums
    launch(
        outer_sum_kernel, (supers * B * heads, ceil_div(V, blocks.BV)),
        k, v, sums if log_decay is None else log_decay, sums, totals,
        T, chunks, length, B, heads,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, C=blocks.C, J=Q // heads,
        DECAY=log_decay is not None, REVERSE=reverse, STRICT=exclusive,
        DOT=blocks.dot, PRECISION=blocks.precision,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    block = min(512, padded(K * V))
    launch(
        carry_kernel, (B * heads, ceil_div(K * V, block)),
        sums, totals, sums if initial is None else initial, starts, final, supers,
        SIZE=K * V, BLOCK=block, DECAY=log_decay is not None, INITIAL=initial is not None, REVERSE=reverse,
        END=end, num_warps=4,
    )  # fmt: skip
    return starts, final


def segment_cumsum(x: Tensor, tokens: int, *, reverse: bool, strict: bool) -> Tensor:
    """Sums of `x` `[B, T, H]` over the tokens before each (after it, when `reverse`) within runs of `tokens`.

    Float64 and short runs, because the terms cancel: the rounding of the sum must not grow with T.
    """
    B, T, H = x.shape
    runs = -(-T // tokens)
    wide = torch.nn.functional.pad(x.double(), (0, 0, 0, runs * tokens - T))
    wide = wide.view(B, runs, tokens, H)
    total = wide.flip(2).cumsum(2).flip(2) if reverse else wide.cumsum(2)
    if strict:
        total = total - wide
    return total.view(B, runs * tokens, H)[:, :T]


def edge_products(entering: Tensor, leaving: Tensor, tokens: int, T: int) -> Tensor:
    """`<entering_i, leaving_i>` of every super-chunk, spread over its tokens: `[B, H, N, K, V]` -> `[B, T, H]`."""
    product = (entering * leaving).sum((-1, -2), dtype=torch.float64).transpose(1, 2)
    return product.repeat_interleave(tokens, dim=1)[:, :T]


def leaving_states(starts: Tensor, final: Tensor, *, reverse: bool) -> Tensor:
    """The state that leaves each super-chunk, which is the one that enters the next."""
    final = final.unsqueeze(2)
    if reverse:
        return torch.cat((final, starts[:, :, :-1]), dim=2)
    return torch.cat((starts[:, :, 1:], final), dim=2)
