"""Every mixer forward, backward and one decoding step through Triton on small odd shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/gpu_sanitizer.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python benchmarks/gpu_sanitizer.py

`--models linear_scan,vla` and `--dtypes bfloat16` take less time. Without the allocator's cache every tensor has its
own allocation, so that a read past its end is seen.
"""

from __future__ import annotations

import argparse

import torch

from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
from linattn_cli.latency_cases import Setting, draw, mixer_arm, primitive_arm

TOKENS = 77
NAMES = [name for name in (*PRIMITIVES, *MIXERS) if name != "softmax"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES), help="mixers and primitives")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    device = torch.device("cuda")
    for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
        setting = Setting(1, 2, 40, dtype, device, "train")
        for name in options.models.split(","):
            arm = (
                mixer_arm(MIXERS[name], "triton", setting) if name in MIXERS else primitive_arm(name, "triton", setting)
            )
            tensors = draw(arm.names, setting, TOKENS + 1)
            leaves = {n: x[:, :TOKENS].contiguous().requires_grad_() for n, x in tensors.items()}
            o, _ = arm.call(leaves, None)
            torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o), allow_unused=True)
            with torch.no_grad():
                state = arm.prefill({n: x[:, :TOKENS].contiguous() for n, x in tensors.items()})
                arm.call({n: x[:, TOKENS:].contiguous() for n, x in tensors.items()}, state)
            torch.cuda.synchronize()
            print(arm.model, dtype, "done", flush=True)


if __name__ == "__main__":
    main()
