"""Recording a step once and replaying it, and what is said where that breaks, by a stand-in for the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from linattn_cli.cuda_graph import EAGER_STEPS, CannotRecord, RecordedStep, captured

CPU = torch.device("cpu")


class _Recording:
    """A recording that, as CUDA's, cannot end well once something in it has failed."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, failed: object, *_: object) -> None:
        if failed:
            raise RuntimeError("the capture was invalidated")


class _Graph:
    """Does nothing, where a GPU would compute again what was recorded."""

    replays = 0

    def replay(self) -> None:
        type(self).replays += 1


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.setattr(_Graph, "replays", 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", _Recording)
    for name in ("current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)


def test_a_recording_has_what_the_call_returned():
    assert captured(lambda: "result", CPU)[1] == "result"


def test_what_broke_a_recording_is_named_and_not_its_end():
    def run() -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    with pytest.raises(CannotRecord, match=r"^operation not permitted when stream is capturing$"):
        captured(run, CPU)


def test_no_memory_for_a_recording_is_no_memory():
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        captured(run, CPU)


def test_a_step_is_eager_at_first_then_recorded_then_replayed_on_the_inputs_of_the_recording():
    seen: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return 2 * x

    recorded = RecordedStep(step, CPU)
    for number in range(EAGER_STEPS):
        assert recorded(np.full(2, number)).tolist() == [2 * number] * 2
    assert _Graph.replays == 0
    result = recorded(np.full(2, 7))
    assert (len(seen), _Graph.replays) == (EAGER_STEPS + 1, 1)
    assert recorded(np.full(2, 8)) is result
    assert (len(seen), _Graph.replays) == (EAGER_STEPS + 1, 2)
    assert seen[-1].tolist() == [8, 8]
    assert recorded(np.full(3, 9)).tolist() == [18] * 3  # of another shape: eager
