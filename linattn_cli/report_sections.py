"""What `linattn report` says of a source: a run folder, a sweep, or a document that a command printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn_cli import reproduce
from linattn_cli.output import CliError
from linattn_cli.plotting import Picture
from linattn_cli.runs import RECIPE, resume_command
from linattn_cli.side_by_side import Run, read_document, read_run, tables

Row = dict[str, Any]

LINES = 40
"""Lines of metrics.jsonl that a page shows; more are thinned out evenly."""


@dataclass(frozen=True)
class Table:
    """Rows under a caption; `folded` ones are there to be looked up."""

    caption: str
    rows: Sequence[Row]
    folded: bool = False


@dataclass
class Section:
    """One source on the page.

    figures   what is read first: name and value
    settings  the configuration as text, YAML or JSON
    commands  what it takes to do it again, and to go on
    notes     what a reader must know: failures, what is missing
    """

    title: str
    kind: str
    source: str
    status: str
    figures: dict[str, Any] = field(default_factory=dict)
    picture: Picture | None = None
    tables: list[Table] = field(default_factory=list)
    settings: str = ""
    env: Mapping[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> tuple[Section, Run | None]:
    """The section of a source, and the run if it is one. Raises `CliError` (exit 2) for what is none of them."""
    from linattn_cli.capacity_store import DATABASE

    if path.is_file():
        return of_document(path, read_document(path)), None
    if (path / DATABASE).is_file():
        return of_sweep(path), None
    run = read_run(path)
    return of_run(run), run


def of_run(run: Run) -> Section:
    """A training run: its curves and figures."""
    from linattn_cli.train_plot import picture, task_of

    summary = run.summary
    first = ("accuracy", "chance_pairs", "chance_vocab", "parameters", "state_bytes", "steps", "train_s")
    section = Section(
        title=f"{run.model} on {task_of(run.config)}",
        kind="training run",
        source=str(run.path),
        status=run.status,
        figures={key: summary[key] for key in first if summary.get(key) is not None},
        settings=(run.path / RECIPE).read_text(encoding="utf-8"),
        env=run.env,
        commands=[reproduce.of_run(run.path, run.config)],
        notes=_error(run.result),
    )
    if run.metrics:
        section.picture = picture(run.config, run.env, run.metrics, summary if run.result else {})
        section.tables.append(_metrics(run.metrics))
    else:
        section.notes.append("metrics.jsonl has no line yet")
    if run.result:
        section.tables.insert(0, Table("Figures at the end", _pairs(summary)))
    else:
        section.notes.append("not finished: there is no result.json, so no held-out figures")
        section.commands.append(resume_command(run.path))
    return section


def of_sweep(path: Path) -> Section:
    """A sweep, also while it runs: accuracy by size at the best learning rate, and every cell."""
    from linattn_cli import capacity_report as report
    from linattn_cli.capacity_plot import picture
    from linattn_cli.capacity_store import RECIPE as SWEEP_RECIPE
    from linattn_cli.capacity_store import SweepFolder
    from linattn_cli.capacity_store import resume_command as resume_sweep

    with SweepFolder.look(path) as folder:
        rows = folder.rows()
    if not rows:
        raise CliError(f"the sweep in {path} has no cell", hint="begin it again in another folder", kind="run_folder")
    found = report.groups(rows)
    states = [row["status"] for row in rows]
    config = json.loads(rows[0]["config"])
    env = _shared_env(path, rows)
    recipes = [path / SWEEP_RECIPE, *sorted(path.glob("sweep-*.yaml"), key=lambda file: (len(file.name), file.name))]
    across, small = report.pivot(found)
    section = Section(
        title=f"Sweep on {config['task']['name']}",
        kind="sweep",
        source=str(path),
        status="finished" if not {"pending", "failed"} & set(states) else "unfinished",
        figures={
            "cells": len(rows),
            **{
                state: states.count(state) for state in ("finished", "diverged", "failed", "pending") if state in states
            },
            "training_s": sum(row["train_s"] or 0.0 for row in rows),
        },
        picture=picture(config, env, found),
        tables=[
            Table(f"Held-out accuracy by {across}; mean [least, largest] over seeds", small),
            Table("In full, a row a group at its best learning rate", report.detail(found)),
            Table("Every cell", [_cell(row) for row in report.result_rows(rows)], folded=True),
        ],
        settings="\n".join(recipe.read_text(encoding="utf-8") for recipe in recipes if recipe.is_file()),
        env=env,
        commands=reproduce.of_sweep(path, recipes),
    )
    wrong = [row for row in rows if row["status"] == "failed"]
    section.notes += [f"{row['model']}, lr {row['lr']}, seed {row['seed']} failed: {row['error']}" for row in wrong[:5]]
    section.notes += [f"and {len(wrong) - 5} more failed"] if len(wrong) > 5 else []
    if "pending" in states:
        section.notes.append(f"{states.count('pending')} of {len(rows)} cells have not run yet")
        section.commands.append(resume_sweep(path))
    return section


def of_document(path: Path, document: Mapping[str, Any]) -> Section:
    """A document that a command printed with --json, each kind with its own picture."""
    command = str(document["command"])
    section = Section(
        title=_TITLES.get(command, f"linattn {command}"),
        kind=command,
        source=str(path),
        status="finished" if document["status"] == "ok" else str(document["status"]),
        settings=json.dumps(document["config"], indent=2, ensure_ascii=False),
        env=document["env"],
        notes=_error(document),
    )
    try:
        if document["results"] or document["summary"]:
            _FILL.get(command, _fill_other)(section, document)
        if (again := reproduce.of_document(document)) is not None:
            section.commands.append(again)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CliError(
            f"{path} is no complete document of {command}: {type(error).__name__}: {error}",
            hint=f"`linattn schema {command}` says what it must have",
            kind="file",
        ) from error
    return section


_TITLES = {
    "eval": "A trained run on held-out data",
    "latency": "Time of a call",
    "verify-scan": "Every form against its serial recurrence",
    "probe-norm": "States and their Jacobians",
    "capacity-sweep": "Sweep",
    "train": "A training run",
}


def _fill_eval(section: Section, document: Mapping[str, Any]) -> None:
    from linattn_cli.eval_plot import picture
    from linattn_cli.heldout import COLUMNS

    section.picture = picture(document["config"], document["env"], document["results"])
    figures = {key: value for key, value in document["summary"].items() if key not in ("examples", "run")}
    section.figures = figures
    section.title += f": {document['summary'].get('run', '')}".rstrip(": ")
    section.tables.append(Table("Accuracy by size and distance", _columns(document["results"], COLUMNS)))


def _fill_latency(section: Section, document: Mapping[str, Any]) -> None:
    from linattn_cli.latency_plot import picture

    rows, summary = document["results"], document["summary"]
    found = {f"{row['model']} {row['impl']}": summary.get(f"crossover_{row['model']}_{row['impl']}") for row in rows}
    crossings = {name: value for name, value in found.items() if isinstance(value, dict)}
    tokens = {name: value["tokens"] for name, value in crossings.items()}
    section.picture = picture(document["config"], document["env"], rows, tokens)
    section.title += f": {summary.get('shape', '')}".rstrip(": ")
    told = [{"arm": name, "overtakes softmax at": value["text"]} for name, value in crossings.items()]
    rest = {key: value for key, value in summary.items() if not key.startswith("crossover_")}
    columns = [
        *("model", "impl", "seq_len", "latency_ms_p50", "latency_ms_p10", "latency_ms_p90", "tokens_per_s"),
        *("speedup_over_softmax", "first_call_s", "peak_memory_mib", "roofline_fraction", "status", "reason"),
    ]
    section.tables += [
        Table("Where each overtakes softmax", told),
        Table("Times", _columns(rows, columns)),
        Table("Machine and shape", _pairs(rest)),
    ]


def _fill_verify(section: Section, document: Mapping[str, Any]) -> None:
    from linattn_cli.verify_plot import picture
    from linattn_cli.verify_rows import worst_rows

    rows, summary = document["results"], document["summary"]
    printed = [row for row in rows if row["form"] in ("as printed", "corrected")]
    judged = [row for row in rows if row["passed"] is not None and row not in printed]
    section.figures = {key: value for key, value in summary.items() if value is not None}
    if judged:
        section.picture = picture(document["config"], document["env"], judged)
    failed = [row for row in judged if not row["passed"]]
    wrong = ["model", "options", "form", "dtype", "quantity", "max_error", "budget", "worst", "got", "expected"]
    section.tables += [
        Table("Beyond budget", _columns(failed, wrong)),
        Table("The worst check of each group", list(worst_rows(judged)), folded=True),
        Table(
            "Formulas as the papers print them",
            _columns(printed, ["model", "options", "form", "max_error", "status", "reason"]),
        ),
    ]


def _fill_probe(section: Section, document: Mapping[str, Any]) -> None:
    from linattn_cli.probe_plot import picture
    from linattn_cli.probe_tables import condensed

    rows, summary = document["results"], document["summary"]
    claims = {key: value for key, value in summary.items() if isinstance(value, dict) and "claim" in value}
    words = {True: "holds", False: "does not hold", None: "not decided"}
    if any("series" in row for row in rows):
        section.picture = picture(document["config"], document["env"], rows, summary)
    section.tables += [
        Table(
            "Claims of the papers",
            [{"claim": c["claim"], "verdict": words[c["holds"]], "measured": c["text"]} for c in claims.values()],
        ),
        Table("Measured", [condensed(row) for row in rows]),
    ]


def _fill_sweep(section: Section, document: Mapping[str, Any]) -> None:
    from linattn_cli import capacity_report as report
    from linattn_cli.capacity_plot import picture

    summary = document["summary"]
    found = summary["table"]
    across, small = report.pivot(found)
    section.picture = picture(document["config"], document["env"], found)
    section.figures = {key: value for key, value in summary.items() if not isinstance(value, (list, str))}
    section.tables += [
        Table(f"Held-out accuracy by {across}; mean [least, largest] over seeds", small),
        Table("In full, a row a group at its best learning rate", report.detail(found)),
        Table("Every cell", [_cell(row) for row in document["results"]], folded=True),
    ]


def _fill_other(section: Section, document: Mapping[str, Any]) -> None:
    section.tables += [Table("Results", document["results"]), Table("Summary", _pairs(document["summary"]))]


_FILL = {
    "eval": _fill_eval,
    "latency": _fill_latency,
    "verify-scan": _fill_verify,
    "probe-norm": _fill_probe,
    "capacity-sweep": _fill_sweep,
}


def comparison(runs: Sequence[Run]) -> Section:
    """Several runs side by side, their curves in one picture."""
    from linattn_cli.train_plot import together

    return Section(
        title="Runs side by side",
        kind="comparison",
        source=", ".join(str(run.path) for run in runs),
        status="finished" if all(run.status == "finished" for run in runs) else "unfinished",
        picture=together([(run, name) for run, name in zip(runs, _names(runs), strict=True)]),
        tables=[Table(caption.rstrip(":"), rows) for caption, rows in tables(runs)],
        commands=[reproduce.line(["compare", *(str(run.path) for run in runs)])],
    )


def _names(runs: Sequence[Run]) -> list[str]:
    from linattn_cli.side_by_side import short_paths

    return short_paths([run.path for run in runs])


def _metrics(metrics: Sequence[Row]) -> Table:
    """The lines of a run, thinned out evenly where they are many; first and last stay."""
    if len(metrics) <= LINES:
        return Table("Lines of metrics.jsonl", metrics, folded=True)
    at = sorted({round(number * (len(metrics) - 1) / (LINES - 1)) for number in range(LINES)})
    return Table(
        f"{len(at)} of the {len(metrics)} lines of metrics.jsonl", [metrics[index] for index in at], folded=True
    )


def _pairs(found: Mapping[str, Any]) -> list[Row]:
    return [{"figure": key, "value": value} for key, value in found.items()]


def _columns(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """These columns, without those that say nothing in any row."""
    used = [name for name in names if any(row.get(name) is not None for row in rows)]
    return [{name: row.get(name) for name in used} for row in rows]


def _cell(row: Row) -> Row:
    hidden = ("key", "fingerprint", "finished_at", "attempts", "error_type", "device")
    return {name: value for name, value in row.items() if name not in hidden and value is not None}


def _shared_env(path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """What the cells of a sweep ran on: versions as the run folder of a finished one has them."""
    from linattn_cli.capacity_report import machines

    done = next((row for row in rows if row["run"] and (path / row["run"] / "result.json").is_file()), None)
    env = dict(read_document(path / done["run"] / "result.json")["env"]) if done else {}
    env.pop("seed", None)
    return env | machines(rows)


def _error(document: Mapping[str, Any]) -> list[str]:
    error = document.get("error")
    if not isinstance(error, dict):
        return []
    hint = f" ({error['hint']})" if error.get("hint") else ""
    return [f"{error.get('message', 'failed')}{hint}"]
