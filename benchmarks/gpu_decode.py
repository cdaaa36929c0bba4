"""Check the one-token decoding steps on a GPU; `linattn latency --mode decode --cuda-graph` times them.

    python benchmarks/gpu_decode.py --json gpu_decode.json [--quick]

Every mixer and option decodes token by token against the serial form in float64, in float32, bfloat16 and float16,
for several shapes, over more than two refreshes of the inverse; two runs must give the same bits, and a step must be
one kernel.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import platform
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.compare import Comparison, budget, compare
from linattn_cli.environment import package_version
from linattn_cli.kernels.registry import MIXERS, Mixer
from linattn_cli.kernels.types import state_tensors
from linattn_cli.verify_mixers import _tensor_names, form_of, option_sets

DEVICE = torch.device("cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = (
    {"B": 1, "Q": 16, "H": 16, "K": 64, "V": 64},
    {"B": 3, "Q": 4, "H": 2, "K": 32, "V": 32},
    {"B": 2, "Q": 2, "H": 2, "K": 40, "V": 72},
    {"B": 1, "Q": 4, "H": 4, "K": 128, "V": 128},
    {"B": 1, "Q": 2, "H": 1, "K": 200, "V": 256},
    {"B": 1, "Q": 2, "H": 2, "K": 5, "V": 1},
)
"""Shapes of the default options; the other options run in the second."""

WITH_A_PENALTY = ("vla", "rls", "mesa")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="check the default options only")
    parser.add_argument("--workers", type=int, default=12, help="processes that check at once")
    parser.add_argument("--mixers", default="", help="names, comma-separated; all by default")
    args = parser.parse_args()
    wanted = set(filter(None, args.mixers.split(",")))
    mixers = [m for m in MIXERS.values() if "triton" in m.impls and (not wanted or m.name in wanted)]
    document: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "gpu": torch.cuda.get_device_name(),
        "versions": {name: package_version(name) for name in ("torch", "triton")}, "command": " ".join(sys.argv),
        "checks": [],
    }  # fmt: skip
    failed = 0
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for rows in pool.imap(run_case, cases([m.name for m in mixers], args.quick)):
            document["checks"] += rows
            bad = [row for row in rows if not row["passed"]]
            failed += len(bad)
            for row in bad:
                print({name: value for name, value in row.items() if name != "passed"}, flush=True)
    print(f"{len(document['checks'])} checks, {failed} failed", flush=True)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failed else 0


class Case(NamedTuple):
    mixer: str
    options: dict[str, object]
    shape: dict[str, int]
    dtype: str
    tokens: int


def cases(names: list[str], quick: bool) -> list[Case]:
    """Default options in every shape and dtype, the others in one shape; the longest first."""
    found = []
    for name in names:
        for options in option_sets(MIXERS[name]):
            if options and quick:
                continue
            for index, shape in enumerate(SHAPES):
                if options and index != 1:
                    continue
                long = not options and index < 2 and (index == 1 or name in WITH_A_PENALTY)
                dtypes = list(DTYPES)[: 2 if options else 3]
                found += [Case(name, options, shape, dtype, 140 if long else 12) for dtype in dtypes]
    return sorted(found, key=lambda case: -case.tokens)


def run_case(case: Case) -> list[dict[str, Any]]:
    try:
        return check(case)
    except Exception as error:  # one case must not hide the others
        return [{**case._asdict(), "error": f"{type(error).__name__}: {error}"[:600], "passed": False}]


def tensors_of(mixer: Mixer, options: dict, tokens: int, B: int, Q: int, H: int, K: int, V: int) -> dict[str, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    x = {"q": normal(B, tokens, Q, K) * K**-0.5, "k": normal(B, tokens, H, K), "v": normal(B, tokens, H, V)}
    for name in _tensor_names(mixer, options, inspect.signature(form_of(mixer)).parameters)[3:]:
        x[name] = {
            "u": torch.nn.functional.normalize(normal(B, tokens, H, K), dim=-1) * K**-0.5,
            "beta": normal(B, tokens, H).sigmoid(),
            "log_decay": -0.1 * normal(B, tokens, H).abs(),
        }[name]
    if "log_decay" in x:
        x["log_decay"][:, 4::9] = -50.0
    return x


def decoded(mixer: Mixer, options: dict, x: dict[str, Tensor], impl: str, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Outputs and last state of decoding everything after the second token."""
    form, settings = form_of(mixer), {name: value for name, value in options.items() if name != "beta"}
    x = {name: y.to(dtype) for name, y in x.items()}
    with torch.no_grad():
        state = form(**{n: y[:, :2] for n, y in x.items()}, **settings, impl="reference").state
        outputs = []
        for t in range(2, x["q"].shape[1]):
            out = form(**{n: y[:, t : t + 1] for n, y in x.items()}, **settings, initial_state=state, impl=impl)
            state = out.state
            outputs.append(out.o)
    return torch.cat(outputs, 1), state


def check(case: Case) -> list[dict[str, Any]]:
    mixer, options, dtype = MIXERS[case.mixer], case.options, DTYPES[case.dtype]
    x = {name: y.to(dtype) for name, y in tensors_of(mixer, options, case.tokens, **case.shape).items()}
    exact = decoded(mixer, options, x, "reference", torch.float64)
    serial = decoded(mixer, options, x, "reference", dtype)
    ours = decoded(mixer, options, x, "triton", dtype)
    again = decoded(mixer, options, x, "triton", dtype)
    same = all(map(torch.equal, state_tensors(ours), state_tensors(again)))
    kernels = step_kernels(mixer, options, x)
    rows = []
    for index, parts in enumerate(zip(*(state_tensors(run) for run in (ours, serial, exact)), strict=True)):
        mine, reference, truth = parts
        kind = dtype if index == 0 else torch.float32
        found = compare(mine, truth, dtype=kind)
        allowed = budget(dtype, compare(reference, truth, dtype=kind), gradient=False)
        rows.append(
            {
                **case._asdict(),
                "quantity": "o" if index == 0 else f"state {index}",
                **errors(found),
                "budget": allowed.max_error,
                "deterministic": same,
                "kernels": kernels,
                "passed": allowed.allows(found) and same and kernels == 1,
            }
        )
    return rows


def errors(found: Comparison) -> dict[str, Any]:
    return {"max_error": found.max_error, "rms_ratio": found.rms_ratio, "problem": found.problem}


def step_kernels(mixer: Mixer, options: dict, x: dict[str, Tensor]) -> int:
    """Kernels that the GPU runs for one token."""
    form, settings = form_of(mixer), {name: value for name, value in options.items() if name != "beta"}
    prefix, token = ({n: y[:, part].contiguous() for n, y in x.items()} for part in (slice(0, 2), slice(2, 3)))
    with torch.no_grad():
        state = form(**prefix, **settings, impl="reference").state
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            form(**token, **settings, initial_state=state, impl="triton")
            torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.self_device_time_total > 0)


if __name__ == "__main__":
    sys.exit(main())
