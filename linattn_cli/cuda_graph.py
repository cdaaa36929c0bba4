"""A training step recorded once as a CUDA graph and replayed.

A small model's step is hundreds of short kernels, and on a GPU the host that launches them sets the pace. A
replay is one launch. The kernels, their order and so the numbers are those of the eager step.

Trainings may run side by side in threads of a process, each within `own_stream`: then replays overlap.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from linattn_cli.compare import name_of
from linattn_cli.environment import resolve_impl
from linattn_cli.kernels.dispatch import turns_to_chunk
from linattn_cli.layers.base import Mixer
from linattn_cli.layers.softmax import Softmax
from linattn_cli.output import EXIT_INTERNAL, CliError
from linattn_cli.own_mixer import is_own

if TYPE_CHECKING:
    from linattn_cli.settings import RunConfig

Result = TypeVar("Result")

EAGER_STEPS = 3
"""Steps run eagerly before the recording: they compile the kernels and let every library allocate."""

RECORDING = threading.RLock()
"""Held for everything that a thread does on a GPU but replaying, where others of the process train beside it.

While one records, no other may wait for the whole device, destroy a graph, or call a kernel or a library for the
first time. Triton compiles in one thread at a time, and the global random numbers that weights are drawn from
belong to one model at a time.
"""


def can_record(model: nn.Module, device: torch.device) -> bool:
    """Whether a training step of `model` asks the host nothing: on a GPU, every mixer on Triton or fused softmax.

    The PyTorch forms factorise matrices and ask whether that succeeded; what a mixer from elsewhere does is unknown.
    """
    if device.type != "cuda":
        return False
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    return bool(mixers) and all(_asks_nothing(mixer, device) for mixer in mixers)


def _asks_nothing(mixer: Mixer, device: torch.device) -> bool:
    if not type(mixer).__module__.startswith("linattn_cli.layers."):
        return False
    return _fused(mixer.impl, isinstance(mixer, Softmax), device, name_of(next(mixer.parameters()).dtype))


def _fused(impl: str, softmax: bool, device: torch.device, dtype: str) -> bool:
    return impl in ("auto", "chunk") if softmax else resolve_impl(impl, device, dtype) == "triton"


def will_record(config: RunConfig, device: torch.device) -> bool:
    """`can_record` of a run whose model is not built yet, on a GPU; code of the user's own does not count."""
    model, train = config.model, config.train
    return (
        train.cuda_graph and not is_own(model.name) and _fused(model.impl, model.name == "softmax", device, train.dtype)
    )


@contextlib.contextmanager
def own_stream(device: str) -> Iterator[None]:
    """On a GPU, a stream for this thread alone, as long as the thread lives; on a CPU nothing.

    torch hands out 32 streams in turn. A worker takes each once, or two threads would share one.
    """
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    else:
        yield


def wait_for_stream(device: torch.device) -> None:
    """Wait until what this thread has asked of a GPU is done; the thread sleeps, as torch's own waits do not.

    Beside many threads that wait, one that spins takes a core from those that have something to launch. Not the
    whole device: others may train on it in this process. On a CPU there is nothing to wait for.
    """
    if device.type != "cuda":
        return
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()


class RecordedStep(Generic[Result]):
    """Runs `step(*inputs)` eagerly at first, then as a graph on inputs of the shapes it was recorded with.

    step    what to run; its inputs are tensors on the device, and it may change whatever tensors it likes in place
    What it returns is overwritten by the next call.
    """

    def __init__(self, step: Callable[..., Result], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._eager_steps = 0
        self._left_triton = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._result: Result | None = None

    def __call__(self, *arrays: np.ndarray) -> Result:
        hosts = [torch.from_numpy(np.ascontiguousarray(array)).pin_memory() for array in arrays]
        fits = [(h.shape, h.dtype) for h in hosts] == [(x.shape, x.dtype) for x in self._inputs]
        if self._graph is not None and fits:
            self._feed(hosts)
            self._graph.replay()
            assert self._result is not None
            return self._result
        with RECORDING:
            if self._graph is None and self._eager_steps >= EAGER_STEPS and not self._left_triton:
                return self._record(hosts)
            self._eager_steps += 1
            turns = turns_to_chunk()
            result = self._step(*(host.to(self._device, non_blocking=True) for host in hosts))
            self._left_triton = turns_to_chunk() > turns
            return result

    def release(self) -> None:
        """Drop the graph and its memory; a further call records anew."""
        # Here, not whenever Python collects the cycle of step and trainer: another thread may record then.
        with RECORDING:
            self._graph, self._inputs, self._result = None, (), None

    def _feed(self, hosts: list[Tensor]) -> None:
        for static, host in zip(self._inputs, hosts, strict=True):
            static.copy_(host, non_blocking=True)

    def _record(self, hosts: list[Tensor]) -> Result:
        self._inputs = tuple(torch.empty_like(host, device=self._device) for host in hosts)
        self._feed(hosts)
        try:
            graph, result = captured(partial(self._step, *self._inputs), self._device)
        except CannotRecord as error:
            raise CliError(
                f"a training step could not be recorded as a CUDA graph: {error}",
                hint="train without: --set train.cuda_graph=false",
                exit_code=EXIT_INTERNAL,
                kind="internal",
            ) from error
        graph.replay()  # recording runs nothing
        self._graph, self._result = graph, result
        return result


class CannotRecord(RuntimeError):
    """What runs asks the host for something, or does something else that a CUDA graph cannot hold."""


def captured(run: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """`run()` recorded as a CUDA graph, and what it returned, which only a replay fills.

    `run` has run before, so that all is compiled and allocated. `CannotRecord` says what a graph cannot hold.
    """
    graph = torch.cuda.CUDAGraph()
    # A thread records on its own stream: cuBLAS keeps a workspace for each stream, which graphs recorded on
    # the same one would share when they are replayed side by side. The default stream cannot be recorded.
    stream = torch.cuda.current_stream(device)
    aside = None if stream == torch.cuda.default_stream(device) else stream
    try:
        with _uncollected(), torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            return graph, run()
    except RuntimeError as error:
        first: BaseException = error
        while first.__context__ is not None:  # the end of a broken recording hides what broke it
            first = first.__context__
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        raise CannotRecord(" ".join(str(first).split())[:200]) from error


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector asleep: whatever it finds, another graph for instance, must not go while one records."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
