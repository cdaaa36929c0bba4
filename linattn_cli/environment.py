"""What this machine and installation are: versions, device, dtype, and the `env` of every JSON document."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn_cli import __version__, output
from linattn_cli.output import EXIT_DEVICE, CliError

if TYPE_CHECKING:
    import torch

DEVICES = "auto, cpu, cuda or cuda:N"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def package_version(name: str) -> str | None:
    """The installed version of a package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """The commit of a source checkout, with `+changes` where files differ; None for an installed wheel."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(here), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        # A wheel installed below somebody's repository must not report that repository's commit.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def resolve_device(name: str = "auto") -> torch.device:
    """The device a name means here; `auto` is the first GPU, else the CPU.

    Raises `CliError`: exit 2 for a name that is none, exit 3 for a device that is not there.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    import torch

    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
        raise CliError(f"the device must be {DEVICES}; got {name!r}", hint="--device auto chooses one")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    if not count:
        reason = "no GPU answers" if torch.version.cuda else f"torch {torch.__version__} is a CPU-only build"
        raise CliError(
            f"device {name} was asked for, but {reason}",
            hint="use --device cpu, or install a CUDA build of torch on a machine with an NVIDIA GPU",
            exit_code=EXIT_DEVICE,
            kind="device",
        )
    index = int(number or 0)
    if index >= count:
        raise CliError(
            f"there is no cuda:{index}, only {count} GPU(s)",
            hint=f"use --device cuda:{count - 1} or lower",
            exit_code=EXIT_DEVICE,
            kind="device",
        )
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device | None = None) -> torch.dtype:
    """The torch dtype of a name; `CliError` where the name is none or the device cannot compute in it.

    >>> resolve_dtype("bfloat16")
    torch.bfloat16
    """
    import torch

    from linattn_cli.parsing import check_choice

    check_choice("the dtype", name, DTYPES)
    if name == "bfloat16" and device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise CliError(
                    f"{torch.cuda.get_device_name(device)} has no bfloat16",
                    hint="use --dtype float32",
                    exit_code=EXIT_DEVICE,
                    kind="device",
                )
    return getattr(torch, name)


def resolve_impl(impl: str, device: torch.device, dtype: str = "float32") -> str:
    """The implementation that `impl` means on a device for this dtype; names joined by `/` where the operators differ.

    `CliError` (exit 3) where triton was asked for and cannot run.

    >>> import torch
    >>> resolve_impl("auto", torch.device("cpu"))
    'chunk'
    """
    import torch

    from linattn_cli.kernels import dispatch
    from linattn_cli.kernels.registry import PRIMITIVES

    if impl not in ("auto", "triton"):
        return impl
    probe = torch.empty(0, device=device, dtype=resolve_dtype(dtype))
    if impl == "triton":
        for operator in PRIMITIVES:
            if (reason := dispatch.why_not_triton(operator, probe)) is not None:
                raise CliError(
                    f"impl triton was asked for, but {reason}",
                    hint="use --impl chunk, or --impl auto",
                    exit_code=EXIT_DEVICE,
                    kind="device",
                )
    return "/".join(sorted({dispatch.resolve(operator, impl, probe) for operator in PRIMITIVES}))


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use, which a container or `taskset` may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(*, device: object, dtype: str, impl: str, seed: int | None = None) -> dict[str, Any]:
    """The `env` of a JSON document: enough to say on what a number was measured."""
    import torch

    place = torch.device(str(device))
    gpu = place.type == "cuda"
    return {
        "linattn": __version__,
        "commit": git_commit(),
        "command_line": shlex.join(output.invoked) if output.invoked is not None else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "numpy": package_version("numpy"),
        "cuda": torch.version.cuda if gpu else None,
        "platform": platform.platform(terse=True),
        "device": str(place),
        "device_name": torch.cuda.get_device_name(place) if gpu else cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "impl": impl,
        "seed": seed,
    }


def inventory() -> dict[str, Any]:
    """What there is on this machine, for `linattn doctor`."""
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    names = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in gpus]
    memory = [round(torch.cuda.get_device_properties(i).total_memory / 2**30, 1) for i in gpus]
    return {
        "linattn": __version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "numpy": package_version("numpy"),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "gpus": names or None,
        "gpu_memory_gib": memory or None,
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def start_line(env: dict[str, Any]) -> str:
    """The one line that commands which compute begin with."""
    parts = [
        f"linattn {env['linattn']}",
        f"torch {env['torch']}",
        f"triton {env['triton'] or 'absent'}",
        f"device {env['device']} ({env['device_name']})",
        f"dtype {env['dtype']}",
        f"impl {env['impl']}",
    ]
    if env["seed"] is not None:
        parts.append(f"seed {env['seed']}")
    return ", ".join(parts)
