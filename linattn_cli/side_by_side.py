"""`linattn compare`: runs side by side, what differs in their recipes and what each of them reached.

Nothing of a run is executed: recipes are read as data and figures from `result.json`, so runs of anybody's can be
compared. This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn_cli.capacity import flatten
from linattn_cli.output import CliError, Document
from linattn_cli.own_mixer import short_name
from linattn_cli.recipe import read_recipe
from linattn_cli.runs import METRICS, RECIPE, RESULT, is_locked, newer_format, read_metrics, require_run, resume_command

Row = dict[str, Any]

FINAL = (
    "accuracy",
    "loss",
    "exact_sequence_accuracy",
    "validation_accuracy",
    "chance_vocab",
    "chance_pairs",
    "parameters",
    "state_bytes",
    "jacobian_norm_max",
    "steps",
    "stopped_by",
    "train_s",
    "tokens_per_s",
)
"""What runs are compared by, in this order."""

MACHINE = ("device", "device_name", "threads", "dtype", "impl", "torch", "linattn", "commit")
"""What times depend on, and the last digits of everything."""


@dataclass(frozen=True)
class Run:
    """A run folder as it is on disk.

    config   the resolved recipe, plain data
    metrics  the lines of metrics.jsonl
    result   the document of result.json, empty before the run's end
    status   finished, running, unfinished, or what the document says
    """

    path: Path
    config: dict[str, Any]
    metrics: list[Row]
    result: dict[str, Any] = field(default_factory=dict)
    status: str = "unfinished"

    @property
    def summary(self) -> dict[str, Any]:
        """The figures the run ended with; before that, what its last line has, as far as it means the same."""
        if self.result:
            found: dict[str, Any] = dict(self.result.get("summary") or {})
        else:
            last = self.metrics[-1] if self.metrics else {}
            names = {"steps": "step", "train_s": "elapsed_s", "tokens_per_s": "tokens_per_s"}
            found = {name: last[key] for name, key in names.items() if key in last}
        validated = [row["validation_accuracy"] for row in self.metrics if "validation_accuracy" in row]
        if validated:
            found.setdefault("validation_accuracy", validated[-1])
        return found

    @property
    def env(self) -> dict[str, Any]:
        return dict(self.result.get("env") or {})

    @property
    def model(self) -> str:
        return short_name(str(self.config["model"]["name"]))


def read_run(path: Path) -> Run:
    """Read a run folder. Raises `CliError` (exit 2) where it is none, or its recipe or result is damaged."""
    from linattn_cli.capacity_store import DATABASE

    if (path / DATABASE).is_file():
        raise CliError(
            f"{path} is a sweep, not a run",
            hint=f"its runs are in {path / 'runs'}; linattn report {path} shows all of it",
            kind="run_folder",
        )
    require_run(path)
    config = read_recipe(str(path / RECIPE)).data
    for section in ("model", "task", "train"):
        name = config.get(section)
        if not isinstance(name, dict) or (section != "train" and not isinstance(name.get("name"), str)):
            raise CliError(
                f"{path / RECIPE} is not the resolved recipe of a run: {section} is missing or incomplete",
                hint="a run folder keeps the recipe that `linattn train` wrote; restore it",
                kind="run_folder",
            )
    result = read_document(path / RESULT) if (path / RESULT).is_file() else {}
    _check_summary(path / RESULT, result)
    metrics = read_metrics(path)
    if result:
        status = "finished" if result["status"] == "ok" else str(result["status"])
    else:
        status = "running" if is_locked(path) else "unfinished"
    return Run(path, config, metrics, result, status)


_KINDS: dict[str, type | tuple[type, ...]] = {"number": (int, float), "integer": int, "string": str}


def _check_summary(path: Path, result: Mapping[str, Any]) -> None:
    """What is compared and drawn must be of the published type (or null); the file may be anybody's."""
    from linattn_cli.schema_fields import TRAIN

    for name, said in TRAIN.summary.items():
        value = result.get("summary", {}).get(name)
        kind = _KINDS.get(said.partition(",")[0].rstrip("?").partition("|")[0])
        if value is not None and kind is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise CliError(
                f"{path} is no document of linattn: summary.{name} is {str(value)[:40]!r}",
                hint="restore it from a copy; the run itself can go on without it",
                kind="file",
            )


def read_document(path: Path) -> dict[str, Any]:
    """A JSON document that a command printed. Raises `CliError` (exit 2) for anything else, naming the file."""
    from linattn_cli.output import SCHEMA_VERSION

    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise CliError(
            f"{path} is not JSON: {error}", hint="give what a command printed with --json", kind="file"
        ) from error
    known = isinstance(found, dict) and isinstance(found.get("schema_version"), int)
    if known and found["schema_version"] > SCHEMA_VERSION:
        env = found.get("env")
        writer = str(env.get("linattn", "")) if isinstance(env, dict) else ""
        raise newer_format(path, writer, found["schema_version"], SCHEMA_VERSION)
    kinds = {"command": str, "status": str, "env": dict, "config": dict, "results": list, "summary": dict}
    wrong = [key for key, kind in kinds.items() if not known or not isinstance(found.get(key), kind)]
    if not wrong and any(isinstance(value, (dict, list)) for value in found["env"].values()):
        wrong.append("env")
    if wrong or not all(isinstance(row, dict) for row in found["results"]):
        raise CliError(
            f"{path} is no document of linattn: {', '.join(wrong) or 'its rows'} missing or of another type",
            hint="give what a command printed with --json",
            kind="file",
        )
    return found


def _parse_int(text: str) -> int:
    """Ours have no longer ones, and most of what reads numbers would stumble over them."""
    if len(text) > 19:
        raise ValueError(f"it holds a number of {len(text)} digits")
    return int(text)


def compare(paths: Sequence[Path], doc: Document) -> None:
    """Fill `doc`: a row a run, and for people two tables with a column a run."""
    if len(paths) < 2:
        raise CliError("compare takes at least two runs", hint="linattn compare RUN RUN")
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise CliError(f"{path} is given twice", hint="give each run once")
        seen[path.resolve()] = path
    runs = [read_run(path) for path in paths]
    settings = differing([run.config for run in runs])
    doc.config = {"runs": [str(run.path) for run in runs]}
    doc.results = [_row(run, settings, number) for number, run in enumerate(runs)]
    fingerprints = {run.summary.get("fingerprint") for run in runs}
    known = [row for row in doc.results if row["accuracy"] is not None]
    best = max(known, key=lambda row: row["accuracy"]) if known else None
    doc.summary = {
        "runs": len(runs),
        "differing": list(settings),
        "same_data": None if None in fingerprints else len(fingerprints) == 1,
        "same_machine": _same_machine(runs),
        "best_run": best["run"] if best else None,
        "best_accuracy": best["accuracy"] if best else None,
    }
    doc.tables = tables(runs)
    _caution(runs, doc)


def tables(runs: Sequence[Run]) -> list[tuple[str, list[Row]]]:
    """Captions and tables with a column a run: the settings that differ, the figures, the machines."""
    names = short_paths([run.path for run in runs])
    settings = differing([run.config for run in runs])
    rows = [_row(run, settings, number) for number, run in enumerate(runs)]

    def table(first: str, keys: Sequence[str]) -> list[Row]:
        lines = [{first: key} | {name: row[key] for name, row in zip(names, rows, strict=True)} for key in keys]
        return [line for line in lines if any(value is not None for key, value in line.items() if key != first)]

    same = {"setting": "(none: the recipes are the same)"} | dict.fromkeys(names, "")
    machine = [key for key in MACHINE if len({str(row[key]) for row in rows}) > 1]
    found = [
        ("What differs in the recipes:", table("setting", list(settings)) or [same]),
        ("What they reached, on held-out data:", table("figure", ["status", *FINAL])),
    ]
    return [*found, ("What they ran on, where that differs:", table("machine", machine))] if machine else found


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted keys that are not the same in all recipes, with the value of each; a key that is not there is None.

    A mixer's own options are no difference of their own where another run has another mixer.

    >>> differing([{"train": {"lr": 1, "steps": 5}}, {"train": {"lr": 2, "steps": 5}}])
    {'train.lr': [1, 2]}
    """
    flat = [dict(flatten(config)) for config in configs]
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key) for settings in flat]
        if key.startswith("model.options."):
            with_it = [settings[key] for settings in flat if key in settings]
            if len({json.dumps(value) for value in with_it}) == 1:
                continue
        if key == "model.name":
            values = [None if value is None else short_name(str(value)) for value in values]
        if len({json.dumps(value, default=str) for value in values}) > 1:
            found[key] = values
    return found


def short_paths(paths: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as tell them apart.

    >>> short_paths([Path("runs/a"), Path("runs/b")]), short_paths([Path("x/a"), Path("y/a")])
    (['a', 'b'], ['x/a', 'y/a'])
    """
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _row(run: Run, settings: Mapping[str, Sequence[Any]], number: int) -> Row:
    summary, env = run.summary, run.env
    return {
        "run": str(run.path),
        "status": run.status,
        "model": run.model,
        "task": run.config["task"]["name"],
        **{key: values[number] for key, values in settings.items()},
        **{key: summary.get(key) for key in FINAL},
        "fingerprint": summary.get("fingerprint"),
        **{key: env.get(key) for key in MACHINE},
    }


def _same_machine(runs: Sequence[Run]) -> bool | None:
    machines = [tuple(run.env.get(key) for key in ("device", "device_name", "threads")) for run in runs]
    return None if any(name is None for _, name, _ in machines) else len(set(machines)) == 1


def _caution(runs: Sequence[Run], doc: Document) -> None:
    """Say where figures that stand side by side do not compare."""
    if doc.summary["same_data"] is False:
        doc.warn("the runs answer different data: their accuracies are not of one task")
    if doc.summary["same_machine"] is False:
        doc.warn("the runs are of different machines: their times do not compare")
    for run in runs:
        if run.status == "unfinished":
            doc.warn(f"{run.path} is not finished, so it has no final figures; {resume_command(run.path)}")
        elif run.status == "running":
            doc.warn(f"{run.path} is still running; its figures are those of the last line of {METRICS}")
