"""What a sweep found, in tables: the best learning rate chosen on validation data, reported on held-out data.

A group is all cells that differ in learning rate and seed only. Of its rates the one with the highest mean
validation accuracy over the seeds is taken (a diverged run counts as 0; the rates that have most seeds are
compared), and its accuracy on held-out data is what the tables show: mean, least and largest over the seeds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from linattn_cli.capacity import IMMATERIAL, flatten
from linattn_cli.capacity_store import DONE
from linattn_cli.render import cell as shown

Row = dict[str, Any]

NAMED = {"task.n_pairs": "n_pairs", "model.d_head": "d_head", "task.seq_len": "seq_len"}
"""Settings with a column of their own in every row."""

ACROSS = ("n_pairs", "updates", "seq_len", "d_head")
"""What the columns of the small table may be: the first of these that varies."""

_WITHIN = {"train.lr", "seed", "model.name"}


def result_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of the JSON and CSV output: place, further settings that vary, then what was reached."""
    further = further_settings(rows)
    hidden = {"config", "mixer", "d_model", "heads", "layers", "short_conv", "vocab_size", "updates", "threads", "task"}
    first = ("model", "n_pairs", "d_head", "seq_len")
    found = []
    for row in rows:
        extra = {name: values[row["key"]] for name, values in further.items()}
        head = {name: row[name] for name in first} | extra | {name: row[name] for name in ("lr", "seed", "accuracy")}
        tail = {name: value for name, value in row.items() if name not in head and name not in hidden}
        found.append(head | tail)
    return found


def further_settings(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Settings that vary over the cells and are neither named already nor decided by the model.

    By name: the value of each cell, by its key.
    """
    flat = {row["key"]: dict(flatten(json.loads(row["config"]))) for row in rows}
    owners = {name: {row["key"]: row[name] for row in rows} for name in ("model", "task")}
    found: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for settings in flat.values() for key in settings):
        if key in NAMED or key in IMMATERIAL or key in _WITHIN or key.startswith("model.options."):
            continue
        values = {cell: settings.get(key) for cell, settings in flat.items()}
        task = key == "task.name"
        if not any(_decided_by(owners[name], values) for name in owners if not (task and name == "task")):
            short = "task" if task else key.rpartition(".")[2]
            found[short if short not in found else key] = values
    return found


def _decided_by(owner: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether equal owners always have equal values."""
    seen: dict[Any, Any] = {}
    return all(seen.setdefault(owner[key], value) == value for key, value in values.items())


def machines(rows: Sequence[Row]) -> Row:
    """What the cells that are over ran on; what differs between them is joined."""
    found = {name: dict.fromkeys(row[name] for row in rows if row[name]) for name in ("device", "device_name", "impl")}
    return {name: ", ".join(values) for name, values in found.items() if values}


def groups(rows: Sequence[Row]) -> list[Row]:
    """One row a group at its best learning rate, in the order of the cells."""
    return [_summarise(place, members, _best_rate(members)) for place, members in _grouped(rows)]


def groups_at(rows: Sequence[Row], lr: float) -> list[Row]:
    """One row a group at one learning rate, for groups that have it."""
    found = []
    for place, members in _grouped(rows):
        if any(row["lr"] == lr for row in members):
            found.append(_summarise(place, members, lr))
    return found


def _grouped(rows: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    further = further_settings(rows)
    members: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    places: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        place = {name: row[name] for name in ("model", "n_pairs", "d_head", "seq_len")}
        place |= {name: values[row["key"]] for name, values in further.items()}
        key = tuple(map(str, place.values()))
        places.setdefault(key, place)
        members[key].append(row)
    return [(places[key], members[key]) for key in places]


def _best_rate(members: Iterable[Row]) -> float | None:
    """The rate with the best mean on validation data; None while no cell of the group is done."""
    by_rate: dict[float, list[Row]] = defaultdict(list)
    for row in members:
        if row["status"] in DONE:
            by_rate[row["lr"]].append(row)
    if not by_rate:
        return None
    most = max(map(len, by_rate.values()))
    return max(
        (rate for rate, done in by_rate.items() if len(done) == most),
        key=lambda rate: (_mean(_validation(by_rate[rate])), -_mean(_loss(by_rate[rate])), -rate),
    )


def _validation(done: Iterable[Row]) -> list[float]:
    return [row["validation_accuracy"] or 0.0 for row in done]


def _loss(done: Iterable[Row]) -> list[float]:
    return [float("inf") if row["validation_loss"] is None else row["validation_loss"] for row in done]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _summarise(place: Row, members: Sequence[Row], lr: float | None) -> Row:
    mine = [row for row in members if row["lr"] == lr]
    done = [row for row in mine if row["status"] == "finished"]

    def over(name: str, fold: Callable[[Sequence[Any]], Any]) -> Any:
        values = [row[name] for row in done if row[name] is not None]
        return fold(values) if values else None

    return {
        **place,
        "lr": lr,
        "lrs": len({row["lr"] for row in members}),
        "seeds": len(done),
        "accuracy_mean": over("accuracy", _mean),
        "accuracy_min": over("accuracy", min),
        "accuracy_max": over("accuracy", max),
        "exact_sequence_accuracy_mean": over("exact_sequence_accuracy", _mean),
        "validation_accuracy_mean": over("validation_accuracy", _mean),
        "chance_pairs": over("chance_pairs", max),
        "chance_vocab": over("chance_vocab", max),
        "parameters": over("parameters", max),
        "state_bytes": over("state_bytes", max),
        "steps_mean": over("steps", _mean),
        "train_s_mean": over("train_s", _mean),
        "diverged": sum(row["status"] == "diverged" for row in mine),
        "failed": sum(row["status"] == "failed" for row in members),
        "missing": sum(row["status"] == "pending" for row in members),
    }


def pivot(found: Sequence[Row]) -> tuple[str, list[Row]]:
    """The small table: models down, what varies first across; returns what the columns are, and the rows."""
    if not found:
        return ACROSS[0], []
    across = across_of(found)
    down = further_names(found, across)
    columns = sorted({row.get(across) for row in found}, key=lambda value: (value is None, value))
    table: dict[tuple[str, ...], Row] = {}
    seeds: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for row in found:
        key = tuple(str(row[name]) for name in down)
        line = {name: row[name] for name in down} | {"seeds": ""} | dict.fromkeys(map(str, columns))
        table.setdefault(key, line)[str(row.get(across))] = _entry(row)
        seeds[key].add(row["seeds"])
    for key, line in table.items():
        line["seeds"] = ", ".join(map(str, sorted(seeds[key])))
    return across, list(table.values())


def across_of(found: Sequence[Row]) -> str:
    """What the columns of the small table, and the horizontal axis of the plot, stand for."""
    varying = [name for name in ACROSS if len({str(row.get(name)) for row in found}) > 1]
    return varying[0] if varying else ACROSS[0] if found and found[0].get(ACROSS[0]) else "seq_len"


def further_names(found: Sequence[Row], across: str) -> list[str]:
    """`model`, and the settings that vary without being decided by what is across or named before."""
    names = ["model"]
    # The length last: a task mostly decides it by the other settings, and it would hide them.
    for name in sorted(found[0] if found else (), key=lambda name: name == "seq_len"):
        if name in ("model", across, *MEASURES):
            continue
        values = {str(index): str(row.get(name)) for index, row in enumerate(found)}
        # Not by the model: it must not hide that two models were compared at different sizes.
        known = {
            str(index): tuple(str(row.get(other)) for other in (across, *names[1:])) for index, row in enumerate(found)
        }
        if not _decided_by(known, values):
            names.append(name)
    return names


MEASURES = frozenset(_summarise({}, [], None))
"""Columns of a group that are no part of its place."""


def _entry(row: Row) -> str | None:
    """`mean [least, largest]`, the brackets only where there are several seeds."""
    mean = row["accuracy_mean"]
    if mean is None:
        return "diverged" if row["diverged"] else "failed" if row["failed"] else None
    text = _figure(mean)
    if row["seeds"] > 1:
        text += f" [{_figure(row['accuracy_min'])}, {_figure(row['accuracy_max'])}]"
    return text + (f" ({row['diverged']} diverged)" if row["diverged"] else "")


def _figure(accuracy: float) -> str:
    """Four decimals, but never 1 for what is only nearly 1."""
    text = f"{accuracy:.4f}"
    return shown(accuracy) if text == "1.0000" and accuracy < 1 else text


def detail(found: Sequence[Row]) -> list[Row]:
    """The long table, without what has nothing to say here."""
    quiet = {"lrs", "exact_sequence_accuracy_mean"}
    for name in ("n_pairs", "seq_len", "chance_pairs", "diverged", "failed", "missing"):
        if not any(row.get(name) for row in found):
            quiet.add(name)
    if not any(row["seeds"] > 1 for row in found):
        quiet |= {"accuracy_min", "accuracy_max"}
    return [{name: value for name, value in row.items() if name not in quiet} for row in found]
