"""The least an operator must move and compute, and how fast this device moves and computes at all.

The counts are of the recurrence, not of an implementation: every input read once, every output written once,
and the multiplications and additions of the serial form. What a chunked form does beyond that is its own cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from linattn_cli.kernels.types import state_dtype

TRAIN_FLOPS = {"softmax": 3.5}
"""Forward and backward over forward: 3 for a recurrence, whose two factors each need a product; softmax
computes its scores again (5 products after 2)."""

FLOPS: dict[str, Callable[[int, int], int]] = {
    # a product with a K x V state or an outer product into one is 2 K V
    "linear_scan": lambda K, V: 4 * K * V,
    "delta_scan": lambda K, V: 6 * K * V,
    "penalty_gain": lambda K, V: 6 * K * K,
    "linear": lambda K, V: 4 * K * (V + 1),
    "deltanet": lambda K, V: 6 * K * V,
    "decay_delta": lambda K, V: 7 * K * V,
    "gated_deltanet": lambda K, V: 7 * K * V,
    "vla": lambda K, V: 6 * K * K + 6 * K * V + 4 * K,
    "rls": lambda K, V: 6 * K * K + 6 * K * V,
    "mesa": lambda K, V: 6 * K * K + 4 * K * V,
    "hla2": lambda K, V: 4 * K * K + 4 * K * V,
    "ahla": lambda K, V: 8 * K * V,
    "hla3": lambda K, V: 4 * K * K + 8 * K * V,
    "fla-linear": lambda K, V: 4 * K * V,
    "fla-delta": lambda K, V: 6 * K * V,
    "fla-mesa": lambda K, V: 6 * K * K + 4 * K * V,
}
"""Floating-point operations a token and head, by model."""


@dataclass(frozen=True)
class Roof:
    """What the device does at best: bytes a second copied (read and written), operations a second multiplied."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """What one call must at least move and compute."""

    bytes: int
    flops: int

    def bound(self, roof: Roof) -> tuple[float, str]:
        """Seconds it takes at best, and what limits it.

        >>> Work(100, 1).bound(Roof(bytes_per_s=50.0, flops_per_s=1.0))
        (2.0, 'memory')
        """
        moving, computing = self.bytes / roof.bytes_per_s, self.flops / roof.flops_per_s
        return (moving, "memory") if moving >= computing else (computing, "compute")


def count(
    model: str,
    *,
    mode: str,
    batch: int,
    heads: int,
    tokens: int,
    key_dim: int,
    value_dim: int,
    input_bytes: int,
    output_bytes: int,
    state_bytes: int = 0,
) -> Work | None:
    """The least work of a call; None for a model whose operations are not counted in `FLOPS`.

    tokens        T; in `decode` the context that one new token meets
    input_bytes   of all inputs of the call: T tokens, or the new token in `decode`
    output_bytes  of its output
    state_bytes   in `decode`: of the state, read once and, but for a cache, written once

    Training reads the inputs twice, for the forward and the backward, and writes a gradient for each.

    >>> count("linear_scan", mode="forward", batch=1, heads=1, tokens=8, key_dim=2, value_dim=2, input_bytes=6,
    ...       output_bytes=2)
    Work(bytes=8, flops=128)
    """
    if model == "softmax":
        pairs = tokens if mode == "decode" else tokens * (tokens + 1) // 2
        flops = 2 * pairs * (key_dim + value_dim)
    elif model in FLOPS:
        flops = FLOPS[model](key_dim, value_dim) * (1 if mode == "decode" else tokens)
    else:
        return None
    flops *= batch * heads
    if mode == "train":
        return Work(3 * input_bytes + 2 * output_bytes, int(flops * TRAIN_FLOPS.get(model, 3)))
    if mode == "decode":
        written = 0 if model == "softmax" else state_bytes
        return Work(input_bytes + output_bytes + state_bytes + written, flops)
    return Work(input_bytes + output_bytes, flops)


def measure_roof(device: torch.device, dtype: torch.dtype) -> Roof:
    """Copy bandwidth and matrix rate of a device in a dtype, the best of several tries.

    The rate is that of the states' dtype where it is higher: a CPU may multiply halves far slower than floats.
    """
    rates = {_multiplied_per_s(device, kind) for kind in (dtype, state_dtype(dtype))}
    return Roof(_copied_per_s(device), max(rates))


def _copied_per_s(device: torch.device) -> float:
    numbers = 2**27 if device.type == "cuda" else 2**23  # far beyond any cache
    source = torch.ones(numbers, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * numbers * source.element_size() / _fastest(lambda: target.copy_(source), device)


def _multiplied_per_s(device: torch.device, dtype: torch.dtype) -> float:
    # Random numbers: a GPU multiplies constant ones at a clock that no real product reaches.
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: a @ b, device)


def _fastest(run: Callable[[], object], device: torch.device, tries: int = 15) -> float:
    """Seconds a call in the fastest of several bursts, after one that warms up."""
    calls = 10 if device.type == "cuda" else 1  # a burst, so that the wait at its end does not count
    best = float("inf")
    for attempt in range(tries + 1):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        if attempt:
            best = min(best, (time.perf_counter() - started) / calls)
    return best


def synchronize(device: torch.device) -> None:
    """Wait for a device; the CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
