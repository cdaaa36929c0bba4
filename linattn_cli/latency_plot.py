"""The plot of `linattn latency`: time over length in log-log, the crossovers marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from linattn_cli import plotting
from linattn_cli.plotting import Panel, Picture

Row = dict[str, Any]


def picture(
    config: Mapping[str, Any], env: Mapping[str, Any], rows: Sequence[Row], crossovers: Mapping[str, int | None]
) -> Picture:
    """Draw medians with their 10 % to 90 % range, and a star where an arm meets softmax.

    crossovers  tokens by arm (`vla chunk`); None where there is none
    """
    settings = {name: config.get(name) for name in ("mode", "batch", "heads", "d_head", "repetitions")}
    # env names every implementation at once; here each line has its own.
    where = {name: value for name, value in env.items() if name not in ("impl", "seed")}
    what = {"forward": "Forward", "train": "Forward and backward", "decode": "Decoding one token"}
    replayed = " as a CUDA graph" if config.get("cuda_graph") else ""
    return Picture(
        title=f"{what.get(config['mode'], config['mode'])}{replayed}: time over length",
        caption=plotting.caption(settings, where) + " · band: 10 % to 90 % of the repetitions",
        panels=[Panel("Milliseconds over tokens", lambda axes: _draw(axes, rows, crossovers, config))],
    )


def _draw(axes: Any, rows: Sequence[Row], crossovers: Mapping[str, int | None], config: Mapping[str, Any]) -> None:
    curves = _curves(rows)
    looks = plotting.looks(curves)
    for name, points in curves.items():
        lengths = [row["seq_len"] for row in points]
        low, middle, high = ([row[f"latency_ms_p{p}"] for row in points] for p in (10, 50, 90))
        axes.plot(lengths, middle, label=name, **looks[name])
        axes.fill_between(lengths, low, high, alpha=0.12, color=looks[name]["color"], linewidth=0)
    _mark(axes, curves, looks, crossovers)
    # The lengths of bisections are between those asked for, and need no tick.
    timed = {row["seq_len"] for points in curves.values() for row in points}
    asked = [tokens for tokens in config["seq_lens"] if tokens in timed]
    if asked:
        plotting.log_axis(axes.yaxis)
        plotting.power_ticks(axes.xaxis, asked)
    axes.set_xlabel("context (tokens)" if config["mode"] == "decode" else "sequence length (tokens)")
    axes.set_ylabel("ms a token, median" if config["mode"] == "decode" else "ms a call, median")


def _mark(
    axes: Any,
    curves: Mapping[str, list[Row]],
    looks: Mapping[str, plotting.Look],
    crossovers: Mapping[str, int | None],
) -> None:
    softmax = next((name for name in curves if name.startswith("softmax")), None)
    marked = {name: tokens for name, tokens in crossovers.items() if tokens is not None and name in curves}
    if marked:
        style = {"marker": "*", "markersize": 11, "color": "white", "markeredgecolor": "black", "linestyle": "none"}
        axes.plot([], [], label="where it meets softmax", **style)
    for number, (name, tokens) in enumerate(sorted(marked.items(), key=lambda pair: pair[1])):
        assert softmax is not None
        height = _at(curves[softmax], tokens)
        colour = looks[name]["color"]
        style = {"marker": "*", "markersize": 13, "color": colour, "markeredgecolor": "black", "zorder": 5}
        axes.plot([tokens], [height], linestyle="none", **style)
        # Turns about, so that the figures of neighbours do not meet.
        below = number % 2 == 0
        axes.annotate(
            f"{tokens}",
            (tokens, height),
            textcoords="offset points",
            xytext=(7, -12) if below else (-7, 7),
            ha="left" if below else "right",
            fontsize=8,
            color=colour,
            bbox=plotting.ON_LINES,
        )


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each arm in order of length, one a length; the bisections may have timed softmax twice at one."""
    curves: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["latency_ms_p50"] is not None:
            curves.setdefault(f"{row['model']} {row['impl']}", {}).setdefault(row["seq_len"], row)
    return {name: [points[length] for length in sorted(points)] for name, points in curves.items()}


def _at(points: Sequence[Row], tokens: int) -> float:
    """The height of a curve at a length, along the straight lines that the plot draws in log-log."""
    import numpy as np

    lengths, heights = (np.log([row[key] for row in points]) for key in ("seq_len", "latency_ms_p50"))
    return float(np.exp(np.interp(np.log(tokens), lengths, heights)))
