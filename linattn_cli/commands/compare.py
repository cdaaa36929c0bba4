"""`linattn compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn_cli import output
from linattn_cli.completions import complete_run
from linattn_cli.options import DebugOption, FormatOption, JsonOption, QuietOption


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...", help="Run folders that `linattn train` saved.", autocompletion=complete_run
        ),
    ],
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Put runs side by side: what differs in their recipes, what they reached, how large and how fast they are.

    Example: linattn compare runs/vla-mqar-1 runs/softmax-mqar-1

    The table has a column a run; JSON and CSV have a row a run. Nothing is computed, and no code of a run is
    executed.
    """
    with output.command("compare", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli import side_by_side

        side_by_side.compare(runs, doc)
