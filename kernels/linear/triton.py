"""The linear scan on a GPU: forward and backward from one output kernel.

Three launches: the sum of every super-chunk, a scan over their edges, and the walk that writes the output.
The backward is the same scan with the roles exchanged (MATH.md section 7): dq in the direction of the
forward, dk and dv in the other one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from linattn_cli.kernels.edges_triton import edge_products, edge_states, leaving_states, segment_cumsum
from linattn_cli.kernels.launch import kernel, launch
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.tiles import LONG, ceil_div, choose_blocks, four_warps, split_time
from linattn_cli.kernels.triton_common import (
    dot,
    edge_decay,
    load_decay,
    load_matrix,
    load_rows,
    pair_decay,
    pair_mask,
    power_of_two,
    store_rows,
)


@kernel
def _output_kernel(
    p_q, p_k, p_v, p_decay, p_start, p_x, p_o, p_dots,
    T, chunks, length, B, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr, DOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one super-chunk of one output head from its edge state.

    H state heads; an output head h reads state head h // G, which sums J key heads. One of G and J is 1.
    TRANSPOSED: the edge states are stored `[V, K]`. DOTS: also write `x_t . o_t`, from the float32 output, for
    the gradient of the log-decay.
    """
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_s, i_b, i_q = i_p // (B * H * G), i_p % (B * H * G) // (H * G), i_p % (H * G)
    i_h = i_q // G
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    row = i_b.to(tl.int64) * T
    p_q += (row * H * G + i_q) * K
    p_x += (row * H * G + i_q) * V
    p_o += (row * H * G + i_q) * V
    p_k += (row * H + i_h) * J * K
    p_v += (row * H + i_h) * J * V
    p_decay += row * H + i_h
    p_start += ((i_b * H + i_h).to(tl.int64) * tl.cdiv(chunks, length) + i_s) * K * V
    b_S = load_matrix(p_start, o_k, K, 1 if TRANSPOSED else V, o_v, V, K if TRANSPOSED else 1)
    first = i_s * length
    count = tl.minimum(length, chunks - first)
    for n in range(count):
        i_c = first + count - 1 - n if REVERSE else first + n
        o_t = i_c * C + tl.arange(0, C)
        b_q = load_rows(p_q, o_t, T, H * G * K, o_k, K, BK)
        if DECAY:
            b_decay, b_sum, b_total = load_decay(p_decay, o_t, T, H)
            b_pair = pair_decay(b_decay, b_sum, C, REVERSE, STRICT)
            b_write = edge_decay(b_decay, b_sum, b_total, not REVERSE, STRICT or not REVERSE)
            # a reverse scan enters from the right, undecayed by the token itself
            b_read = edge_decay(b_decay, b_sum, b_total, REVERSE, STRICT or REVERSE)
            b_o = dot(b_q * b_read[:, None], b_S, DOT, PRECISION)
            b_S *= power_of_two(b_total)
        else:
            b_o = dot(b_q, b_S, DOT, PRECISION)
        for j in range(J):
            b_k = load_rows(p_k + j * K, o_t, T, H * J * K, o_k, K, BK)
            b_v = load_rows(p_v + j * V, o_t, T, H * J * V, o_v, V, BV)
            b_score = dot(b_q, tl.trans(b_k), DOT, PRECISION)
            if DECAY:
                b_score *= b_pair
                b_k = b_k * b_write[:, None]
            else:
                b_score = tl.where(pair_mask(C, REVERSE, STRICT), b_score, 0.0)
            b_o += dot(b_score, b_v, DOT, PRECISION)
            b_S += dot(tl.trans(b_k), b_v, DOT, PRECISION)
        store_rows(p_o, b_o, o_t, T, H * G * V, o_v, V, BV)
        if DOTS:
            b_x = load_rows(p_x, o_t, T, H * G * V, o_v, V, BV).to(tl.float32)
            p_row = p_dots + (i_v * B + i_b).to(tl.int64) * T * H * G + i_q + o_t.to(tl.int64) * H * G
            tl.store(p_row, tl.sum(b_x * b_o, axis=1), mask=o_t < T)


def walk(q, k, v, log_decay, starts, *, exclusive, reverse, transposed, chunk, like, dtype, against=None):
    """Outputs of a scan with known edge states, and their dot products with `against` where it is given.

    `transposed`: the edge states are stored `[V, K]`, that is for keys and values exchanged. `like` is the tensor
    whose dtype decides how products are made, here and where the edge states were; beside tensors in half precision
    those of float32 need no more than twice their digits.
    """
    B, T, Q, K = q.shape
    V = v.shape[3]
    heads = starts.shape[1]
    blocks, split = plan(K, V, like, heads, chunk, log_decay is not None)
    chunks, length, supers = split
    o = torch.empty(B, T, Q, V, dtype=dtype, device=q.device)
    columns, half = ceil_div(V, blocks.BV), blocks.dot is tl.bfloat16
    mixed = like.dtype == torch.float32 and any(x.dtype != torch.float32 for x in (q, k, v))
    if mixed:
        blocks = four_warps(blocks)
    dots = torch.empty(columns, B, T, Q, dtype=torch.float32, device=q.device) if against is not None else starts
    launch(
        _output_kernel, (supers * B * Q, columns),
        q, k, v, starts if log_decay is None else log_decay, starts, q if against is None else against, o, dots,
        T, chunks, length, B, heads,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, C=blocks.C, G=Q // heads, J=k.shape[2] // heads,
        DECAY=log_decay is not None, REVERSE=reverse, STRICT=exclusive, DOTS=against is not None, TRANSPOSED=transposed,
        DOT=blocks.dot, PRECISION="near" if mixed else blocks.precision,
        num_warps=blocks.num_warps, num_stages=3 if half and blocks.BK <= 64 else 2,
    )  # fmt: skip
    return o, dots.sum(0) if against is not None else None


def plan(K: int, V: int, like: Tensor, heads: int, chunk: int, decays: bool = False):
    """Blocks and the split of time; the chunk length must agree between a scan and its transposed one."""
    C = min(choose_blocks(size, size, like.dtype, chunk or None).C for size in (K, V))
    blocks = choose_blocks(K, V, like.dtype, C)
    short = decays and like.dtype == torch.float32 and like.shape[1] > LONG
    return blocks, split_time(like.shape[1], C, like.shape[0] * heads, like.device, short=short)


def _linear_forward(q, k, v, log_decay, initial_state, exclusive, reverse, chunk):
    heads = k.shape[2]
    blocks, split = plan(k.shape[3], v.shape[3], k, heads, chunk, log_decay is not None)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    log_decay = None if log_decay is None else log_decay.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    starts, final = edge_states(
        k, v, log_decay, initial_state, heads, blocks, split, exclusive=exclusive, reverse=reverse
    )
    flags = {"exclusive": exclusive, "reverse": reverse, "chunk": chunk, "like": k}
    o, _ = walk(q, k, v, log_decay, starts, transposed=False, dtype=q.dtype, **flags)
    return o, final, starts


_linear_scan = torch.library.custom_op(
    "linattn::linear_scan",
    _linear_forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? initial_state, bool exclusive, bool reverse, "
    "int chunk) -> (Tensor, Tensor, Tensor)",
)


@_linear_scan.register_fake
def _(q, k, v, log_decay, initial_state, exclusive, reverse, chunk):
    (B, T, Q, _), (_, _, heads, K), V = q.shape, k.shape, v.shape[3]
    _, split = plan(K, V, k, heads, chunk, log_decay is not None)
    state = torch.empty(B, heads, K, V, dtype=torch.float32, device=k.device)
    starts = torch.empty(B, heads, split[2], K, V, dtype=torch.float32, device=k.device)
    return torch.empty(B, T, Q, V, dtype=q.dtype, device=q.device), state, starts


def linear_backward(d_o, d_final, q, k, v, log_decay, starts, final, exclusive, reverse, chunk):
    heads = k.shape[2]
    q, k, v, d_o = q.contiguous(), k.contiguous(), v.contiguous(), d_o.contiguous()
    log_decay = None if log_decay is None else log_decay.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    blocks, split = plan(k.shape[3], v.shape[3], k, heads, chunk, log_decay is not None)
    decays = log_decay is not None
    flags = {"exclusive": exclusive, "chunk": chunk, "like": k}
    back = {"reverse": not reverse, **flags}
    d_starts, d_initial = edge_states(
        q, d_o, log_decay, d_final, heads, blocks, split, exclusive=exclusive, reverse=not reverse
    )
    d_q, q_dots = walk(
        d_o, v, k, log_decay, starts, transposed=True, reverse=reverse, dtype=q.dtype,
        against=q if decays else None, **flags,
    )  # fmt: skip
    d_k, k_dots = walk(
        v, d_o, q, log_decay, d_starts, transposed=True, dtype=k.dtype, against=k if decays else None, **back
    )
    d_v, _ = walk(k, q, d_o, log_decay, d_starts, transposed=False, dtype=v.dtype, **back)
    if not decays:
        return d_q, d_k, d_v, q.new_empty(0), d_initial
    q_dots = q_dots.unflatten(2, (heads, -1)).sum(3)
    # the log-decay of token j acts on every pair whose write lies before it and whose read lies after it
    run = {"tokens": split[1] * blocks.C, "reverse": not reverse}
    if exclusive:
        crossing = segment_cumsum(q_dots, strict=True, **run) - segment_cumsum(k_dots, strict=False, **run)
    else:
        crossing = segment_cumsum(q_dots - k_dots, strict=reverse, **run)
    edges = edge_products(d_starts, leaving_states(starts, final, reverse=reverse), run["tokens"], k.shape[1])
    return d_q, d_k, d_v, (crossing + edges).to(log_decay.dtype), d_initial


_linear_scan_backward = torch.library.custom_op(
    "linattn::linear_scan_backward",
    linear_backward,
    mutates_args=(),
    schema="(Tensor d_o, Tensor? d_final, Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor starts, "
    "Tensor final, bool exclusive, bool reverse, int chunk) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_linear_scan_backward.register_fake
def _(d_o, d_final, q, k, v, log_decay, starts, final, exclusive, reverse, chunk):
    d_decay = q.new_empty(0) if log_decay is None else torch.empty_like(log_decay).contiguous()
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return *grads, d_decay, torch.empty_like(final)


def _setup(ctx: Any, inputs, output) -> None:
    q, k, v, log_decay, initial_state, ctx.exclusive, ctx.reverse, ctx.chunk = inputs
    _, final, starts = output
    ctx.set_materialize_grads(False)
    ctx.has_initial = initial_state is not None
    ctx.save_for_backward(q, k, v, log_decay, starts, final)


def _backward(gradient, ctx: Any, d_o, d_final, d_starts):
    q, k, v, log_decay, starts, final = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
    d_q, d_k, d_v, d_decay, d_initial = gradient(
        d_o, d_final, q, k, v, log_decay, starts, final, ctx.exclusive, ctx.reverse, ctx.chunk
    )
    d_decay = None if log_decay is None else d_decay
    return d_q, d_k, d_v, d_decay, d_initial if ctx.has_initial else None, None, None, None


_operator = Operator(_linear_forward, _linear_scan, _setup, _backward, linear_backward, _linear_scan_backward)


def linear_scan_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    exclusive: bool,
    reverse: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """`linear_scan` on a GPU; see its docstring for the recurrence and shapes."""
    o, final, _ = _operator(q, k, v, log_decay, initial_state, exclusive, reverse, chunk_size or 0)
    return o, final
