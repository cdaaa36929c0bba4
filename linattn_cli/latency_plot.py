"""The plot of `linattn latency`: time over length in log-log, the crossovers marked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linattn_cli.crossover import Crossover
from linattn_cli.output import CliError

SUFFIXES = (".png", ".svg")


def check_plot_path(path: Path) -> None:
    """Raise before anything is timed where a plot could not be saved; `CliError` names the remedy."""
    if path.suffix.lower() not in SUFFIXES:
        raise CliError(f"--plot must end in .png or .svg, got {path.name!r}", hint="--plot latency.png")
    if path.is_dir():
        raise CliError(f"--plot {path} is a folder", hint="give the name of a file")
    if not path.parent.is_dir():
        raise CliError(f"--plot: there is no folder {path.parent}", hint=f"mkdir -p {path.parent}", kind="file")


def save_plot(path: Path, rows: list[dict[str, Any]], crossovers: Mapping[str, Crossover], *, title: str) -> None:
    """Draw the medians with their 10 % to 90 % range, and a mark where an arm meets softmax."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    curves = _curves(rows)
    lines = {}
    for name, points in curves.items():
        lengths = [row["seq_len"] for row in points]
        low, middle, high = ([row[f"latency_ms_p{p}"] for row in points] for p in (10, 50, 90))
        softmax = name.startswith("softmax")
        style: dict[str, Any] = {"color": "black", "linewidth": 2.2} if softmax else {}
        (lines[name],) = axes.plot(lengths, middle, marker="o", markersize=4, label=name, **style)
        axes.fill_between(lengths, low, high, alpha=0.15, color=lines[name].get_color(), linewidth=0)
    softmax_name = next((name for name in curves if name.startswith("softmax")), None)
    for name, found in crossovers.items():
        if found.tokens is None or name not in lines or softmax_name is None:
            continue
        height = _at(curves[softmax_name], found.tokens)
        colour = lines[name].get_color()
        axes.plot([found.tokens], [height], marker="*", markersize=15, color=colour, markeredgecolor="black", zorder=5)
        axes.annotate(
            f"{found.tokens}", (found.tokens, height), textcoords="offset points", xytext=(6, -14), fontsize=9
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms, median (band: 10 % to 90 %)")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.25)
    if lines:
        axes.legend(fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _curves(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each arm in order of length, one a length; the bisections may have timed softmax twice at one."""
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["latency_ms_p50"] is not None:
            curves.setdefault(f"{row['model']} {row['impl']}", {}).setdefault(row["seq_len"], row)
    return {name: [points[length] for length in sorted(points)] for name, points in curves.items()}


def _at(points: list[dict[str, Any]], tokens: int) -> float:
    """The height of a curve at a length, along the straight lines that the plot draws in log-log."""
    import numpy as np

    lengths, heights = (np.log([row[key] for row in points]) for key in ("seq_len", "latency_ms_p50"))
    return float(np.exp(np.interp(np.log(tokens), lengths, heights)))
