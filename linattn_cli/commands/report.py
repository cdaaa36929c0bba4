"""`linattn report`: runs, sweeps and saved documents on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn_cli import output
from linattn_cli.completions import complete_run
from linattn_cli.options import DebugOption, FormatOption, JsonOption, QuietOption


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_SWEEP...",
            help="Folders of training runs and of sweeps, and files with what eval, latency, probe-norm or "
            "verify-scan printed with --json.",
            autocompletion=complete_run,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The page, .html; a file there is replaced.", rich_help_panel="Output"
        ),
    ] = Path("report.html"),
    title: Annotated[
        str, typer.Option("--title", help="Heading of the page.", rich_help_panel="Output")
    ] = "linattn report",
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write one self-contained HTML page: tables, plots, configs, environment, and what reproduces each.

    Example: linattn report runs/vla-mqar-1 runs/sweep-1 latency.json -o report.html

    The page needs no network and no script, and prints. Several runs are also put side by side. No code of a run
    is executed.
    """
    with output.command("report", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli import report as pages

        pages.write(sources, out, doc, title=title)
