"""Device helpers, block sizes and two kernels that the Triton implementations of all primitives share.

The work of a scan is cut twice. A chunk is C tokens, dense matrix algebra. A super-chunk is a run of chunks
walked by one program with the state in registers; super-chunks run side by side, so that a single long
sequence fills the GPU. What a program needs to start, the state at its super-chunk's edge, comes from a
cheap first pass: every super-chunk's own contribution (`outer_sum_kernel`), then a scan over the few edges
(`carry_kernel`).

Names: `i_*` program ids, `o_*` offsets, `p_*` pointers, `b_*` values of a block. Scores, inverses and states
are float32. bfloat16 tiles meet on bfloat16 tensor cores; float16 tiles are widened and use tf32, whose
mantissa is as long, because a state may exceed the range of float16; float32 is multiplied exactly, as
`exact_dot` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_cli.kernels.dispatch import triton_interpreted
from linattn_cli.kernels.launch import kernel, launch

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-200.0)  # exp of it is 0 in float32: stands for any stronger log-decay, -inf included
INTERPRETED = tl.constexpr(triton_interpreted())
INTERPRETED_MULTIPROCESSORS = 4
LONG = 512  # tokens from which on the super-chunks of a decaying float32 scan are single chunks


@dataclass(frozen=True)
class Blocks:
    """Compile-time sizes of one launch; they depend on K, V and the dtype alone, never on T."""

    BK: int
    BV: int
    C: int
    dot: tl.dtype
    precision: str
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The tile edge for a dimension: a power of two, at least the 16 that `tl.dot` needs."""
    return max(16, power_of_two_above(size))


def power_of_two_above(size: int) -> int:
    """Triton's own takes microseconds on the host, and so does its `cdiv`."""
    return 1 << (size - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache
def choose_blocks(K: int, V: int, dtype: torch.dtype, chunk_size: int | None, widest: int = 64) -> Blocks:
    """Tile sizes for keys of K and values of V; values are cut into columns of at most `widest`.

    Up to 64 the tiles are square. Every training on an H200 whose scans had tiles of 32 x 64 and 64 x 32 ended in an
    illegal memory access (triton 3.6.0, float32), though no address leaves its tensor in the interpreter; every other
    tile ran.
    """
    half = dtype == torch.bfloat16
    side = min(64, max(padded(K), padded(V)))
    BK = max(padded(K), side)
    BV = min(max(padded(V), side), widest if BK <= 128 else 32)
    C = 64 if BK <= 64 or (half and BK <= 128) else 32
    if chunk_size is not None:
        C = min(C, max(16, 1 << (chunk_size.bit_length() - 1)))
    return Blocks(
        BK=BK,
        BV=BV,
        C=C,
        dot=tl.bfloat16 if half else tl.float32,
        precision="exact" if dtype == torch.float32 else "tf32",
        num_warps=4 if (32 * 32 if dtype == torch.float32 else 64 * 64) >= BK * BV else 8,
        num_stages=2,
    )


def four_warps(blocks: Blocks) -> Blocks:
    """With four warps where a tile is at most 64 x 64: for float32 tiles of the gain and beside half precision."""
    return replace(blocks, num_warps=4) if blocks.BK * blocks.BV <= 64 * 64 else blocks


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_time(
    tokens: int, C: int, sequences: int, device: torch.device, per_unit: int = 2, short: bool = False
) -> tuple[int, int, int]:
    """Chunks, chunks a super-chunk, and super-chunks: about `per_unit` programs for every multiprocessor.

    `short`: a super-chunk is one chunk. In float32 the gradient of a log-decay is a running sum that starts anew
    at every edge, and its rounding grows between two of them.
    """
    chunks = -(-tokens // C)
    length = 1 if short else max(1, -(-chunks * sequences // (per_unit * multiprocessors(device))))
    return chunks, length, -(-chunks // length)


def refuse_float64(operator: str, *tensors: Tensor) -> None:
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        raise ValueError(f"impl='triton' of {operator} has no float64; use impl='chunk' for float64 inputs")


@triton.jit
def upper_bits(b_x):
    """A float32 cut to the 8 leading bits that bfloat16 holds."""
    return (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def split(b_x):
    """Three bfloat16 tensors whose sum is exactly the float32 `b_x`: 8 bits each."""
    b_high = upper_bits(b_x)
    b_middle = upper_bits(b_x - b_high)
    b_low = b_x - b_high - b_middle
    return b_high.to(tl.bfloat16), b_middle.to(tl.bfloat16), b_low.to(tl.bfloat16)


@triton.jit
def exact_dot(a, b):
    """A product to float32 accuracy on bfloat16 tensor cores.

    A float32 operand is split in three, a bfloat16 one needs no splitting; products below 2^-24 are left out.
    The interpreter has no bfloat16 and multiplies in float32.
    """
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        product = tl.dot(a, b)
    elif a.dtype == tl.bfloat16:
        b_high, b_middle, b_low = split(b.to(tl.float32))
        product = tl.dot(a, b_high, tl.dot(a, b_middle, tl.dot(a, b_low)))
    elif b.dtype == tl.bfloat16:
        a_high, a_middle, a_low = split(a.to(tl.float32))
        product = tl.dot(a_high, b, tl.dot(a_middle, b, tl.dot(a_low, b)))
    else:
        a_high, a_middle, a_low = split(a.to(tl.float32))
        b_high, b_middle, b_low = split(b.to(tl.float32))
        b_small = tl.dot(a_high, b_low, tl.dot(a_low, b_high, tl.dot(a_middle, b_middle)))
        product = tl.dot(a_high, b_high, tl.dot(a_high, b_middle, tl.dot(a_middle, b_high, b_small)))
    return product


@triton.jit
def halves(b_x):
    """Two bfloat16 tensors whose sum is the float32 `b_x` to 2^-17."""
    b_high = upper_bits(b_x)
    return b_high.to(tl.bfloat16), (b_x - b_high).to(tl.bfloat16)


@triton.jit
def near_dot(a, b):
    """A product to 2^-16, with half as many tensor-core products as `exact_dot` takes; for half-precision results."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        product = tl.dot(a, b)
    elif a.dtype == tl.bfloat16:
        b_high, b_low = halves(b.to(tl.float32))
        product = tl.dot(a, b_high, tl.dot(a, b_low))
    elif b.dtype == tl.bfloat16:
        a_high, a_low = halves(a.to(tl.float32))
        product = tl.dot(a_high, b, tl.dot(a_low, b))
    else:
        a_high, a_low = halves(a.to(tl.float32))
        b_high, b_low = halves(b.to(tl.float32))
        product = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    return product


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISION == "exact":
        product = exact_dot(a, b)
    elif PRECISION == "near":
        product = near_dot(a, b)
    else:
        product = tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)
    return product


@triton.jit
def load_rows(p_x, o_t, T, stride, o_d, D: tl.constexpr, BD: tl.constexpr):
    """Rows `o_t` and columns `o_d` of a `[T, D]` matrix with row stride `stride`, zero outside."""
    p_rows = p_x + o_t.to(tl.int64)[:, None] * stride + o_d[None, :]
    if D % BD == 0:
        return tl.load(p_rows, mask=(o_t < T)[:, None], other=0.0)
    return tl.load(p_rows, mask=(o_t < T)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_rows(p_x, b_x, o_t, T, stride, o_d, D: tl.constexpr, BD: tl.constexpr):
    p_rows = p_x + o_t.to(tl.int64)[:, None] * stride + o_d[None, :]
    b_x = b_x.to(p_x.dtype.element_ty)
    if D % BD == 0:
        tl.store(p_rows, b_x, mask=(o_t < T)[:, None])
    else:
        tl.store(p_rows, b_x, mask=(o_t < T)[:, None] & (o_d < D)[None, :])


@triton.jit
def load_matrix(p_x, o_r, R: tl.constexpr, row, o_c, N: tl.constexpr, column):
    """A block of an `[R, N]` matrix of any strides, zero outside."""
    p_block = p_x + o_r[:, None] * row + o_c[None, :] * column
    return tl.load(p_block, mask=(o_r < R)[:, None] & (o_c < N)[None, :], other=0.0)


@triton.jit
def store_matrix(p_x, b_x, o_r, R: tl.constexpr, row, o_c, N: tl.constexpr):
    p_block = p_x + o_r[:, None] * row + o_c[None, :]
    tl.store(p_block, b_x.to(p_x.dtype.element_ty), mask=(o_r < R)[:, None] & (o_c < N)[None, :])


@triton.jit
def load_decay(p_decay, o_t, T, H):
    """Log2-decays of a chunk, their running sum and their total, all float64.

    In float64 a difference of two running sums keeps the digits of the decays between two tokens, also beside
    one that is a thousand times stronger. It is one vector a chunk.
    """
    b_decay = tl.load(p_decay + o_t.to(tl.int64) * H, mask=o_t < T, other=0.0).to(tl.float32)
    b_decay = tl.maximum(b_decay, NEVER).to(tl.float64) * LOG2_E
    return b_decay, tl.cumsum(b_decay, axis=0), tl.sum(b_decay, axis=0)


@triton.jit
def power_of_two(b_log):
    """`2^b_log` in float32 of float64 exponents <= 0, to the last digits also where it is tiny."""
    b_whole = tl.floor(b_log)
    return tl.exp2((b_log - b_whole).to(tl.float32)) * tl.exp2(b_whole.to(tl.float32))


@triton.jit
def pair_mask(C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr):
    """Where the write of token s (column) comes before the read of token t (row)."""
    o_r = tl.arange(0, C)[:, None]
    o_c = tl.arange(0, C)[None, :]
    if REVERSE:
        return (o_c > o_r) if STRICT else (o_c >= o_r)
    return (o_c < o_r) if STRICT else (o_c <= o_r)


@triton.jit
def pair_decay(b_decay, b_sum, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr):
    """Decay from the write of token s (column) to the read of token t (row), zero where s is not before t.

    STRICT leaves out the decay next to the read (forward) or to the write (reverse), and the diagonal.
    """
    b_own = b_sum - b_decay if STRICT else b_sum
    b_log = b_own[None, :] - b_sum[:, None] if REVERSE else b_own[:, None] - b_sum[None, :]
    return tl.where(pair_mask(C, REVERSE, STRICT), power_of_two(tl.minimum(b_log, 0.0)), 0.0)


@triton.jit
def edge_decay(b_decay, b_sum, b_total, AFTER: tl.constexpr, STRICT: tl.constexpr):
    """Decay of all tokens after (or before) each token, its own left out if STRICT."""
    if AFTER:
        b_log = b_total - b_sum if STRICT else b_total - b_sum + b_decay
    else:
        b_log = b_sum - b_decay if STRICT else b_sum
    return power_of_two(b_log)


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
