"""The plot of `linattn verify-scan`: the error of every check as a share of its budget, by form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from linattn_cli import plotting
from linattn_cli.own_mixer import short_name
from linattn_cli.plotting import FAULT, Panel, Picture
from linattn_cli.verify_rows import share

Row = dict[str, Any]

_KINDS = {"output": "outputs", "state": "states", "gradient": "gradients"}
_NAMED = 3


def picture(config: Mapping[str, Any], env: Mapping[str, Any], rows: Sequence[Row]) -> Picture:
    """Draw every row that was judged, a panel a dtype; 1 is the budget, and what lies beyond has failed."""
    judged = [row for row in rows if row["passed"] is not None and row["form"] not in ("as printed", "corrected")]
    forms = list(dict.fromkeys(row["form"] for row in judged))
    dtypes = list(dict.fromkeys(row["dtype"] for row in judged))
    failed = sum(not row["passed"] for row in judged)
    models = [short_name(name) for name in config["models"]]
    settings = {
        "operators": models if len(models) <= 6 else len(models),
        "seq_len": config["seq_len"],
        "d_head": config["d_head"],
        "batch": config["batch"],
        "heads": config["heads"],
        "planted bug": config.get("inject"),
        "seed": config["seed"],
        "error": "largest over max|reference|, or RMS where that is nearer to its budget; ≤ the largest itself",
        "at the left edge": "no error at all" if any(share(row) == 0 for row in judged) else None,
    }
    panels = [
        Panel(
            dtype,
            partial(_draw, rows=[row for row in judged if row["dtype"] == dtype], forms=forms),
            tall=max(0.7, min(2.0, 0.11 * len(forms) + 0.25)),
        )
        for dtype in dtypes
    ]
    verdict = "all within budget" if not failed else f"{failed} beyond budget"
    return Picture(
        title=f"Every form against its serial recurrence: {len(judged)} checks, {verdict}",
        caption=plotting.caption(settings, env),
        panels=panels,
    )


def kind_of(quantity: str) -> str:
    """Whether a quantity is an output, a part of the state, or a gradient.

    >>> [kind_of(name) for name in ("o", "state.S", "grad log_decay")]
    ['output', 'state', 'gradient']
    """
    if quantity.startswith("grad"):
        return "gradient"
    return "state" if quantity.startswith("state") else "output"


def _draw(axes: Any, rows: Sequence[Row], forms: Sequence[str]) -> None:
    # An error of nothing has no place on a logarithmic axis, so it gets one.
    floor = min([share(row) for row in rows if share(row) > 0], default=0.1) / 3
    names = [form for form in forms if any(row["form"] == form for row in rows)]
    heights = {form: len(names) - 1 - number for number, form in enumerate(names)}
    for number, (kind, label) in enumerate(_KINDS.items()):
        mine = [row for row in rows if kind_of(row["quantity"]) == kind and row["passed"]]
        # Side by side within a form, so that a kind does not hide another.
        points = [(max(share(row), floor), heights[row["form"]] + 0.24 * (1 - number)) for row in mine]
        if points:
            style = plotting.look(number) | {"linestyle": "none", "markersize": 3.2, "alpha": 0.55}
            axes.plot(*zip(*points, strict=True), label=label, markeredgewidth=0, **style)
    _draw_failed(axes, [row for row in rows if not row["passed"]], heights)
    axes.axvline(1.0, color=FAULT, linewidth=1.4, linestyle=plotting.DASHES[1], label="budget")
    shares = [max(share(row), floor) for row in rows]
    # float64 keeps far from its budget, half precision near: each panel has the range of its own errors.
    axes.set_xlim(min(0.02, min(shares) / 2), max(4.0, 2 * axes.get_xlim()[1]))
    plotting.log_axis(axes.xaxis)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_yticks([heights[form] for form in names], [_row_name(form, rows) for form in names])
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.set_xlabel("error as a share of its budget")


def _draw_failed(axes: Any, rows: Sequence[Row], heights: Mapping[str, int]) -> None:
    if not rows:
        return
    largest = max([share(row) for row in rows if row["max_error"] is not None], default=10.0)
    points = [(min(share(row), 10 * largest), heights[row["form"]]) for row in rows]
    style = {"color": FAULT, "marker": "X", "markersize": 7, "linestyle": "none", "zorder": 4}
    axes.plot(*zip(*points, strict=True), label="beyond budget", **style)
    places = [(x, y, row) for (x, y), row in zip(points, rows, strict=True)]
    worst: dict[int, tuple[float, Row]] = {}
    for x, y, row in places:
        if y not in worst or x > worst[y][0]:
            worst[int(y)] = x, row
    for y, (_, row) in sorted(worst.items(), key=lambda pair: -pair[1][0])[:_NAMED]:
        left = min(x for x, other, _ in places if other == y)
        axes.annotate(
            f"{short_name(row['model'])} {row['quantity']}",
            (left, y),
            textcoords="offset points",
            xytext=(-7, 0),
            ha="right",
            va="center",
            fontsize=7,
            bbox=plotting.ON_LINES,
        )


def _row_name(form: str, rows: Sequence[Row]) -> str:
    """The form, how many checks, and the largest error itself."""
    mine = [row for row in rows if row["form"] == form]
    errors = [row["max_error"] for row in mine if row["max_error"] is not None]
    return f"{form}\n{len(mine)} check{'s' if len(mine) > 1 else ''}" + (f", ≤ {max(errors):.1e}" if errors else "")
