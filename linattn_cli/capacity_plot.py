"""The plot of `linattn capacity-sweep`: accuracy against the number of pairs, and against the size of the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linattn_cli.capacity_report import across_of, further_names

Row = dict[str, Any]


def save_plot(path: Path, found: Sequence[Row], *, title: str) -> None:
    """Draw the groups of `capacity_report.groups`: means as lines, the range over seeds as a band.

    The left panel is over n_pairs, or over what else varies first where that does not.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in found if row["accuracy_mean"] is not None]
    across = across_of(rows)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    colours: dict[str, Any] = {}
    for name, line in _lines(rows, across).items():
        line.sort(key=lambda row: row[across] or 0)
        style: dict[str, Any] = {"color": "black", "linewidth": 2.2} if line[0]["model"] == "softmax" else {}
        places = [row[across] or 0 for row in line]
        (drawn,) = left.plot(
            places, [row["accuracy_mean"] for row in line], marker="o", markersize=4, label=name, **style
        )
        colours[name] = drawn.get_color()
        low, high = ([row[f"accuracy_{end}"] for row in line] for end in ("min", "max"))
        left.fill_between(places, low, high, alpha=0.15, color=colours[name], linewidth=0)
        right.errorbar(
            [row["state_bytes"] for row in line],
            [row["accuracy_mean"] for row in line],
            yerr=[
                [row["accuracy_mean"] - row["accuracy_min"] for row in line],
                [row["accuracy_max"] - row["accuracy_mean"] for row in line],
            ],
            fmt="o",
            markersize=5,
            color=colours[name],
            capsize=2,
        )
    _draw_chance(left, rows, across)
    left.set_xlabel(across)
    left.set_ylabel("held-out accuracy (band: least to largest over seeds)")
    right.set_xlabel("bytes of state, measured")
    for axes in (left, right):
        if all(value > 0 for value in _values(axes)):
            axes.set_xscale("log", base=2)
        axes.set_ylim(-0.03, 1.03)
        axes.grid(True, alpha=0.25)
    if colours:
        left.legend(fontsize=8)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _lines(rows: Sequence[Row], across: str) -> dict[str, list[Row]]:
    """Rows by what their line is called: the model, and any setting that varies beside the horizontal one."""
    names = [name for name in further_names(rows, across) if name != "model"]
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lines[", ".join([row["model"], *(f"{name} {row[name]}" for name in names)])].append(row)
    return lines


def _draw_chance(axes: Any, rows: Sequence[Row], across: str) -> None:
    chances = {row[across]: row["chance_pairs"] for row in rows if row["chance_pairs"] is not None}
    if across == "n_pairs" and len(chances) > 1:
        places = sorted(chances)
        axes.plot(places, [chances[n] for n in places], color="grey", linestyle="--", label="chance: 1/n_pairs")


def _values(axes: Any) -> list[float]:
    return [value for line in axes.get_lines() for value in line.get_xdata()]
