"""Every mixer forward, backward and one decoding step through Triton on small odd shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/gpu_sanitizer.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python benchmarks/gpu_sanitizer.py

`--models linear_scan,vla` and `--dtypes bfloat16` take less time; with `--batch 64 --heads 4` a program has more than
one chunk to work on. Without the allocator's cache every tensor has an allocation of its own, so that a read past its
end is seen.
"""

from __future__ import annotations

import argparse

import torch

from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
from linattn_cli.latency_arms import arm_of, run_through
from linattn_cli.latency_cases import Setting

TOKENS = 77
NAMES = [name for name in (*PRIMITIVES, *MIXERS) if name != "softmax"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES), help="mixers and primitives")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--d-head", type=int, default=40, help="40 leaves a tile of 64 ragged, 32 and 64 fill theirs")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    options = parser.parse_args()
    device = torch.device("cuda")
    for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
        setting = Setting(options.batch, options.heads, options.d_head, dtype, device, "train")
        for name in options.models.split(","):
            run_through(arm_of(name, "triton", setting), setting, TOKENS)
            torch.cuda.synchronize()
            print(name, dtype, "done", flush=True)


if __name__ == "__main__":
    main()
