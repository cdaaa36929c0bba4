"""Block sizes of the Triton implementations: what one program works on, chosen on the host.

The work of a scan is cut twice. A chunk is C tokens, dense matrix algebra. A super-chunk is a run of chunks walked by
one program with the state in registers; super-chunks run side by side, so that a single long sequence fills the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton.language as tl

INTERPRETED_MULTIPROCESSORS = 4
EXACT_CHUNK = 32  # of 64 tokens, float32 kernels spill up to 1.6 kB a thread, and take twice as long to compile
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
    """The tile edge for a dimension: a power of two, at least 32.

    `tl.dot` would take 16. But where a Hopper warp group multiplies a tile of 64 by one of 16, ptxas 12.8, that of
    triton 3.6.0, makes the address of a tile from a register that nothing has filled: in `delta_scan` in bfloat16 and
    in the penalty gain in float32.
    """
    return max(32, power_of_two_above(size))


def power_of_two_above(size: int) -> int:
    """Triton's own takes microseconds on the host, and so does its `cdiv`."""
    return 1 << (size - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache
def choose_blocks(K: int, V: int, dtype: torch.dtype, chunk_size: int | None, widest: int = 64) -> Blocks:
    """Tile sizes for keys of K and values of V; values are cut into columns of at most `widest`.

    Up to 64 the tiles are square. Every training on an H200 whose scans had full tiles of 32 x 64 and 64 x 32 ended in
    an illegal memory access (triton 3.6.0, float32, eight warps). In the interpreter no address leaves its tensor.
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


def short_chunks(blocks: Blocks) -> Blocks:
    """With the chunks that float32 kernels of several products take, where they are multiplied exactly."""
    return replace(blocks, C=EXACT_CHUNK) if blocks.precision == "exact" and blocks.C > EXACT_CHUNK else blocks


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
