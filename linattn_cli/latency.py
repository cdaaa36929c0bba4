"""`linattn latency`: time every arm at every length, and find where it overtakes softmax."""

from __future__ import annotations

from typing import Any

import torch

from linattn_cli import output
from linattn_cli.compare import name_of
from linattn_cli.crossover import Crossover, sentence
from linattn_cli.latency_arms import arms
from linattn_cli.latency_bench import FAILED, NO_MEMORY, OK, Bench, Plan, Row
from linattn_cli.latency_cases import SOFTMAX, Arm, Setting
from linattn_cli.latency_peers import PEERS, peer_arms
from linattn_cli.latency_timing import quantile
from linattn_cli.roofline import measure_roof

MEMORY_HINT = "lower --seq-lens, --batch, --heads or --d-head"


def make_arms(models: list[str], impls: list[str], setting: Setting, *, with_fla: bool) -> list[Arm]:
    """Softmax, the models by their implementations, and the peers; `CliError` where nothing asked for can run."""
    ours = arms(models, impls, setting)
    peers = peer_arms(setting, set(models) - {SOFTMAX}) if with_fla else []
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
        "shape": describe(plan.setting) + (", CUDA graphs" if plan.cuda_graph else ""),
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
        from linattn_cli import plotting
        from linattn_cli.latency_plot import picture

        crossed = {name: found.tokens for name, found in crossovers.items()}
        plotting.save(plan.plot, picture(doc.config, doc.env, rows + bench.bisected, crossed))
        doc.note(f"plot saved in {plan.plot}")
    _warn_of_noise(doc)
    if plan.setting.device.type == "cuda" and not plan.cuda_graph and launches_set_the_pace(rows):
        doc.note("the shortest calls take as long as longer ones: Python's launches; --cuda-graph times calls without")
    _conclude(doc, rows)


def describe(setting: Setting) -> str:
    """The shape in one line.

    >>> describe(Setting(1, 4, 64, torch.float32, torch.device("cpu"), "train"))
    'train, B=1 H=4 d=64, float32, cpu'
    """
    sizes = f"B={setting.batch} H={setting.heads} d={setting.d_head}"
    return f"{setting.mode}, {sizes}, {name_of(setting.dtype)}, {setting.device}"


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


def launches_set_the_pace(rows: list[Row]) -> bool:
    """Whether most arms take about as long at the shortest length as at twice as many tokens or more."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row["model"] != SOFTMAX and row["latency_ms_p50"] is not None:
            times.setdefault((row["model"], row["impl"]), []).append((row["seq_len"], row["latency_ms_p50"]))
    flat = []
    for found in times.values():
        (tokens, shortest), *longer = sorted(found)
        further = [ms for other, ms in longer if other >= 2 * tokens]
        flat += [further[0] < FLAT * shortest] if further else []
    return sum(flat) > len(flat) / 2


FLAT = 1.2
"""Growth over a doubling of the tokens below which the GPU waits for the host."""

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
