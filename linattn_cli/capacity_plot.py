"""The plot of `linattn capacity-sweep`: accuracy against the number of pairs, and against the size of the state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from linattn_cli import plotting
from linattn_cli.capacity_report import across_of, further_names
from linattn_cli.plotting import GREY, Look, Panel, Picture
from linattn_cli.train_plot import task_of

Row = dict[str, Any]

_LABELS = {
    "n_pairs": "key-value pairs (n_pairs)",
    "updates": "keys assigned again (updates)",
    "seq_len": "seq_len (tokens)",
    "d_head": "dimension of a head (d_head)",
}


def picture(config: Mapping[str, Any], env: Mapping[str, Any], found: Sequence[Row]) -> Picture:
    """Draw the groups of `capacity_report.groups`: means as lines, the range over seeds as a band.

    The left panel is over n_pairs, or over what else varies first where that does not.
    """
    rows = [row for row in found if row["accuracy_mean"] is not None]
    across = across_of(rows)
    lines = _lines(rows, across)
    looks = plotting.looks(lines)
    task, train = config["task"], config["train"]
    varied = {name for name in ("n_pairs", "seq_len", "updates") if len({row.get(name) for row in rows}) > 1}
    seeds = sorted({row["seeds"] for row in rows})
    settings = {
        "vocab_size": task.get("vocab_size"),
        "d_model": config["model"].get("d_model"),
        "layers": config["model"].get("layers"),
        "steps at most": train.get("steps"),
        "target accuracy": train.get("target_accuracy"),
        "batch size": train.get("batch_size"),
        "seeds a point": seeds if len(seeds) > 1 else (seeds or [None])[0],
        "rates tried": max((row["lrs"] for row in rows), default=None),
        "band": "least to largest over seeds" if any(count > 1 for count in seeds) else None,
    }
    fixed = {name: value for name, value in task.items() if name not in varied}
    rates = {row["lr"] for row in rows}
    tried = max((row["lrs"] for row in rows), default=1) > 1
    at = (
        "at the best learning rate, chosen on validation data"
        if tried
        else f"at lr {'/'.join(map(str, sorted(rates)))}"
    )
    title = f"Accuracy on {task_of({'task': fixed})} {at}"
    return Picture(
        title=title,
        caption=plotting.caption(settings, env),
        panels=[
            Panel(f"By {across}", lambda axes: _draw_across(axes, lines, looks, across, rows)),
            Panel(f"By size of the state (figures: {across})", lambda axes: _draw_state(axes, lines, looks, across)),
        ],
    )


def _draw_across(
    axes: Any, lines: Mapping[str, list[Row]], looks: Mapping[str, Look], across: str, rows: Sequence[Row]
) -> None:
    for name, line in lines.items():
        places = [row[across] or 0 for row in line]
        means, low, high = ([row[f"accuracy_{which}"] for row in line] for which in ("mean", "min", "max"))
        axes.plot(places, means, label=name, **looks[name])
        axes.fill_between(places, low, high, alpha=0.15, color=looks[name]["color"], linewidth=0)
    chances = {row[across]: row["chance_pairs"] for row in rows if row["chance_pairs"] is not None}
    if across == "n_pairs" and len(chances) > 1:
        places = sorted(chances)
        style: Look = {"color": GREY, "linestyle": plotting.DASHES[1], "linewidth": 1.0}
        axes.plot(places, [chances[n] for n in places], label="chance, 1/n_pairs", **style)
    _scale(axes, [row[across] for row in rows if row[across]])
    axes.set_xlabel(_LABELS[across])
    axes.set_ylabel("held-out accuracy")


def _draw_state(axes: Any, lines: Mapping[str, list[Row]], looks: Mapping[str, Look], across: str) -> None:
    points: list[tuple[float, float, Any, str]] = []
    for name, line in lines.items():
        with_state = [row for row in line if row["state_bytes"]]
        if not with_state:
            continue
        sizes = [row["state_bytes"] for row in with_state]
        means = [row["accuracy_mean"] for row in with_state]
        spread = [
            [row["accuracy_mean"] - row["accuracy_min"] for row in with_state],
            [row["accuracy_max"] - row["accuracy_mean"] for row in with_state],
        ]
        thin = looks[name] | {"linewidth": 0.7}
        axes.errorbar(sizes, means, yerr=spread, capsize=2, **thin)
        colour = looks[name]["color"]
        points += [(size, mean, row[across], colour) for size, mean, row in zip(sizes, means, with_state, strict=True)]
    if points:
        _annotate(axes, points)
    sizes = sorted({row["state_bytes"] for line in lines.values() for row in line if row["state_bytes"]})
    _scale(axes, sizes, bytes_=True)
    axes.set_xlabel("state of a sequence, measured (KiB)")
    axes.set_ylabel("held-out accuracy")


def _annotate(axes: Any, points: Sequence[tuple[float, float, Any, str]]) -> None:
    """Name points (size, accuracy, place, colour) by their place, to the right or left of them where that is free."""
    lowest, highest = (math.log(fold(size for size, *_ in points)) for fold in (min, max))
    width = max(highest - lowest, 0.1)
    spots = [((math.log(size) - lowest) / width, mean, place, colour) for size, mean, place, colour in points]
    taken = [(x, y) for x, y, _, _ in spots]
    for (x, y, place, colour), (size, mean, *_) in zip(spots, points, strict=True):
        for side in (1, -1):
            label = x + 0.035 * side, y
            if all(abs(label[0] - other) > 0.026 or abs(y - height) > 0.04 for other, height in taken):
                taken.append(label)
                how = {"xytext": (6 * side, 0), "ha": "left" if side > 0 else "right", "va": "center"}
                axes.annotate(f"{place}", (size, mean), textcoords="offset points", fontsize=7, color=colour, **how)
                break


def _scale(axes: Any, ticks: Sequence[float], *, bytes_: bool = False) -> None:
    """Logarithmic to base 2 where that is possible, with the sizes that were run as ticks."""
    if ticks and all(tick > 0 for tick in ticks):
        plotting.power_ticks(axes.xaxis, ticks)
        if bytes_:
            shown = axes.get_xticks()
            axes.set_xticks(shown, [f"{size / 1024:.3g}" for size in shown])
        if len(set(ticks)) == 1:
            axes.set_xlim(ticks[0] / 2, ticks[0] * 2)
    plotting.accuracy_axis(axes)


def _lines(rows: Sequence[Row], across: str) -> dict[str, list[Row]]:
    """Rows by what their line is called: the model, and any setting that varies beside the horizontal one."""
    names = [name for name in further_names(rows, across) if name != "model"]
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lines[", ".join([row["model"], *(f"{name} {row[name]}" for name in names)])].append(row)
    return {name: sorted(line, key=lambda row: row[across] or 0) for name, line in lines.items()}
