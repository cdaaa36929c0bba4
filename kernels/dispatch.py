"""Which implementation runs: one place that resolves names, and the only one that loads them."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from linattn_cli.kernels.faults import DoesNotFit, FallbackWarning
from linattn_cli.kernels.registry import PRIMITIVES
from linattn_cli.kernels.types import Impl

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_overrides: dict[tuple[str, str], Callable] = {}


@lru_cache(maxsize=1)
def triton_available() -> bool:
    """Whether Triton can be imported here."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


def triton_interpreted() -> bool:
    """Whether Triton runs in its interpreter (`TRITON_INTERPRET=1` before it was imported)."""
    if not triton_available():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def why_not_triton(operator: str, tensor: Tensor) -> str | None:
    """The reason triton cannot run `operator` on `tensor`, or None when it can."""
    if "triton" not in PRIMITIVES[operator].impls:
        return f"{operator} has no triton implementation yet"
    if not triton_available():
        return "the triton package is not installed"
    if tensor.is_cuda:
        if torch.cuda.get_device_capability(tensor.device) < (8, 0):
            return "the GPU is older than compute capability 8.0"
    elif not triton_interpreted():
        return f"the tensors are on {tensor.device.type}, not on a GPU"
    return why_not_dtype(tensor.dtype)


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """The reason no Triton kernel takes `dtype`, or None when all do."""
    return "its kernels have no float64" if dtype == torch.float64 else None


def resolve(operator: str, impl: str | Impl, tensor: Tensor) -> str:
    """The name of the implementation of a primitive that `impl` means for `tensor`.

    An explicit request never falls back: it raises `ValueError` with the reason and the remedy.
    """
    wanted = Impl.parse(impl)
    if wanted is Impl.AUTO:
        return "triton" if tensor.is_cuda and why_not_triton(operator, tensor) is None else "chunk"
    if wanted is Impl.SCAN:
        raise ValueError(f"{operator} has no impl 'scan'; forms have it, primitives are reference, chunk or triton")
    if wanted is Impl.TRITON and (reason := why_not_triton(operator, tensor)) is not None:
        raise ValueError(f"impl='triton' was asked for but {reason}; use impl='chunk'")
    return wanted.value


def load(operator: str, impl: str) -> Callable:
    """The function behind a resolved implementation name."""
    override = _overrides.get((operator, impl))
    if override is not None:
        return override
    package = PRIMITIVES[operator].package
    module = importlib.import_module(f"linattn_cli.kernels.{package}.{impl}")
    return getattr(module, f"{operator}_{impl}")


def run(operator: str, impl: str, *tensors: Tensor, **options: object) -> Any:
    """Call a resolved implementation, autocast off: states and inverses never lose precision to it."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        return load(operator, impl)(*tensors, **options)


def runs_kernels(form: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Of a form that may run on Triton, where its kernels are new or do not fit.

    Those that are new compile side by side, of all its operators. Where one does not fit the GPU, `auto` means chunk
    from then on, for these dimensions; triton, asked for by name, is an error.
    """

    @wraps(form)
    def called(*inputs: Parameters.args, **options: Parameters.kwargs) -> Result:
        given = (*inputs, *options.values())
        if torch.compiler.is_compiling() or not _launches(given):
            return form(*inputs, **options)
        if _fell_back and _place(form, given) in _fell_back and _is_auto(options):
            return _by_chunk(form, *inputs, **options)
        from linattn_cli.kernels.launch import compiled_together

        try:
            return compiled_together(form, *inputs, **options)
        except DoesNotFit as error:
            if not _is_auto(options):
                raise DoesNotFit(f"impl triton was asked for, but {error}") from error
            warnings.warn(f"{form.__name__} runs as impl='chunk': {error}", FallbackWarning, stacklevel=2)
            _fell_back.add(_place(form, given))
            return _by_chunk(form, *inputs, **options)

    return called


_fell_back: set[tuple] = set()
"""Where `auto` has turned to chunk: names of forms with the GPU, dtypes and dimensions of their inputs."""

_thread = threading.local()


def turns_to_chunk() -> int:
    """How often `auto` has turned to chunk in this thread, because kernels do not fit the GPU."""
    return getattr(_thread, "turns", 0)


def impl_that_ran(chosen: str, turns: int) -> str:
    """What was chosen, or chunk where `turns_to_chunk` said `turns` before it ran and says more now."""
    return Impl.CHUNK.value if turns_to_chunk() > turns else chosen


def _by_chunk(form: Callable[..., Result], *inputs: Any, **options: Any) -> Result:
    _thread.turns = turns_to_chunk() + 1
    return form(*inputs, **{**options, "impl": Impl.CHUNK})


def _place(form: Callable, inputs: Iterable[object]) -> tuple:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return form.__name__, tensors[0].device, *((x.dtype, x.shape[-1]) for x in tensors if x.dim() == 4)


def _is_auto(options: dict[str, Any]) -> bool:
    return Impl.parse(options.get("impl", Impl.AUTO)) is Impl.AUTO


def _launches(inputs: Iterable[object]) -> bool:
    """Whether a form with these inputs may launch kernels: one of them is on a GPU."""
    return any(isinstance(x, Tensor) and x.is_cuda for x in inputs) and triton_available()


def overridden(operator: str, impl: str) -> bool:
    """Whether `override` has replaced this implementation for now."""
    return (operator, impl) in _overrides


@contextmanager
def override(operator: str, impl: str, function: Callable) -> Iterator[None]:
    """Replace one implementation for the duration of a block; how planted bugs are tested."""
    _overrides[operator, impl] = function
    try:
        yield
    finally:
        del _overrides[operator, impl]
