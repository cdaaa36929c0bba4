"""Speed and memory of the higher-order forms on a CPU, against linear attention.

    python benchmarks/cpu_hla.py speed            the table of forward + backward times
    python benchmarks/cpu_hla.py memory           peak memory of forward + backward at 2k, 4k and 8k tokens

Times are the least of several runs, the forms taking turns, so that a busy machine slows all of them alike; the
processor time beside them does not see what else runs. Memory is what a step adds to the resident set of a process
of its own, at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from linattn_cli.kernels.forms.ahla import ahla
from linattn_cli.kernels.forms.deltanet import decay_delta, deltanet
from linattn_cli.kernels.forms.gated_deltanet import gated_deltanet
from linattn_cli.kernels.forms.hla2 import hla2
from linattn_cli.kernels.forms.hla3 import hla3
from linattn_cli.kernels.forms.linear import linear_attention
from linattn_cli.kernels.forms.mesa import mesa, rls
from linattn_cli.kernels.forms.softmax import softmax
from linattn_cli.kernels.forms.vla import vla

BATCH, HEADS, DIM = 1, 4, 64
LENGTHS = (2048, 4096, 8192)
DECAYED = {"decay_delta", "gated_deltanet", "hla2 moment", "ahla cascade", "hla3 moment"}
GATED = {"deltanet", "gated_deltanet"}
FORMS = {
    "softmax": (softmax, {}),
    "linear": (linear_attention, {}),
    "linear raw": (linear_attention, {"feature_map": "identity", "readout": "raw"}),
    "hla2": (hla2, {}),
    "hla2 ratio": (hla2, {"feature_map": "elu1", "readout": "ratio"}),
    "hla2 moment": (hla2, {"decay": "moment"}),
    "ahla": (ahla, {}),
    "ahla cascade": (ahla, {"decay": "cascade"}),
    "hla3": (hla3, {}),
    "hla3 moment": (hla3, {"decay": "moment"}),
    "hla3 published": (hla3, {"variant": "published"}),
    "deltanet": (deltanet, {}),
    "decay_delta": (decay_delta, {}),
    "gated_deltanet": (gated_deltanet, {}),
    "vla": (vla, {"penalty": "key"}),
    "rls": (rls, {}),
    "mesa": (mesa, {}),
}


def draw(name: str, tokens: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    inputs = {key: torch.randn(BATCH, tokens, HEADS, DIM) * DIM**-0.5 for key in ("q", "k", "v")}
    if name in GATED:
        inputs["beta"] = torch.rand(BATCH, tokens, HEADS)
    if name in DECAYED:
        inputs["log_decay"] = -0.1 * torch.rand(BATCH, tokens, HEADS)
    return {key: x.requires_grad_() for key, x in inputs.items()}


def step(name: str, inputs: dict[str, torch.Tensor], upstream: torch.Tensor) -> None:
    form, options = FORMS[name]
    torch.autograd.grad(form(**inputs, **options, impl="chunk").o, list(inputs.values()), upstream)


def speed(tokens: int, rounds: int) -> list[dict[str, object]]:
    upstream = torch.randn(BATCH, tokens, HEADS, DIM)
    drawn = {name: draw(name, tokens) for name in FORMS}
    best, work = (dict.fromkeys(FORMS, float("inf")) for _ in range(2))
    for _ in range(rounds):
        for name, inputs in drawn.items():
            start, used = time.perf_counter(), time.process_time()
            step(name, inputs, upstream)
            best[name] = min(best[name], time.perf_counter() - start)
            work[name] = min(work[name], time.process_time() - used)
    return [
        {
            "form": name,
            "seq_len": tokens,
            "time_ms": 1e3 * best[name],
            "times_linear": best[name] / best["linear"],
            "cpu_ms": 1e3 * work[name],
            "cpu_times_linear": work[name] / work["linear"],
        }
        for name in FORMS
    ]


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def peaks_mib(name: str) -> dict[str, float]:
    """In a fresh process, shortest first: what one forward and backward adds to the resident set at its peak."""
    step(name, draw(name, 64), torch.randn(BATCH, 64, HEADS, DIM))
    peaks = {}
    for tokens in LENGTHS:
        inputs, upstream = draw(name, tokens), torch.randn(BATCH, tokens, HEADS, DIM)
        before = resident_mib()
        step(name, inputs, upstream)
        peaks[f"peak_mib_{tokens}"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    return peaks


def memory() -> list[dict[str, object]]:
    # freed blocks go back to the system at once, so that a peak is one of use and not of the allocator's habits
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    rows = []
    for name in FORMS:
        command = [sys.executable, __file__, "peak", "--form", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        peaks = json.loads(done.stdout)
        growth = peaks[f"peak_mib_{LENGTHS[-1]}"] / peaks[f"peak_mib_{LENGTHS[0]}"]
        rows.append({"form": name, **peaks, "growth": growth})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "memory", "peak"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--form", default="linear", choices=FORMS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what == "peak":
        print(json.dumps(peaks_mib(arguments.form)))
        return
    rows = memory() if arguments.what == "memory" else speed(arguments.tokens, arguments.rounds)
    for row in rows:
        print(json.dumps({key: round(x, 2) if isinstance(x, float) else x for key, x in row.items()}))


if __name__ == "__main__":
    main()
