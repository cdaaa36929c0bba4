"""Compiles the kernels of mixers for a GPU that is not there, and launches them.

    python -m tests.kernels.without_gpu FOLDER SM BYTES MIXERS

Everything runs as on a GPU, with Triton's own compiler, driver and launchers, up to the driver library. That is one
whose functions do nothing, so that no kernel runs and every output is what was in memory. Prints, as JSON, how many
kernels each mixer launched.

FOLDER  a new folder for the driver library and Triton's cache
SM      compute capability, such as 90
BYTES   of shared memory that a block may have
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

HEADS, D_HEAD, TOKENS = 16, 64, 1024


def build_driver_library(folder: Path) -> None:
    """A libcuda.so.1 with every function that Triton's driver names; each reports success."""
    import triton

    backend = Path(triton.__file__).parent / "backends" / "nvidia"
    text = "".join((backend / name).read_text() for name in ("driver.c", "driver.py"))
    names = sorted({*re.findall(r"\bcu[A-Z]\w*", text), "cuInit"})
    source = folder / "nothing.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # what is linked against, where the other is what is loaded


def pretend(folder: Path, capability: int, shared: int) -> None:
    """Have Triton and the kernels take tensors on the CPU for tensors on such a GPU."""
    import torch
    import triton.backends.nvidia.driver as nvidia
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from linattn_cli.kernels import dispatch, tiles

    nvidia.libcuda_dirs = lambda: [str(folder)]
    utils = nvidia.CudaUtils()
    utils.load_binary = lambda name, kernel, shared, device: (1, 1, 64, 0, 1024)
    utils.get_device_properties = lambda device: {"max_shared_mem": shared}
    driver.set_active(
        SimpleNamespace(
            utils=utils,
            launcher_cls=nvidia.CudaLauncher,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_active_torch_device=lambda: torch.device("cpu"),
            get_device_capability=lambda device=None: divmod(capability, 10),
            allocate_default_profile_scratch=lambda *_: None,
        )
    )
    torch.cuda.current_device = lambda: None  # the index of a CPU tensor's device
    tiles.multiprocessors = lambda device: 132
    dispatch.why_not_triton = lambda operator, tensor: None


def count_launches(mixer: str) -> int:
    """How many kernels a forward, a backward and a decoding step launched; raises where one does not compile or fit."""
    import torch
    from triton.compiler import CompiledKernel

    from linattn_cli.latency_arms import arm_of, run_through
    from linattn_cli.latency_cases import Setting

    launched = 0
    runner = CompiledKernel.__getitem__

    def counted(kernel, grid):
        nonlocal launched
        launched += 1
        return runner(kernel, grid)

    setting = Setting(1, HEADS, D_HEAD, torch.bfloat16, torch.device("cpu"), "train")
    arm = arm_of(mixer, "triton", setting)
    run_through(arm, setting, TOKENS)
    CompiledKernel.__getitem__ = counted
    try:
        run_through(arm, setting, TOKENS)
    finally:
        CompiledKernel.__getitem__ = runner
    return launched


def main() -> None:
    folder = Path(sys.argv[1])
    if os.environ.get("LD_LIBRARY_PATH") != str(folder):  # the loader reads it when the process starts
        build_driver_library(folder)
        os.environ.update(LD_LIBRARY_PATH=str(folder), TRITON_CACHE_DIR=str(folder / "cache"))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    pretend(folder, int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({mixer: count_launches(mixer) for mixer in sys.argv[4].split(",")}))


if __name__ == "__main__":
    main()
