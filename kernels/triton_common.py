"""Device helpers that the Triton kernels of all primitives share: products, loads and stores, decays.

Names: `i_*` program ids, `o_*` offsets, `p_*` pointers, `b_*` values of a block. Scores, inverses and states
are float32. bfloat16 tiles meet on bfloat16 tensor cores; float16 tiles are widened and use tf32, whose
mantissa is as long, because a state may exceed the range of float16; float32 is multiplied exactly, as
`exact_dot` does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_cli.kernels.dispatch import triton_interpreted

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-200.0)  # exp of it is 0 in float32: stands for any stronger log-decay, -inf included
INTERPRETED = tl.constexpr(triton_interpreted())


@triton.jit
def upper_bits(b_x):
    """A float32 cut to the 8 leading bits that bfloat16 holds."""
    return (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def split(b_x, ROUNDED: tl.constexpr):
    """Three bfloat16 tensors whose sum is the float32 `b_x`: 8 bits each, cut off or rounded to nearest."""
    b_high = b_x.to(tl.bfloat16).to(tl.float32) if ROUNDED else upper_bits(b_x)
    b_rest = b_x - b_high
    b_middle = b_rest.to(tl.bfloat16).to(tl.float32) if ROUNDED else upper_bits(b_rest)
    return b_high.to(tl.bfloat16), b_middle.to(tl.bfloat16), (b_rest - b_middle).to(tl.bfloat16)


@triton.jit
def add_dot(a, b, b_rest, ROUNDED: tl.constexpr):
    """`a b + b_rest`, summed in the tensor core or, rounded to nearest, outside; a plain `+` would go into the dot."""
    if ROUNDED:
        b_product = tl.dot(a, b)
        b_sum = tl.fma(b_product, tl.full(b_product.shape, 1.0, tl.float32), b_rest)
    else:
        b_sum = tl.dot(a, b, b_rest)
    return b_sum


@triton.jit
def exact_dot(a, b, ROUNDED: tl.constexpr = False):
    """A product to float32 accuracy on bfloat16 tensor cores.

    A float32 operand is split in three, a bfloat16 one needs no splitting; products below 2^-24 are left out.
    Tensor cores cut off what they add up, always toward zero, and a recurrence that forgets nothing keeps that: over
    2,048 tokens it errs two and a half times as much as a serial run, over 131,072 five times. ROUNDED: no part is cut
    off, and the small products are added to that of the leading parts outside, which takes more registers. The
    interpreter has no bfloat16 and multiplies in float32.
    """
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        product = tl.dot(a, b)
    elif a.dtype == tl.bfloat16:
        b_high, b_middle, b_low = split(b.to(tl.float32), ROUNDED)
        product = add_dot(a, b_high, tl.dot(a, b_middle, tl.dot(a, b_low)), ROUNDED)
    elif b.dtype == tl.bfloat16:
        a_high, a_middle, a_low = split(a.to(tl.float32), ROUNDED)
        product = add_dot(a_high, b, tl.dot(a_middle, b, tl.dot(a_low, b)), ROUNDED)
    else:
        a_high, a_middle, a_low = split(a.to(tl.float32), ROUNDED)
        b_high, b_middle, b_low = split(b.to(tl.float32), ROUNDED)
        b_small = tl.dot(a_high, b_low, tl.dot(a_low, b_high, tl.dot(a_middle, b_middle)))
        b_small = tl.dot(a_high, b_middle, tl.dot(a_middle, b_high, b_small))
        product = add_dot(a_high, b_high, b_small, ROUNDED)
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
        product = exact_dot(a, b, ROUNDED=True)
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
