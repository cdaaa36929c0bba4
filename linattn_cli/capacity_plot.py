"""The plot of `linattn capacity-sweep`: accuracy against the number of pairs, and against the size of the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
    lines = _lines(rows, across)
    colours = _colours(lines)
    for name, line in lines.items():
        line.sort(key=lambda row: row[across] or 0)
        colour, dashes = colours[name]
        places = [row[across] or 0 for row in line]
        means, low, high = ([row[f"accuracy_{which}"] for row in line] for which in ("mean", "min", "max"))
        left.plot(places, means, marker="o", markersize=4, label=name, color=colour, linestyle=dashes)
        left.fill_between(places, low, high, alpha=0.15, color=colour, linewidth=0)
        spread = [[mean - end for mean, end in zip(means, low, strict=True)]]
        spread.append([end - mean for mean, end in zip(means, high, strict=True)])
        sizes = [row["state_bytes"] for row in line]
        right.errorbar(
            sizes,
            means,
            yerr=spread,
            marker="o",
            markersize=5,
            color=colour,
            linestyle=dashes,
            linewidth=0.6,
            capsize=2,
        )
        for size, mean, place in zip(sizes, means, places, strict=True):
            right.annotate(
                str(place), (size, mean), textcoords="offset points", xytext=(4, 3), fontsize=6, color=colour
            )
    _draw_chance(left, rows, across)
    left.set_xlabel(across)
    left.set_ylabel("held-out accuracy (band: least to largest over seeds)")
    right.set_xlabel(f"bytes of state, measured (the number at a point is {across})")
    _scale(left, sorted({row[across] for row in rows if row[across]}))
    _scale(right, [])
    if lines:
        left.legend(fontsize=8)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _colours(lines: Iterable[str]) -> dict[str, tuple[Any, str]]:
    """Colour by model, black for softmax; dashes tell the other settings of one model apart."""
    import itertools

    from matplotlib import color_sequences

    palette = itertools.cycle(color_sequences["tab10"])
    dashes = ("-", "--", ":", "-.")
    colours: dict[str, Any] = {"softmax": "black"}
    seen: dict[str, int] = defaultdict(int)
    found = {}
    for name in lines:
        model = name.partition(", ")[0]
        if model not in colours:
            colours[model] = next(palette)
        found[name] = colours[model], dashes[seen[model] % len(dashes)]
        seen[model] += 1
    return found


def _scale(axes: Any, ticks: Sequence[float]) -> None:
    """Logarithmic to base 2 where that is possible, with the sizes that were run as ticks."""
    if all(value > 0 for line in axes.get_lines() for value in line.get_xdata()):
        axes.set_xscale("log", base=2)
    if ticks:
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    axes.grid(True, alpha=0.25)


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
