"""How the kernels are launched: past Triton's own slow way there, and compiled side by side where they are new."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import MockTensor

from linattn_cli.kernels.dispatch import triton_interpreted
from linattn_cli.kernels.faults import DoesNotFit
from linattn_cli.kernels.loading import alone, load, prepare

INTERPRETED = triton_interpreted()

SPECIALISED = ("B", "H")  # numbers that compile to another kernel where they are 1 or a multiple of 16


def kernel(function: Callable) -> Any:
    """`triton.jit` for kernels that `launch` runs: pointers are named `p_*`, T and its kin are not specialised on."""
    parameters = inspect.signature(function).parameters.values()
    numbers = [p.name for p in parameters if p.annotation != "tl.constexpr" and not p.name.startswith("p_")]
    compiled = triton.jit(function, do_not_specialize=[name for name in numbers if name not in SPECIALISED])
    compiled.specialised = [i for i, p in enumerate(parameters) if p.name in SPECIALISED]
    return compiled


_compiled: dict[tuple, Any] = {}


class _Missing(Exception):
    """A kernel is not compiled yet, and its caller would rather compile it together with those after it."""


_stage = threading.local()
"""`at` is `hoping` that every kernel is compiled, `rehearsing` what would be launched, or not set; `found` holds those
that the rehearsal asked Triton for, by their keys in `_compiled`."""


@dataclass(frozen=True)
class _Found:
    """A kernel that Triton compiles meanwhile, and how it would be asked again: `compile(**options)`."""

    kernel: Any
    compile: Callable[..., Any]
    options: dict[str, Any]

    def load(self) -> Any:
        return _fitting(self._load, self.options)

    def _load(self, **options: Any) -> Any:
        return load(self.kernel if options == self.options else self.compile(**options))


class _Alike(MockTensor):
    """What Triton asks of a tensor to compile a kernel for it; holds no memory."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.dtype)
        self._alignment = x.data_ptr() % 16

    def data_ptr(self) -> int:
        return self._alignment


def _fitting(compiled: Callable[..., Any], options: dict[str, Any]) -> Any:
    """`compiled(**options)`, or with one pipeline stage where more do not fit the GPU.

    An H100 or H200 has 227 KiB of shared memory a block, an A100 163, most other GPUs 99. Nothing needs it on Hopper,
    where a float32 scan with one stage was wrong at random (triton 3.6.0).
    """
    try:
        return compiled(**options)
    except OutOfResources as error:
        if options["num_stages"] > 1:
            return _fitting(compiled, {**options, "num_stages": 1})
        what = error.name.replace("shared memory", "bytes of shared memory")
        raise DoesNotFit(f"a kernel needs {error.required:,} {what} and the GPU has {error.limit:,}") from error


def compiled_together(run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """`run(*inputs, **options)`; kernels that it would have to compile are compiled side by side, in a thread each.

    Nothing that `run` launches may decide what it launches next, and it changes no input. Then a rehearsal that
    launches nothing finds the kernels. One by one those of a forward and backward of VLA, 27, take 10 s, and what
    calls them from Python, compiled by the C compiler, 3 s more; those of rls take 21 s. Within another such call it
    leaves all to that one.
    """
    if INTERPRETED or getattr(_stage, "at", None) or not hasattr(triton, "AsyncCompileMode"):
        return run(*inputs, **options)
    try:
        _stage.at = "hoping"
        return run(*inputs, **options)
    except _Missing:
        _stage.at, _stage.found = "rehearsing", {}
        try:
            _compile_what_is_missing(partial(run, *inputs, **options))
        except DoesNotFit:  # also of a backward, which nobody could take back once its forward is out
            raise
        except Exception:  # fails again below, unless it was for the results that no launch has filled
            pass
        _stage.at = None
        return run(*inputs, **options)
    finally:
        _stage.at, _stage.found = None, {}


def _compile_what_is_missing(run: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        with contextlib.suppress(Exception):
            run()
        kernels = {id(found.kernel): found for found in _stage.found.values()}
        list(pool.map(prepare, [found.kernel for found in kernels.values()]))
        loaded = {name: found.load() for name, found in kernels.items()}
        _compiled.update({key: loaded[id(found.kernel)] for key, found in _stage.found.items()})


def rehearses() -> bool:
    """Whether this thread only looks for kernels: nothing is launched, and no result is filled."""
    return getattr(_stage, "at", None) == "rehearsing"


def launch(
    function: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int,
    num_stages: int = 2,
    fused: bool = True,
    **sizes: Any,
):
    """`function[grid](*arguments, **sizes)` in a fifth of the time on the host.

    A kernel is looked up by what it was compiled for, the sizes and the dtype and alignment of each pointer,
    and launched directly. Triton's own way there takes 70 us, longer than most kernels below 8k tokens run.
    A tensor comes first among the arguments; it may be on a GPU that is not the current one.

    `fused`: products may be rounded together with what they are added to. Where lanes hand each other the parts of a
    sum of products, each rounds its own part so, and their copies of the sum differ in the last bit; a kernel whose
    lanes then write the same place asks for none of it.
    """
    if INTERPRETED:
        function[grid](*arguments, **sizes)
        return
    device = arguments[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(function, grid, *arguments, num_warps=num_warps, num_stages=num_stages, fused=fused, **sizes)
        return
    constants = [sizes[name] for name in function.arg_names[len(arguments) :]]
    key = [id(function), device, num_warps, num_stages, fused, *constants]
    for x in arguments:
        if isinstance(x, Tensor):
            key += (x.dtype, x.data_ptr() % 16)
    for i in function.specialised:
        key += (arguments[i] == 1, arguments[i] % 16 == 0)
    found = _compiled.get(tuple(key))
    if found is not None:
        if not rehearses():
            found[(*grid, 1, 1)[:3]](*arguments, *constants)
        return
    if getattr(_stage, "at", None) == "hoping":
        raise _Missing
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fused}
    if rehearses():
        alike = [_Alike(x) if isinstance(x, Tensor) else x for x in arguments]
        again = partial(function.warmup, *alike, grid=grid, **sizes)
        _stage.found[tuple(key)] = _Found(again(**options), again, options)
    else:
        with alone():
            _compiled[tuple(key)] = _fitting(partial(function[grid], *arguments, **sizes), options)
