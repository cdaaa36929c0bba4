"""How calls are timed in turn, and what memory they are said to take."""

from __future__ import annotations

import time

import torch

from linattn_cli import latency_timing
from linattn_cli.latency_cases import sdpa_arm
from linattn_cli.latency_timing import Cell, Sample, peak_bytes, repeat_in_turn

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
