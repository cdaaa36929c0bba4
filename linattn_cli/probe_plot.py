"""The plot of `linattn probe-norm`: states, Jacobians, products and gradients over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from linattn_cli import plotting
from linattn_cli.plotting import DASHES, GREY, Panel, Picture, present

Row = dict[str, Any]


def picture(config: Mapping[str, Any], env: Mapping[str, Any], rows: Sequence[Row], summary: Row) -> Picture:
    """Draw the `series` of rows, one look a subject, and what is not normalised where `summary` has it.

    Panels: norms of states (tensors beyond the first dashed or dotted), of the Jacobian of a step, of products of
    Jacobians, and of gradients of the output with respect to earlier states.
    """
    shown = [row for row in rows if "series" in row and "jacobian_norm" in row["series"]]
    names = [_name(row, rows) for row in shown]
    looks = plotting.looks(names)
    series = [(name, row["series"]) for name, row in zip(names, shown, strict=True)]
    source = config["source"]
    settings = {
        "source": source,
        "seq_len": config.get("seq_len"),
        "heads": config.get("heads"),
        "d_head": config.get("d_head"),
        "seeds": config.get("seeds"),
    }
    raw = summary.get("unnormalised_log10_by_step")
    return Picture(
        title="States and their Jacobians over time",
        caption=plotting.caption(settings, env),
        panels=[
            Panel("Frobenius norm of the state", lambda axes: _draw_states(axes, series, looks)),
            Panel("Spectral norm of the Jacobian of a step", lambda axes: _draw_norms(axes, series, looks)),
            Panel("Product of n Jacobians", lambda axes: _draw_products(axes, series, looks, raw)),
            Panel("Gradient of the last output", lambda axes: _draw_gradients(axes, series, looks)),
        ],
    )


def _draw_states(axes: Any, series: Sequence[tuple[str, Row]], looks: Mapping[str, plotting.Look]) -> None:
    for name, found in series:
        tensors = [tensor for tensor in found.get("state_norm", {}) if tensor[0].isupper()]
        for number, tensor in enumerate(tensors):
            points = present(zip(found["steps"], found["state_norm"][tensor], strict=True))
            style = plotting.line_only(looks[name])
            style["linestyle"] = looks[name]["linestyle"] if number == 0 else DASHES[number % len(DASHES)]
            if points:
                axes.plot(*zip(*points, strict=True), **style)
                if len(tensors) > 1:
                    x, y = points[-1]
                    axes.annotate(
                        tensor,
                        (x, y),
                        textcoords="offset points",
                        xytext=(3, 0),
                        fontsize=7,
                        va="center",
                        color=style["color"],
                    )
    _time(axes, "tokens read", "norm, mean over heads")


def _draw_norms(axes: Any, series: Sequence[tuple[str, Row]], looks: Mapping[str, plotting.Look]) -> None:
    for name, found in series:
        points = present(zip(found["jacobian_steps"], found["jacobian_norm"], strict=True))
        if points:
            every = max(1, len(points) // 8)
            axes.plot(*zip(*points, strict=True), label=name, markevery=every, **looks[name] | {"linewidth": 1.0})
    axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle=DASHES[1])
    _time(axes, "step t (tokens)", "largest over heads")
    plotting.log_axis(axes.yaxis)


def _draw_products(
    axes: Any, series: Sequence[tuple[str, Row]], looks: Mapping[str, plotting.Look], raw: Row | None
) -> None:
    for name, found in series:
        points = present(zip(found["product_steps"], found["product_norm_log10"], strict=True))
        if points:
            axes.plot(*zip(*points, strict=True), **looks[name])
    for key, label, dashes in (("repeated_key", "one raw key", "-"), ("random_keys", "random raw keys", DASHES[2])):
        if raw is not None:
            points = present(enumerate(raw[key], start=1))
            style = {"color": plotting.BLACK, "linestyle": dashes, "label": f"vla not normalised, {label}"}
            axes.plot(*zip(*points, strict=True), **style)
    axes.set_xscale("log")
    axes.set_xlabel("n (tokens)")
    axes.set_ylabel("log10 of the spectral norm")


def _draw_gradients(axes: Any, series: Sequence[tuple[str, Row]], looks: Mapping[str, plotting.Look]) -> None:
    for name, found in series:
        points = present(zip(found.get("gradient_steps", ()), found.get("gradient_norm", ()), strict=True))
        points = [(x, y) for x, y in points if y > 0]
        if points:
            axes.plot(*zip(*points, strict=True), **looks[name])
    _time(axes, "n (tokens)", "d(output at T) / d(state n before its end)")


def _time(axes: Any, along: str, label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(along)
    axes.set_ylabel(label)


def _name(row: Row, rows: Sequence[Row]) -> str:
    """The model, and layer, run and seed where those tell subjects apart."""
    words = [row["model"]]
    words += [f"layer {row['layer']}"] if row["layer"] is not None else []
    words += [row["source"]] if len({other["source"] for other in rows}) > 1 else []
    words += [f"seed {row['seed']}"] if len({other["seed"] for other in rows}) > 1 else []
    return " ".join(words)
