"""A training step recorded once as a CUDA graph and replayed.

A small model's step is hundreds of short kernels, and on a GPU the host that launches them sets the pace. A
replay is one launch. The kernels, their order and so the numbers are those of the eager step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from linattn_cli.environment import resolve_impl
from linattn_cli.layers.base import Mixer
from linattn_cli.layers.softmax import Softmax
from linattn_cli.output import EXIT_INTERNAL, CliError

Result = TypeVar("Result")

EAGER_STEPS = 3
"""Steps run eagerly before the recording: they compile the kernels and let every library allocate."""


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
    if isinstance(mixer, Softmax):
        return mixer.impl in ("auto", "chunk")
    return resolve_impl(mixer.impl, device) == "triton"


class RecordedStep(Generic[Result]):
    """Runs `step(*inputs)` eagerly at first, then as a graph on inputs of the shapes it was recorded with.

    step    what to run; its inputs are tensors on the device, and it may change whatever tensors it likes in place
    What it returns is overwritten by the next call.
    """

    def __init__(self, step: Callable[..., Result], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._eager_steps = 0
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
        if self._graph is None and self._eager_steps >= EAGER_STEPS:
            return self._record(hosts)
        self._eager_steps += 1
        return self._step(*(host.to(self._device, non_blocking=True) for host in hosts))

    def _feed(self, hosts: list[Tensor]) -> None:
        for static, host in zip(self._inputs, hosts, strict=True):
            static.copy_(host, non_blocking=True)

    def _record(self, hosts: list[Tensor]) -> Result:
        self._inputs = tuple(torch.empty_like(host, device=self._device) for host in hosts)
        self._feed(hosts)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self._step(*self._inputs)
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # the end of a broken recording hides what broke it
                first = first.__context__
            raise CliError(
                f"a training step could not be recorded as a CUDA graph: {' '.join(str(first).split())[:200]}",
                hint="train without: --set train.cuda_graph=false",
                exit_code=EXIT_INTERNAL,
                kind="internal",
            ) from error
        graph.replay()  # recording runs nothing
        self._graph = graph
        return self._result
