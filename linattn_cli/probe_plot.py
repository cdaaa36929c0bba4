"""The plot of `linattn probe-norm`: states, Jacobians, products and gradients over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linattn_cli.probe_blowup import BlowUp
from linattn_cli.probe_measure import Measurement


def save_plot(path: Path, measurements: Sequence[Measurement], blown: BlowUp | None, *, title: str) -> None:
    """Draw four panels, one colour a subject; tensors of a state beyond the first are dashed or dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((states, norms), (products, gradients)) = pyplot.subplots(2, 2, figsize=(12, 8.5), layout="constrained")
    styles = ("-", "--", ":", "-.")
    shown = [m for m in measurements if m.jacobians is not None and m.state is not None and m.flow is not None]
    for index, m in enumerate(shown):
        assert m.jacobians is not None
        assert m.state is not None
        assert m.flow is not None
        look: dict[str, Any] = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
        for number, name in enumerate(n for n in m.state.over_time if n[0].isupper()):
            line = m.state.mean(name)
            style = look | {"linestyle": styles[number % len(styles)]}
            states.plot(range(1, len(line) + 1), line, label=f"{_name(m)} {name}", linewidth=1.2, **style)
        norms.plot(m.jacobians.steps, m.jacobians.norms.amax(1), linewidth=1.2, label=_name(m), **look)
        logs = m.jacobians.products.largest
        products.plot(list(logs), list(logs.values()), marker="o", markersize=3, label=_name(m), **look)
        flow = m.flow.norms
        gradients.plot(list(flow), list(flow.values()), marker="o", markersize=3, label=_name(m), **look)
    if blown is not None:
        count = range(1, len(blown.repeated) + 1)
        products.plot(count, blown.repeated, color="black", label="not normalised, one raw key")
        products.plot(count, blown.random, color="black", linestyle=":", label="not normalised, random raw keys")
    for axes, what, label in (
        (states, "Frobenius norm of the state", "tokens"),
        (norms, "spectral norm of the Jacobian of a step", "tokens"),
        (products, "log10 of the norm of a product of n Jacobians", "n"),
        (gradients, "d(output at T)/d(state n tokens before its end)", "n"),
    ):
        axes.set_xscale("log")
        axes.set_title(what, fontsize=10)
        axes.set_xlabel(label)
        axes.grid(True, which="both", alpha=0.25)
    for axes in (states, norms, gradients):
        axes.set_yscale("log")
    for axes in (states, products):
        if axes.get_lines():
            axes.legend(fontsize=7)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _name(m: Measurement) -> str:
    layer = "" if m.subject.layer is None else f" layer {m.subject.layer}"
    return f"{m.subject.model}{layer}, seed {m.subject.seed}" if m.subject.seed else f"{m.subject.model}{layer}"
