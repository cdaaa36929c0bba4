"""Timing calls honestly: the first one apart, the others in rotated order, each against its own budget of time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from linattn_cli.compare import Comparison, budget, compare
from linattn_cli.cuda_graph import CannotRecord, captured
from linattn_cli.kernels.types import state_bytes
from linattn_cli.latency_cases import DECODED, Arm, Setting
from linattn_cli.roofline import synchronize

WARM_UPS = 2
"""Calls between the first one and the first that counts."""

FLUSH_BYTES = 2**28
"""Written before every timed GPU call, so that no call finds its inputs in the cache; as `triton.testing` does."""


@dataclass
class Sample:
    """A call ready to be timed.

    run      one call, or `DECODED` consecutive ones in `decode`
    calls    how many calls that is
    inputs   the tensors of one call
    context  to be entered around calls, outside the time
    once     a single call
    state    what a decoded token starts from
    output   the output of one call, once run
    """

    run: Callable[[], None]
    calls: int
    inputs: list[Tensor]
    context: Callable[[], Any]
    once: Callable[[], None]
    state: Any = None
    output: Tensor | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the inputs, output and state of one call, as `roofline.count` takes them."""
        return {
            "input_bytes": sum(x.numel() * x.element_size() for x in self.inputs),
            "output_bytes": 0 if self.output is None else self.output.numel() * self.output.element_size(),
            "state_bytes": state_bytes(self.state),
        }


def prepare(arm: Arm, setting: Setting, tensors: dict[str, Tensor], tokens: int) -> Sample:
    """Make the call of an arm from `draw`n tensors: T of them, and in `decode` also the tokens that follow."""
    x = {name: tensors[name] for name in arm.names}
    if setting.mode == "decode":
        return _decoding(arm, x, tokens)
    leaves = {name: y.detach().requires_grad_(setting.mode == "train") for name, y in x.items()}
    upstream: Tensor | None = None

    def forward() -> None:
        with torch.no_grad():
            sample.output = arm.call(x, None)[0]

    def train() -> None:
        nonlocal upstream
        o = arm.call(leaves, None)[0]
        if upstream is None:
            upstream = torch.randn_like(o)
        torch.autograd.grad(o, list(leaves.values()), upstream, allow_unused=True)
        sample.output = o.detach()

    run = train if setting.mode == "train" else forward
    sample = Sample(run, 1, list(x.values()), arm.context, run)
    return sample


def _decoding(arm: Arm, x: dict[str, Tensor], tokens: int) -> Sample:
    with torch.no_grad(), arm.context():
        state = arm.prefill({name: y[:, :tokens] for name, y in x.items()})
    steps = [{name: y[:, tokens + i : tokens + i + 1].contiguous() for name, y in x.items()} for i in range(DECODED)]

    def decode(count: int) -> None:
        carried = state
        with torch.no_grad():
            for step in steps[:count]:
                sample.output, carried = arm.call(step, carried)

    inputs = list(steps[0].values())
    sample = Sample(lambda: decode(DECODED), DECODED, inputs, arm.context, lambda: decode(1), state)
    return sample


def timed(sample: Sample, device: torch.device) -> float:
    """Seconds of one call (the mean of the consecutive ones in `decode`), until the device has finished."""
    with sample.context():
        if device.type != "cuda":
            started = time.perf_counter()
            sample.run()
            return (time.perf_counter() - started) / sample.calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(device)
        _flush_buffer(device).zero_()
        begin.record()
        sample.run()
        end.record()
        synchronize(device)
        return begin.elapsed_time(end) / 1000 / sample.calls


@lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def record(sample: Sample, device: torch.device) -> None:
    """From now on `run` replays a CUDA graph of itself: the same kernels, with one launch for all of them.

    The sample has run before. ValueError where it cannot be recorded, RuntimeError where a replay gives other numbers.
    """
    eager = sample.run
    with sample.context():
        eager()
        assert sample.output is not None
        expected = sample.output.clone()
        try:
            graph, _ = captured(eager, device)
        except CannotRecord as error:
            raise ValueError(f"it cannot be recorded as a CUDA graph: {error}") from error
    graph.replay()
    found = compare(sample.output, expected.double(), dtype=expected.dtype)
    if not budget(expected.dtype, Comparison(0.0, 0.0), gradient=False).allows(found):
        raise RuntimeError(f"its CUDA graph gives other numbers, by {found.max_error}: {found.problem}")
    sample.run = graph.replay


def first_call(sample: Sample, device: torch.device) -> float:
    """Seconds of the first call by the clock on the wall: compilation and tuning included."""
    synchronize(device)
    started = time.perf_counter()
    with sample.context():
        sample.once()
    synchronize(device)
    return time.perf_counter() - started


@dataclass
class Cell:
    """One arm at one length while it is timed.

    seconds    of every repetition that counts
    spent      seconds given to it so far, the first call and its checks apart
    over       whether the budget ended it early
    """

    sample: Sample
    seconds: list[float] = field(default_factory=list)
    spent: float = 0.0
    over: bool = False

    def repeat(self, device: torch.device, *, counts: bool = True) -> None:
        started = time.perf_counter()
        seconds = timed(self.sample, device)
        self.spent += time.perf_counter() - started
        if counts:
            self.seconds.append(seconds)


def repeat_in_turn(cells: Sequence[Cell], device: torch.device, *, repetitions: int, budget_s: float) -> None:
    """Warm up, then time every cell `repetitions` times, the order rotated by one between repetitions.

    A cell whose budget is spent stops and says so; it keeps at least one repetition. A call as long as the whole
    budget is not repeated to warm up: it counts at once.
    """
    for cell in cells:
        for _ in range(WARM_UPS):
            cell.repeat(device)
            if cell.spent >= budget_s:
                cell.over = True
                break
            cell.seconds.clear()
        cell.spent = cell.spent if cell.over else 0.0
    for index in range(repetitions):
        for cell in rotated(cells, index):
            if cell.over:
                continue
            if cell.spent >= budget_s:
                cell.over = True
                continue
            cell.repeat(device)


def rotated(cells: Sequence[Cell], by: int) -> list[Cell]:
    """The cells in the order of one repetition.

    >>> rotated(["a", "b", "c"], 1), rotated([], 3)
    (['b', 'c', 'a'], [])
    """
    start = by % len(cells) if cells else 0
    return [*cells[start:], *cells[:start]]


def quantile(values: Sequence[float], share: float) -> float:
    """A quantile by linear interpolation.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([1.0, 2.0], 0.9)
    (2.0, 1.9)
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def peak_bytes(sample: Sample, device: torch.device) -> int:
    """Most bytes held at once during a call: its inputs and state, and everything allocated until it returns.

    On a GPU from torch's allocator. On the CPU from the allocations that torch's profiler sees, which are those
    of tensors: buffers inside a library (a matrix product's packing) are not among them.
    """
    held = sum(sample.sizes[name] for name in ("input_bytes", "state_bytes"))
    sample.output = None
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with sample.context():
            sample.once()
        synchronize(device)
        return held + torch.cuda.max_memory_allocated(device) - before
    with (
        _kineto_silent(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        sample.context(),
    ):
        sample.once()
    recorded = profile.profiler.kineto_results.events()
    events = sorted((e.start_ns(), e.nbytes()) for e in recorded if e.name() == "[memory]")
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return held + peak


@contextlib.contextmanager
def _kineto_silent() -> Iterator[None]:
    """Some builds of torch announce the profiler on file descriptor 2, which no Python setting reaches."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr to keep quiet
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
