"""How calls are timed in turn, and what memory they are said to take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import torch

from linattn_cli import latency_timing
from linattn_cli.cuda_graph import CannotRecord
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.latency import launches_set_the_pace
from linattn_cli.latency_cases import sdpa_arm
from linattn_cli.latency_timing import Cell, Sample, peak_bytes, record, repeat_in_turn

CPU = torch.device("cpu")


def _cell(order: list[str], name: str, seconds: float = 0.0) -> Cell:
    def run() -> None:
        order.append(name)
        time.sleep(seconds)

    return Cell(Sample(run, 1, [], sdpa_arm().context, run))


def test_the_order_rotates_between_repetitions_after_a_warm_up():
    order: list[str] = []
    cells = [_cell(order, name) for name in "abc"]
    repeat_in_turn(cells, CPU, repetitions=4, budget_s=60)
    warm_up = 3 * latency_timing.WARM_UPS
    assert "".join(order[warm_up:]) == "abcbcacababc"
    assert [len(cell.seconds) for cell in cells] == [4, 4, 4]


def test_a_call_longer_than_its_budget_is_made_once():
    order: list[str] = []
    slow, fast = _cell(order, "slow", 0.6), _cell(order, "fast")
    repeat_in_turn([slow, fast], CPU, repetitions=20, budget_s=0.5)
    assert (len(slow.seconds), slow.over, order.count("slow")) == (1, True, 1)
    assert (len(fast.seconds), fast.over) == (20, False)


def test_peak_memory_is_what_was_held_at_once():
    numbers = 2**16

    def run() -> None:
        first = torch.ones(numbers)
        second = first + 1
        del first
        sample.output = second * 2  # two of the three are alive

    sample = Sample(run, 1, [torch.ones(numbers)], sdpa_arm().context, run)
    held = peak_bytes(sample, CPU) - 3 * numbers * 4  # the third is the input
    assert 0 <= held < 100  # the scalars 1 and 2


class _Graph:
    """What a CUDA graph is to who times it: `wrong` adds an error to what the recorded call computes."""

    def __init__(self, run: Callable[[], None], sample: Sample, wrong: float) -> None:
        self.run, self.sample, self.wrong, self.replays = run, sample, wrong, 0

    def replay(self) -> None:
        self.replays += 1
        self.run()
        self.sample.output += self.wrong


def _recorded(monkeypatch, wrong: float = 0.0) -> tuple[Sample, list[_Graph]]:
    """A sample that has been recorded, by a stand-in for the GPU."""
    graphs: list[_Graph] = []

    def run() -> None:
        sample.output = torch.ones(3)

    def captured(recorded, device):
        graphs.append(_Graph(recorded, sample, wrong))
        return graphs[-1], recorded()

    monkeypatch.setattr(latency_timing, "captured", captured)
    sample = Sample(run, 1, [], sdpa_arm().context, run)
    record(sample, CPU)
    return sample, graphs


def test_a_recorded_call_is_replayed_and_not_run(monkeypatch):
    sample, (graph,) = _recorded(monkeypatch)
    before = graph.replays
    repeat_in_turn([Cell(sample)], CPU, repetitions=5, budget_s=60)
    assert graph.replays - before == 5 + latency_timing.WARM_UPS


def test_a_replay_that_gives_other_numbers_is_a_failure(monkeypatch):
    with pytest.raises(RuntimeError, match="gives other numbers, by"):
        _recorded(monkeypatch, wrong=1e-3)


def test_what_cannot_be_recorded_is_not_run(monkeypatch):
    def refused(run, device):
        raise CannotRecord("operation not permitted when stream is capturing")

    monkeypatch.setattr(latency_timing, "captured", refused)
    sample = Sample(lambda: setattr(sample, "output", torch.ones(3)), 1, [], sdpa_arm().context, lambda: None)
    with pytest.raises(ValueError, match="cannot be recorded as a CUDA graph: operation not permitted"):
        record(sample, CPU)


def test_graphs_need_a_gpu(linattn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = linattn("latency", "--cuda-graph", "--seq-lens", "16")
    assert code == 3
    assert "--cuda-graph needs a GPU; this would run on cpu" in err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("mode", ["forward", "train", "decode"])
def test_every_mixer_can_be_timed_as_a_graph(linattn, mode):
    words = ("--models", "all", "--seq-lens", "200", "--heads", "2", "--mode", mode, "--device", "cuda", "--cuda-graph")
    code, out, err = linattn("latency", *words, "--json")
    assert code == 0, err
    rows = json.loads(out)["results"]
    assert {row["model"]: row["status"] for row in rows} == dict.fromkeys(MIXERS, "ok")


@pytest.mark.parametrize(
    ("times", "paced"),
    [
        ({"vla": (0.5, 0.52), "hla2": (0.3, 0.3), "mesa": (0.6, 1.1)}, True),
        ({"vla": (0.5, 0.9), "hla2": (0.3, 0.3), "mesa": (0.6, 1.1)}, False),
        ({"vla": (0.5, None)}, False),
        ({"softmax": (0.1, 0.1)}, False),
        ({}, False),
    ],
)
def test_launches_set_the_pace_where_twice_the_tokens_take_as_long(times, paced):
    rows = [
        {"model": model, "impl": "triton", "seq_len": tokens, "latency_ms_p50": ms}
        for model, pair in times.items()
        for tokens, ms in zip((1024, 2048), pair, strict=True)
    ]
    assert launches_set_the_pace(rows) is paced
