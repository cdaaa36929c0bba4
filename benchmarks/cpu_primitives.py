"""Chunk against serial for each primitive on the CPU: ratio and tokens per second.

    python benchmarks/cpu_primitives.py [--tokens 2048] [--heads 4] [--dim 32] [--repeats 5] [--format markdown]

Serial and chunk run in turn in one process, so that the ratio holds when the machine's speed drifts; medians.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.penalty import penalty_gain


def _inputs(operator: str, tokens: int, heads: int, dim: int) -> list[Tensor]:
    count = {"linear_scan": 3, "delta_scan": 4, "penalty_gain": 2}[operator]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, tokens, heads, dim, generator=generator) for _ in range(count)]
    # unit keys, as every mixer passes them; the values stay as drawn
    unit = tensors if operator == "penalty_gain" else tensors[:-1]
    for index, tensor in enumerate(unit):
        tensors[index] = torch.nn.functional.normalize(tensor, dim=-1)
    return [t.requires_grad_() for t in tensors]


def _call(operator: str, impl: str, inputs: list[Tensor]) -> Tensor:
    if operator == "linear_scan":
        return linear_scan(*inputs, impl=impl).o
    if operator == "delta_scan":
        return delta_scan(*inputs, impl=impl).o
    return penalty_gain(*inputs, lambda0=0.1, impl=impl).o


def _seconds(step: Callable[[str], None], impl: str, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        step(impl)
    return (time.perf_counter() - begin) / calls


def measure(operator: str, train: bool, tokens: int, heads: int, dim: int, repeats: int) -> dict[str, object]:
    inputs = _inputs(operator, tokens, heads, dim)
    upstream = torch.randn(1, tokens, heads, dim)

    def step(impl: str) -> None:
        if train:
            torch.autograd.grad(_call(operator, impl, inputs), inputs, upstream)
        else:
            with torch.no_grad():
                _call(operator, impl, inputs)

    for impl in ("reference", "chunk"):
        step(impl)
    times: dict[str, list[float]] = {"reference": [], "chunk": []}
    for _ in range(repeats):
        for impl, seen in times.items():
            # the chunk form is short: several calls make one reading
            seen.append(_seconds(step, impl, calls=1 if impl == "reference" else 10))
    serial, chunk = (statistics.median(times[impl]) for impl in ("reference", "chunk"))
    return {
        "operator": operator,
        "mode": "forward+backward" if train else "forward",
        "serial_ms": serial * 1e3,
        "chunk_ms": chunk * 1e3,
        "ratio": serial / chunk,
        "chunk_tokens_per_s": tokens / chunk,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("heads", 4), ("dim", 32), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--format", choices=("github", "plain"), default="github", help="tabulate's table format")
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.machine()} {platform.system()}, float32, B=1 H={options.heads} T={options.tokens} d={options.dim}\n"
    )
    rows = [
        measure(operator, train, options.tokens, options.heads, options.dim, options.repeats)
        for operator in ("linear_scan", "delta_scan", "penalty_gain")
        for train in (False, True)
    ]
    print(tabulate(rows, headers="keys", floatfmt=("", "", ".1f", ".2f", ".1f", ".0f"), tablefmt=options.format))


if __name__ == "__main__":
    main()
