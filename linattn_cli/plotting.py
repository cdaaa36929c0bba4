"""The house style of every picture: one palette, one layout, and where pictures may be saved.

A command describes a `Picture`: panels that draw on axes of matplotlib, a title, and a caption that says what was
measured on what. `save` sets the panels side by side in a file; `svgs` makes one drawing of each, for a page.

Series differ in marker and in dashes too, never in colour alone, and colours have three times the contrast of
white paper: a picture stays readable in print and by readers who do not tell some colours apart. matplotlib is
imported only when something is drawn.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn_cli.output import CliError

SUFFIXES = (".png", ".svg")

BLACK = "#000000"
GREY = "#5E5E66"
FAULT = "#A63A00"
PALETTE = ("#0050A0", "#A63A00", "#0A9C76", "#C060A8", "#CC8400", "#3C9AD6", "#64103C", GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "p", ">")
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.5, 2)))

PANEL_INCHES = (4.6, 3.5)
DPI = 180

STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E2E2E2",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "linattn",  # the same picture is the same bytes
}

ON_LINES: dict[str, Any] = {"boxstyle": "square,pad=0.08", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
"""Box that keeps a figure legible where it lies on lines."""

Look = dict[str, Any]
"""Arguments of matplotlib's `plot` that tell a series from the others."""


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    title  what is drawn, in a few words
    draw   draws it on matplotlib axes; what has a label goes into the legend below
    wide   whether it needs the width of two
    tall   its height over that of the others
    """

    title: str
    draw: Callable[[Any], None]
    wide: bool = False
    tall: float = 1.0


@dataclass(frozen=True)
class Picture:
    """Panels that belong together, with a title above and a caption below."""

    title: str
    caption: str
    panels: Sequence[Panel]


def check_plot_path(
    path: Path, *, option: str = "--plot", suffixes: Sequence[str] = SUFFIXES, coming: Path | None = None
) -> None:
    """Raise before any long work where `path` could not be written in the end; `CliError` names the remedy.

    coming  a folder that the command will make, which may hold it
    """
    if path.suffix.lower() not in suffixes:
        raise CliError(
            f"{option} must end in {' or '.join(suffixes)}, got {path.name!r}", hint=f"{option} name{suffixes[0]}"
        )
    if path.is_dir():
        raise CliError(f"{option} {path} is a folder", hint="give the name of a file")
    if coming is not None and path.parent == coming and not coming.exists():
        return
    if not path.parent.is_dir():
        raise CliError(f"{option}: there is no folder {path.parent}", hint=f"mkdir -p {path.parent}", kind="file")
    there = path.exists()
    try:
        with open(path, "ab"):  # only trying tells: a folder may be read-only, full of quota, or no real one
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise CliError(
            f"{option}: cannot write {path}: {error.strerror or error}", hint="choose another place", kind="file"
        ) from error


def look(index: int) -> Look:
    """The look of the series of that number, where series are no mixers."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
    }


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Looks by the names of series, each of which begins with that of a mixer.

    A mixer looks the same in every picture, and softmax, the baseline, is black. Further series of one mixer
    (another implementation, another setting) have its colour with other dashes and hollow markers.

    >>> found = looks(["vla chunk", "vla:penalty=none chunk", "softmax"])
    >>> len({look["color"] for look in found.values()}), found["softmax"]["color"]
    (2, '#000000')
    """
    from linattn_cli.kernels.registry import MIXERS

    others = [name for name in MIXERS if name != "softmax"]
    # The mixers that are drawn most have colours of their own.
    order = {name: number for number, name in enumerate(dict.fromkeys([*_FIRST, *others]))}
    seen: dict[str, int] = {}
    found: dict[str, Look] = {}
    for name in names:
        mixer = re.split(r"[ :,]", name, maxsplit=1)[0]
        number = order.setdefault(mixer, len(order))
        repeat = seen.setdefault(mixer, 0)
        seen[mixer] += 1
        made = look(number) | {"marker": MARKERS[(number + 1) % len(MARKERS)]}
        if mixer == "softmax":
            made |= {"color": BLACK, "marker": "o", "linestyle": "-"}
        if repeat:
            made |= {
                "linestyle": DASHES[repeat % len(DASHES)],
                "marker": MARKERS[(number + 1 + 3 * repeat) % len(MARKERS)],
            }
            made["markerfacecolor"] = "white"
        found[name] = made
    return found


_FIRST = ("vla", "linear", "deltanet", "hla2", "gated_deltanet", "mesa", "ahla", "hla3")


def line_only(style: Look) -> Look:
    """A look without its markers, for series of many points; two of one colour still differ in dashes."""
    return {key: value for key, value in style.items() if not key.startswith("marker")}


def present(points: Iterable[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """Points that can be drawn: neither missing, as None in a JSON document, nor nan or infinite."""
    return [(x, y) for x, y in points if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]


def power_ticks(axis: Any, values: Iterable[float]) -> None:
    """A logarithmic axis of sizes with a tick at every value, or at some where they would touch; 1k is 1024."""
    from matplotlib.ticker import NullFormatter, NullLocator

    ticks = sorted(set(values))
    axis.axes.set_xscale("log", base=2)
    kept: list[float] = []
    apart = (math.log(ticks[-1] / ticks[0]) / 12) if len(ticks) > 1 else 0.0
    for tick in ticks:
        if not kept or math.log(tick / kept[-1]) >= apart * 0.999:
            kept.append(tick)
    axis.set_ticks(kept, [short_count(tick) for tick in kept])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def log_axis(axis: Any) -> None:
    """A logarithmic axis of any quantity, whose ticks are plain numbers as far as those are short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if 0 < low < high < math.inf else 1.0
    plain = low > 1e-4 and high < 1e6
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=9))
    if plain:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    if decades >= 2.5:
        axis.set_minor_locator(NullLocator())


def short_count(value: float) -> str:
    """A count as axes have room for it.

    >>> short_count(512), short_count(131072), short_count(1000)
    ('512', '128k', '1000')
    """
    whole = round(value)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else f"{whole}"


def accuracy_axis(axes: Any) -> None:
    """Accuracy upwards, from 0 to 1."""
    axes.set_ylim(-0.03, 1.03)


def caption(settings: Mapping[str, Any], env: Mapping[str, Any]) -> str:
    """What was measured and where, in a line: the settings that are given, then machine and versions.

    >>> caption({"lr": 0.001, "options": None}, {"linattn": "0.1.0", "torch": "2.13.0", "device_name": "a CPU"})
    'lr 0.001 · a CPU, torch 2.13.0, linattn 0.1.0'
    """
    from linattn_cli.render import cell

    parts = [f"{name} {cell(value)}" for name, value in settings.items() if value not in (None, "", [], {})]
    where = [str(env["device_name"])] if env.get("device_name") else []
    where += (
        [f"{env['threads']} thread{'s' if env['threads'] > 1 else ''}"]
        if env.get("threads") and env.get("device") == "cpu"
        else []
    )
    where += [str(env[name]) for name in ("dtype", "impl") if env.get(name)]
    where += [f"seed {env['seed']}"] if env.get("seed") is not None and not {"seed", "seeds"} & set(settings) else []
    where += [f"{name} {env[name]}" for name in ("torch", "linattn") if env.get(name)]
    where += [f"commit {env['commit']}"] if env.get("commit") else []
    return " · ".join([*parts, ", ".join(where)])


def save(path: Path, picture: Picture) -> None:
    """Write a picture to a .png or .svg file, panels side by side."""
    with _drawn(picture, picture.panels, whole=True) as figure:
        data = io.BytesIO()
        kind = path.suffix.lower().removeprefix(".")
        figure.savefig(data, format=kind, dpi=DPI, metadata=_metadata(kind, picture))
    path.write_bytes(data.getvalue())


def svgs(picture: Picture, prefix: str) -> list[tuple[str, str]]:
    """Title and `<svg>` element of each panel, for a page; `prefix` keeps the identifiers of two apart."""
    found = []
    for number, panel in enumerate(picture.panels):
        with _drawn(picture, [panel], whole=False) as figure:
            data = io.StringIO()
            figure.savefig(data, format="svg", metadata=_metadata("svg", picture))
        found.append((panel.title, inline_svg(data.getvalue(), f"{prefix}-{number}-", panel.title)))
    return found


def inline_svg(text: str, prefix: str, label: str) -> str:
    """The `<svg>` of a file as an element of a page: scaled to its place, named, its identifiers prefixed."""
    from html import escape

    element = text[text.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    element = re.sub(r'\bid="', f'id="{prefix}', element)
    element = element.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
    head, rest = element.split(">", 1)
    head = re.sub(r'\s(width|height|version|xmlns:xlink)="[^"]*"', "", head)
    rest = rest.replace("xlink:href", "href")
    return f'{head} role="img" aria-label="{escape(label, quote=True)}">{rest}'


def _metadata(kind: str, picture: Picture) -> dict[str, Any]:
    if kind == "svg":
        return {"Date": None, "Title": picture.title, "Description": picture.caption}
    return {"Title": picture.title, "Description": picture.caption}


@contextmanager
def _drawn(picture: Picture, panels: Sequence[Panel], *, whole: bool) -> Iterator[Any]:
    """A figure of some panels; `whole` has the title, the caption and text as shapes that look alike everywhere."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.fonttype": "path" if whole else "none"}
    with matplotlib.rc_context(style):
        layout: Any = _layout(panels)
        columns = len(layout[0])
        tall = [max(panel.tall for panel in panels if _index(panels, panel) in row) for row in layout]
        width, height = PANEL_INCHES
        if len(panels) == 1 and whole:
            width *= 1.3
        figure = Figure(figsize=(columns * width, height * sum(tall)), layout="constrained")
        found = figure.subplot_mosaic(layout, height_ratios=tall)
        for number, panel in enumerate(panels):
            axes = found[number]
            panel.draw(axes)
            # Alone in a file the picture's title says it, and on a page the heading above.
            axes.set_title(panel.title if whole and len(panels) > 1 else "", loc="left", fontweight="bold")
        _finish(figure, picture, list(found.values()), whole=whole)
        yield figure


def _index(panels: Sequence[Panel], panel: Panel) -> int:
    return next(number for number, other in enumerate(panels) if other is panel)


def _layout(panels: Sequence[Panel]) -> list[list[int]]:
    """Numbers of the panels in rows of two at most; a wide one has its row."""
    if len(panels) == 1:
        return [[0, 0]] if panels[0].wide else [[0]]
    rows: list[list[int]] = []
    for number, panel in enumerate(panels):
        if panel.wide:
            rows.append([number, number])
        elif rows and len(rows[-1]) == 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return [row * 2 if len(row) == 1 else row for row in rows]


def _finish(figure: Any, picture: Picture, axes: list[Any], *, whole: bool) -> None:
    """Grow the figure by the title, the legend and the caption, so that they take nothing from the panels."""
    width, height = figure.get_size_inches()
    entries: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    columns, lines = _legend_shape(list(entries), width)
    below = 0.19 * lines + (0.1 if lines else 0.0)
    above, notes = 0.0, ""
    if whole:
        above = 0.3
        notes = textwrap.fill(picture.caption, round(width * 17.5), break_on_hyphens=False)
        below += 0.15 * (notes.count("\n") + 1) + 0.08
    total = height + above + below
    figure.set_size_inches(width, total)
    figure.get_layout_engine().set(rect=(0, below / total, 1, 1 - (above + below) / total), w_pad=0.06, h_pad=0.06)
    if whole:
        figure.text(0.012, 1 - 0.07 / total, picture.title, va="top", fontsize=10.5, fontweight="bold")
        figure.text(0.012, 0.05 / total, notes, va="bottom", fontsize=7.0, color="#444444", linespacing=1.25)
    if entries:
        place = (0.5, below / total)
        figure.legend(
            entries.values(), entries.keys(), loc="upper center", bbox_to_anchor=place, ncols=columns, handlelength=3.2
        )


def _legend_shape(labels: list[str], width: float) -> tuple[int, int]:
    """Columns and lines of a legend of so many inches."""
    if not labels:
        return 1, 0
    longest = max(map(len, labels))
    columns = max(1, min(len(labels), int(width / (0.62 + 0.068 * longest))))
    lines = math.ceil(len(labels) / columns)
    return math.ceil(len(labels) / lines), lines
