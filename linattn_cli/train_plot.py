"""The plot of `linattn train`: loss and accuracy over the steps of a run, with what it ended at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from linattn_cli import plotting
from linattn_cli.own_mixer import short_name
from linattn_cli.plotting import GREY, Panel, Picture, present
from linattn_cli.render import cell

Row = dict[str, Any]


def picture(
    config: Mapping[str, Any], env: Mapping[str, Any], metrics: Sequence[Row], summary: Mapping[str, Any]
) -> Picture:
    """Draw the lines of `metrics.jsonl`; `summary` may be empty, where the run did not get to its end.

    Panels: loss (natural log, training and validation) and accuracy, beside both levels of chance.
    """
    return Picture(
        title=f"{short_name(config['model']['name'])} on {task_of(config)}",
        caption=plotting.caption(settings_of(config), env),
        panels=[
            Panel("Loss", lambda axes: _draw_loss(axes, metrics)),
            Panel("Accuracy", lambda axes: _draw_accuracy(axes, metrics, summary)),
        ],
    )


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a caption says of a resolved recipe."""
    model, task, train = config["model"], config["task"], config["train"]
    return {
        "model": short_name(model["name"]),
        "options": model.get("options"),
        "layers": model.get("layers"),
        "d_model": model.get("d_model"),
        "heads": model.get("heads"),
        "d_head": model.get("d_head"),
        "task": task_of(config),
        "vocab_size": task.get("vocab_size"),
        "lr": train.get("lr"),
        "batch size": train.get("batch_size"),
        "warm-up": train.get("warmup_steps"),
        "seed": config.get("seed"),
    }


def task_of(config: Mapping[str, Any]) -> str:
    """The task of a recipe in words.

    >>> task_of({"task": {"name": "mqar", "n_pairs": 8, "updates": 0, "seq_len": 25}})
    'mqar (8 pairs, 25 tokens)'
    """
    task = config["task"]
    words = [task["name"]]
    words += [f"{task['n_pairs']} pairs"] if task.get("n_pairs") else []
    words += [f"{task['updates']} updates"] if task.get("updates") else []
    words += [f"{task['seq_len']} tokens"] if task.get("seq_len") else []
    return " ".join(words[:1]) + (" (" + ", ".join(words[1:]) + ")" if words[1:] else "")


def _line(axes: Any, metrics: Sequence[Row], key: str, label: str, number: int) -> list[tuple[float, float]]:
    points = present((row["step"], row.get(key)) for row in metrics)
    if points:
        style = plotting.look(number)
        few = len(points) <= 40
        axes.plot(*zip(*points, strict=True), label=label, **(style if few else plotting.line_only(style)))
    return points


def _draw_loss(axes: Any, metrics: Sequence[Row]) -> None:
    points = _line(axes, metrics, "loss", "training batch", 0)
    points += _line(axes, metrics, "validation_loss", "validation", 1)
    heights = [loss for _, loss in points if loss > 0]
    if heights and max(heights) > 10 * min(heights):
        plotting.log_axis(axes.yaxis)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("cross entropy (nats)")


def _draw_accuracy(axes: Any, metrics: Sequence[Row], summary: Mapping[str, Any]) -> None:
    _line(axes, metrics, "accuracy", "training batch", 0)
    _line(axes, metrics, "validation_accuracy", "validation", 1)
    if summary.get("accuracy") is not None:
        reached, step = summary["accuracy"], summary["steps"]
        style = {"marker": "*", "markersize": 11, "color": plotting.BLACK, "linestyle": "none", "zorder": 5}
        axes.plot([step], [reached], label=f"held-out, at the end: {cell(reached)}", clip_on=False, **style)
    for key, name, dashes in (("chance_pairs", "1/n_pairs", plotting.DASHES[1]), ("chance_vocab", "1/vocabulary", ":")):
        if summary.get(key) is not None:
            axes.axhline(summary[key], color=GREY, linestyle=dashes, linewidth=1.0, label=f"chance, {name}")
    plotting.accuracy_axis(axes)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("share of answers that are right")


def together(runs: Sequence[tuple[Any, str]]) -> Picture:
    """Several runs in one picture, each (`side_by_side.Run`, its name): validation, or training where there is none."""
    looks = plotting.looks([f"{run.model} {name}" for run, name in runs])

    def draw(axes: Any, key: str, label: str) -> None:
        for run, name in runs:
            validated = present((row["step"], row.get(f"validation_{key}")) for row in run.metrics)
            points = validated or present((row["step"], row.get(key)) for row in run.metrics)
            if points:
                style = looks[f"{run.model} {name}"] | ({"markevery": max(1, len(points) // 12)})
                suffix = "" if validated else " (training batches)"
                axes.plot(*zip(*points, strict=True), label=f"{run.model}: {name}{suffix}", **style)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(label)

    def draw_loss(axes: Any) -> None:
        draw(axes, "loss", "cross entropy (nats)")
        heights = [value for line in axes.get_lines() for value in line.get_ydata() if value > 0]
        if heights and max(heights) > 10 * min(heights):
            plotting.log_axis(axes.yaxis)

    def draw_accuracy(axes: Any) -> None:
        draw(axes, "accuracy", "share of answers that are right")
        plotting.accuracy_axis(axes)

    caption = "on validation data; where a run had none, on its training batches"
    return Picture("Runs side by side", caption, [Panel("Loss", draw_loss), Panel("Accuracy", draw_accuracy)])
