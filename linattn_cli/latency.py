"""`linattn latency`: time every arm at every length, and find where it overtakes softmax."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn_cli import output
from linattn_cli.crossover import Crossover, Point, confirm, locate, sentence
from linattn_cli.latency_cases import (
    DECODED,
    SOFTMAX,
    Arm,
    Setting,
    arms,
    draw,
    sdpa_arm,
    sdpa_backends,
)
from linattn_cli.latency_gate import Gate
from linattn_cli.latency_peers import PEERS, peer_arms
from linattn_cli.latency_timing import (
    Cell,
    Sample,
    first_call,
    peak_bytes,
    prepare,
    quantile,
    repeat_in_turn,
    timed,
)
from linattn_cli.roofline import Roof, count, measure_roof

Row = dict[str, Any]

OK, OVER, NOT_RUN, FAILED, NO_MEMORY = "ok", "over budget", "not run", "check failed", "out of memory"

MEMORY_HINT = "lower --seq-lens, --batch, --heads or --d-head"


@dataclass(frozen=True)
class Plan:
    """What to time: the arms at each of the lengths, so many repetitions within so many seconds a cell."""

    arms: list[Arm]
    seq_lens: list[int]
    setting: Setting
    repetitions: int
    budget_s: float
    gate: bool = True
    plot: Path | None = None


@dataclass
class _Live:
    """A cell that passed its checks, with what is known of it before it is timed."""

    arm: Arm
    row: Row
    cell: Cell


def make_arms(models: list[str], impls: list[str], setting: Setting, *, with_fla: bool) -> list[Arm]:
    """Softmax, the models by their implementations, and the peers; `CliError` where nothing asked for can run."""
    peers = peer_arms(setting) if with_fla else []
    ours = arms(models, impls, setting)
    asked = [arm for arm in ours if arm.model != SOFTMAX]
    if asked and not peers and all(arm.why_not for arm in asked):
        missing = any(arm.impl == "triton" for arm in asked)
        raise output.CliError(
            f"nothing to time: {asked[0].model} by {asked[0].impl}: {asked[0].why_not}",
            hint="use --impl chunk, or --impl auto",
            exit_code=output.EXIT_DEVICE if missing else output.EXIT_USAGE,
            kind="device" if missing else "usage",
        )
    return ours + peers


def run(plan: Plan, doc: output.Document) -> None:
    """Fill a document: one row per arm and length, the crossovers in its summary."""
    doc.memory_hint = MEMORY_HINT
    if plan.setting.device.type == "cuda":
        torch.cuda.set_device(plan.setting.device)  # events and kernels go to the current one
    roof = measure_roof(plan.setting.device, plan.setting.dtype)
    bench = Bench(plan, roof, doc)
    softmax, lengths = plan.arms[0], sorted(plan.seq_lens)
    with doc.progress(len(lengths) * len(plan.arms), "latency") as bar:
        for tokens in lengths:
            doc.results += bench.measure(plan.arms, tokens, bar.update)
            _set_columns(doc, plan)
    rows = list(doc.results)
    doc.summary = {
        "shape": describe(plan.setting),
        "copy_bandwidth_gb_per_s": roof.bytes_per_s / 1e9,
        "matrix_tflop_per_s": roof.flops_per_s / 1e12,
        "softmax_backends": ", ".join(dict.fromkeys(r["backend"] for r in rows if r.get("backend"))) or None,
    }
    crossovers: dict[str, Crossover] = {}
    candidates = [arm for arm in plan.arms if arm is not softmax and arm.impl != "reference" and not arm.why_not]
    for arm in candidates if len(lengths) > 1 else []:
        found = bench.crossover(arm, rows)
        name = f"{arm.model} {arm.impl}"
        crossovers[name] = found
        said = sentence(found)
        doc.summary[f"crossover_{arm.model}_{arm.impl}"] = (
            said if doc.fmt in ("table", "markdown") else _as_mapping(found, said)
        )
    if plan.plot is not None:
        from linattn_cli.latency_plot import save_plot

        save_plot(plan.plot, rows + bench.bisected, crossovers, title=describe(plan.setting))
        doc.note(f"plot saved in {plan.plot}")
    _warn_of_noise(doc)
    _conclude(doc, rows)


def describe(setting: Setting) -> str:
    """The shape in one line.

    >>> describe(Setting(1, 4, 64, torch.float32, torch.device("cpu"), "train"))
    'train, B=1 H=4 d=64, float32, cpu'
    """
    dtype = str(setting.dtype).removeprefix("torch.")
    return f"{setting.mode}, B={setting.batch} H={setting.heads} d={setting.d_head}, {dtype}, {setting.device}"


def _as_mapping(found: Crossover, said: str) -> dict[str, Any]:
    measured = [{"seq_len": point.seq_len, "over_softmax": point.ratio} for point in found.points]
    return {
        "tokens": found.tokens,
        "status": found.status,
        "interpolated_tokens": found.interpolated,
        "slower_at": found.slower and found.slower.seq_len,
        "faster_at": found.faster and found.faster.seq_len,
        "measured": measured,
        "text": said,
    }


def _set_columns(doc: output.Document, plan: Plan) -> None:
    """The table leaves out what is the same in every row, or said in the summary."""
    columns = ["model", "impl", "seq_len", "latency_ms_p50", "latency_ms_p10", "latency_ms_p90", "tokens_per_s"]
    for name in ("speedup_over_softmax", "speedup_over_reference"):
        columns += [name] if any(row[name] is not None for row in doc.results if row["model"] != SOFTMAX) else []
    columns += ["first_call_s", "peak_memory_mib", "roofline_fraction"]
    columns += ["repetitions"] if any(row["repetitions"] != plan.repetitions for row in doc.results) else []
    columns += ["status"] if any(row["status"] != OK for row in doc.results) else []
    doc.columns = columns + (["reason"] if any(row["reason"] for row in doc.results) else [])


NOISY = 1.5
"""Spread of the 90 % over the 10 % quantile beyond which a user is told that the machine is busy."""


def _warn_of_noise(doc: output.Document) -> None:
    spreads = [row["latency_ms_p90"] / row["latency_ms_p10"] for row in doc.results if row["latency_ms_p10"]]
    typical = quantile(spreads, 0.5) if spreads else 1.0
    if typical > NOISY:
        doc.warn(f"repetitions typically spread {typical:.2g} x (90 % over 10 %): the machine is busy, times are rough")


def _conclude(doc: output.Document, rows: list[Row]) -> None:
    """The exit code that the rows ask for; a peer that fails is no fault of ours, only left without a time."""
    wrong = [row for row in rows if row["status"] == FAILED and row["model"] not in PEERS]
    if wrong:
        first = wrong[0]
        doc.fail(
            f"{len(wrong)} of {len(rows)} cells failed their check and have no time, {first['model']} by "
            f"{first['impl']} at {first['seq_len']} first: {first['reason']}",
            hint=f"linattn verify-scan --models {first['model']} has details; --no-gate times it all the same",
        )
    elif all(row["status"] == NO_MEMORY for row in rows):
        message = f"out of memory at every length: {rows[0]['reason']}"
        raise output.CliError(message, hint=MEMORY_HINT, exit_code=output.EXIT_MEMORY, kind="memory")


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
                    seconds = min(timed(sample, self.setting.device) for _ in range(3))
            except RuntimeError as error:
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
            row |= {"status": FAILED, "reason": f"raised {type(error).__name__}: {text}"}

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
        if cell.over:
            done = len(cell.seconds)
            row |= {
                "status": OVER,
                "reason": f"{done} of {self.plan.repetitions} repetitions in {self.plan.budget_s:g} s",
            }
            if median > self.plan.budget_s:
                self._too_slow[arm.key] = (
                    f"one call at {tokens} tokens took {median:.3g} s, more than the {self.plan.budget_s:g} s of a cell"
                )
        if setting.device.type == "cpu" and median > self.plan.budget_s / 4:
            # the profiler slows a call down several times
            row["reason"] = row["reason"] or f"memory not measured: a call takes over {self.plan.budget_s / 4:g} s"
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
