"""Timing arms at one length at a time: first call, check, repetitions, memory, and the row that they make."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from linattn_cli import output
from linattn_cli.crossover import Crossover, Point, confirm, locate
from linattn_cli.latency_cases import DECODED, SOFTMAX, Arm, Setting, draw, sdpa_arm, sdpa_backends
from linattn_cli.latency_gate import Gate
from linattn_cli.latency_timing import (
    Cell,
    Sample,
    first_call,
    peak_bytes,
    prepare,
    quantile,
    record,
    repeat_in_turn,
    timed,
)
from linattn_cli.roofline import Roof, count

Row = dict[str, Any]

FEWEST_REPETITIONS = 20
"""Repetitions below which a time is marked: its budget was too small for it."""

OK, OVER, NOT_RUN, FAILED, NO_MEMORY = "ok", "over budget", "not run", "check failed", "out of memory"


@dataclass(frozen=True)
class Plan:
    """What to time: the arms at each of the lengths, so many repetitions within so many seconds a cell.

    With `cuda_graph` a repetition replays a recording of the call.
    """

    arms: list[Arm]
    seq_lens: list[int]
    setting: Setting
    repetitions: int
    budget_s: float
    gate: bool = True
    plot: Path | None = None
    cuda_graph: bool = False


@dataclass
class _Live:
    """A cell that passed its checks, with what is known of it before it is timed."""

    arm: Arm
    row: Row
    cell: Cell


class Bench:
    """Times arms at one length at a time, and remembers which were too slow to go on with."""

    def __init__(self, plan: Plan, roof: Roof, doc: output.Document) -> None:
        self.plan, self.setting, self.roof, self.doc = plan, plan.setting, roof, doc
        self.gate = Gate(plan.setting) if plan.gate else None
        self.bisected: list[Row] = []
        self._too_slow: dict[tuple[str, str], str] = {}

    def measure(self, chosen: Sequence[Arm], tokens: int, tick: Callable[[int], None] = lambda n: None) -> list[Row]:
        """One row an arm, in their order."""
        rows: list[Row] = []
        live: list[_Live] = []
        tensors: dict[str, Tensor] = {}
        drawn = tokens + (DECODED if self.setting.mode == "decode" else 0)
        for arm in chosen:
            row = self._empty_row(arm, tokens)
            rows.append(row)
            reason = arm.why_not
            if reason or (reason := self._too_slow.get(arm.key)):
                row |= {"status": NOT_RUN if arm.why_not else OVER, "reason": reason}
                tick(1)
                continue
            try:
                tensors |= draw([name for name in arm.names if name not in tensors], self.setting, drawn)
                started = self._start(arm, row, tensors, tokens)
                if started is not None:
                    live.append(started)
            except Exception as error:
                self._failed(arm, row, error)
            tick(1)
        try:
            self._repeat(live)
        except Exception as error:  # several cells are held at once here: none of them is to blame alone
            for started in live:
                self._failed(started.arm, started.row, error)
            live = []
        for started in live:
            self._finish(started, tokens)
        _compare_rows(rows)
        return rows

    def crossover(self, arm: Arm, rows: list[Row]) -> Crossover:
        """Where an arm overtakes softmax, bisected with further measurements."""
        softmax = self.plan.arms[0]

        def measure(tokens: int) -> float | None:
            self.doc.log(f"crossover of {arm.model} ({arm.impl}): measuring {tokens} tokens")
            measured = self.measure([softmax, arm], tokens)
            self.bisected += measured
            return _over_softmax(measured[1])

        mine = [row for row in rows if (row["model"], row["impl"]) == arm.key]
        pairs = [(row["seq_len"], _over_softmax(row)) for row in mine]
        return confirm(locate([Point(tokens, ratio) for tokens, ratio in pairs if ratio is not None]), measure)

    def _empty_row(self, arm: Arm, tokens: int) -> Row:
        return {
            "model": arm.model,
            "impl": arm.impl,
            "mode": self.setting.mode,
            "seq_len": tokens,
            "latency_ms_p50": None,
            "latency_ms_p10": None,
            "latency_ms_p90": None,
            "tokens_per_s": None,
            "first_call_s": None,
            "peak_memory_mib": None,
            "roofline_fraction": None,
            "roofline_ms": None,
            "bound": None,
            "speedup_over_softmax": None,
            "speedup_over_reference": None,
            "repetitions": 0,
            "checked": None,
            "backend": None,
            "status": OK,
            "reason": None,
        }

    def _start(self, arm: Arm, row: Row, tensors: dict[str, Tensor], tokens: int) -> _Live | None:
        """The first call and the check of a cell; None where the check is red."""
        if arm.model == SOFTMAX:
            arm, row["backend"], first_s, sample = self._fastest_softmax(tensors, tokens)
        else:
            sample = prepare(arm, self.setting, tensors, tokens)
            first_s = first_call(sample, self.setting.device)
        if self.gate is not None and arm.impl != "reference":
            problem, row["checked"] = self.gate.check(arm, tensors, tokens)
            if problem is not None:
                row |= {"status": FAILED, "reason": problem}
                return None
        if self.plan.cuda_graph and arm.model != SOFTMAX:
            record(sample, self.setting.device)
        row["first_call_s"] = first_s
        return _Live(arm, row, Cell(sample))

    def _fastest_softmax(self, tensors: dict[str, Tensor], tokens: int) -> tuple[Arm, str, float, Sample]:
        """SDPA by the backend that is fastest here, the first call of each apart."""
        best: tuple[float, tuple[Arm, str, float, Sample]] | None = None
        reasons = []
        for backend in sdpa_backends(self.setting, tokens):
            arm = sdpa_arm(backend)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch explains every backend that it refuses
                    sample = prepare(arm, self.setting, tensors, tokens)
                    first_s = first_call(sample, self.setting.device)
                    if self.plan.cuda_graph:
                        record(sample, self.setting.device)
                    seconds = min(timed(sample, self.setting.device) for _ in range(3))
            except (RuntimeError, ValueError) as error:
                if output.describe_error(error).exit_code == output.EXIT_MEMORY:
                    raise
                reasons.append(str(error))
                continue
            name = backend.name.removesuffix("_ATTENTION").lower()
            if best is None or seconds < best[0]:
                best = seconds, (arm, name, first_s, sample)
        if best is None:
            raise ValueError(f"no SDPA backend runs this shape: {'; '.join(reasons) or 'its scores would not fit'}")
        return best[1]

    def _failed(self, arm: Arm, row: Row, error: Exception) -> None:
        """A cell that raised: no memory, a shape that the arm does not take, or a fault, which is a red check."""
        text = " ".join(str(error).split())[:300]
        if output.describe_error(error).exit_code == output.EXIT_MEMORY:
            row |= {"status": NO_MEMORY, "reason": text}
        elif isinstance(error, ValueError):
            row |= {"status": NOT_RUN, "reason": text}
        else:
            if self.doc.debug:
                output.write_stderr("".join(traceback.format_exception(error)).rstrip("\n"))
            status = NOT_RUN if arm.peer else FAILED  # what a peer does not take is its own affair
            row |= {"status": status, "reason": f"raised {type(error).__name__}: {text}"}

    def _repeat(self, live: list[_Live]) -> None:
        repeat_in_turn(
            [started.cell for started in live],
            self.setting.device,
            repetitions=self.plan.repetitions,
            budget_s=self.plan.budget_s,
        )

    def _finish(self, started: _Live, tokens: int) -> None:
        arm, row, cell = started.arm, started.row, started.cell
        setting, median = self.setting, quantile(cell.seconds, 0.5)
        row |= {f"latency_ms_p{p}": 1000 * quantile(cell.seconds, p / 100) for p in (50, 10, 90)}
        made = setting.batch * (1 if setting.mode == "decode" else tokens)
        row |= {"tokens_per_s": made / median, "repetitions": len(cell.seconds)}
        work = count(
            arm.model,
            mode=setting.mode,
            batch=setting.batch,
            heads=setting.heads,
            tokens=tokens,
            key_dim=setting.d_head,
            value_dim=setting.d_head,
            **cell.sample.sizes,
        )
        if work is not None:
            bound_s, row["bound"] = work.bound(self.roof)
            row |= {"roofline_ms": 1000 * bound_s, "roofline_fraction": bound_s / median}
        done, budget_s = len(cell.seconds), self.plan.budget_s
        if done < FEWEST_REPETITIONS:
            row |= {"status": OVER, "reason": f"{done} of {self.plan.repetitions} repetitions in {budget_s:g} s"}
        if median > budget_s:
            self._too_slow[arm.key] = (
                f"one call at {tokens} tokens took {median:.3g} s, more than the {budget_s:g} s of a cell"
            )
        if setting.device.type == "cpu" and median > budget_s / 4:
            # the profiler slows a call down several times
            row["reason"] = row["reason"] or f"memory not measured: a call takes over {budget_s / 4:g} s"
            return
        row["peak_memory_mib"] = peak_bytes(cell.sample, setting.device) / 2**20


def _over_softmax(row: Row) -> float | None:
    return None if row["speedup_over_softmax"] is None else 1 / row["speedup_over_softmax"]


def _compare_rows(rows: list[Row]) -> None:
    """How many times faster than softmax, and than the same model token by token, at one length."""
    medians = {(row["model"], row["impl"]): row["latency_ms_p50"] for row in rows}
    for row in rows:
        own = row["latency_ms_p50"]
        others = {"softmax": medians.get((SOFTMAX, "sdpa")), "reference": medians.get((row["model"], "reference"))}
        for name, other in others.items():
            if own is not None and other is not None:
                row[f"speedup_over_{name}"] = other / own
