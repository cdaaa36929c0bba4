"""The plot of `linattn eval`: accuracy by size, and by the distance between a key and its query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from linattn_cli import plotting
from linattn_cli.own_mixer import short_name
from linattn_cli.plotting import GREY, Look, Panel, Picture, present
from linattn_cli.train_plot import settings_of, task_of

Row = dict[str, Any]


def picture(config: Mapping[str, Any], env: Mapping[str, Any], rows: Sequence[Row]) -> Picture:
    """Draw the rows of `eval`; hollow markers are sequences longer than in training.

    Panels: accuracy and exact sequences over n_pairs (over seq_len where that alone varies), and accuracy over
    distance, a line a size.
    """
    whole = [row for row in rows if row["distance"] == "all"]
    across = "n_pairs" if len({row.get("n_pairs") for row in whole}) > 1 or "n_pairs" in whole[0] else "seq_len"
    if across == "n_pairs" and len({row["n_pairs"] for row in whole}) == 1 < len({row["seq_len"] for row in whole}):
        across = "seq_len"
    step = whole[0].get("step")
    settings = settings_of(config) | {"step": step, "held-out sequences a point": whole[0]["sequences"]}
    trained = config["task"].get(across)
    return Picture(
        title=f"{short_name(config['model']['name'])} trained on {task_of(config)}, on held-out sequences",
        caption=plotting.caption(settings, env),
        panels=[
            Panel(f"By {_NAMES[across]}", lambda axes: _draw_sizes(axes, whole, across, trained)),
            Panel("By distance, a line a size", lambda axes: _draw_distances(axes, rows, whole)),
        ],
    )


_NAMES = {"n_pairs": "key-value pairs", "seq_len": "length"}
_LABELS = {"n_pairs": "key-value pairs in the sequence (n_pairs)", "seq_len": "seq_len (tokens)"}


def _draw_sizes(axes: Any, whole: Sequence[Row], across: str, trained: int | None) -> None:
    other = "seq_len" if across == "n_pairs" else "n_pairs"
    # Where every size has its own length there is one line; else a line for each of the lengths given.
    several = len({row[across] for row in whole}) < len(whole)
    lines: dict[Any, list[Row]] = {}
    for row in whole:
        lines.setdefault(row.get(other) if several else None, []).append(row)
    for number, (value, line) in enumerate(lines.items()):
        line = sorted(line, key=lambda row: row[across])
        suffix = f", {other} {value}" if value is not None else ""
        # Colours stand for sizes in the other panel.
        style = plotting.look(number) | ({} if several else {"color": plotting.BLACK})
        _plot(axes, line, across, "accuracy", f"answers{suffix}", style)
        exact = style | {"linestyle": plotting.DASHES[2]}
        _plot(axes, line, across, "exact_sequence_accuracy", f"whole sequences{suffix}", exact)
    places = sorted({row[across] for row in whole})
    chances = {row[across]: row["chance_pairs"] for row in whole if row["chance_pairs"] is not None}
    if chances and (across == "n_pairs" or len(set(chances.values())) == 1):
        wide = places if len(places) > 1 else [places[0] / 1.3, places[0] * 1.3]
        heights = [chances[place] for place in places] if len(places) > 1 else [chances[places[0]]] * 2
        axes.plot(wide, heights, color=GREY, linestyle=plotting.DASHES[1], linewidth=1.0, label="chance, 1/n_pairs")
    if trained in places and len(places) > 1:
        axes.axvline(trained, color=GREY, linewidth=5, alpha=0.2, zorder=0, label="size it was trained on")
    if any(row["beyond_training"] for row in whole):
        hollow = {"marker": "o", "markerfacecolor": "white", "color": plotting.BLACK, "linestyle": "none"}
        axes.plot([], [], label="hollow: sequences longer than in training", **hollow)
    plotting.power_ticks(axes.xaxis, places)
    plotting.accuracy_axis(axes)
    axes.set_xlabel(_LABELS[across])
    axes.set_ylabel("accuracy")


def _plot(axes: Any, line: Sequence[Row], across: str, key: str, label: str, style: Look) -> None:
    points = present((row[across], row[key]) for row in line)
    axes.plot(*zip(*points, strict=True), label=label, **style)
    beyond = [(row[across], row[key]) for row in line if row["beyond_training"]]
    if beyond:
        hollow = style | {"linestyle": "none", "markerfacecolor": "white", "zorder": 3}
        axes.plot(*zip(*beyond, strict=True), **hollow)


def _draw_distances(axes: Any, rows: Sequence[Row], whole: Sequence[Row]) -> None:
    keys = [key for key in ("n_pairs", "seq_len", "updates") if len({row.get(key) for row in whole}) > 1]
    # n_pairs alone names a size whose length follows from it.
    if len({row.get("n_pairs") for row in whole}) == len(whole):
        keys = ["n_pairs"]
    sizes = [tuple(row.get(key) for key in ("n_pairs", "seq_len", "updates")) for row in whole]
    ends: list[int] = []
    for number, (size, head) in enumerate(zip(sizes, whole, strict=True)):
        mine = [row for row in rows if tuple(row.get(key) for key in ("n_pairs", "seq_len", "updates")) == size]
        ranges = [(_ends(row["distance"]), row) for row in mine if row["distance"] != "all"]
        ends += [low for (low, _), _ in ranges]
        name = ", ".join(f"{key} {head.get(key)}" for key in keys) or "answers"
        points = [((low * high) ** 0.5, row["accuracy"]) for (low, high), row in ranges]
        style = plotting.look(number) | ({"markerfacecolor": "white"} if head["beyond_training"] else {})
        axes.plot(*zip(*points, strict=True), label=name, **style)
    plotting.power_ticks(axes.xaxis, ends)
    axes.set_xlim(min(ends) / 1.1, max(ends) * 2.2)
    plotting.accuracy_axis(axes)
    axes.set_xlabel("tokens back to what had to be recalled (ranges of a doubling)")
    axes.set_ylabel("accuracy")


def _ends(distance: str) -> tuple[int, int]:
    low, _, high = distance.partition("-")
    return int(low), int(high or low)
