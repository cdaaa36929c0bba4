"""`linattn schema`: what every command prints, as a JSON Schema."""

from __future__ import annotations

from typing import Annotated

import typer

from linattn_cli import output
from linattn_cli.completions import complete_schema
from linattn_cli.options import DebugOption, FormatOption, JsonOption, QuietOption

METRICS = "metrics"


def schema(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]",
            help="A command, as in `train` or `task show`, or `metrics` for the lines of metrics.jsonl.",
            autocompletion=complete_schema,
            show_default=False,
        ),
    ] = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the JSON Schema (draft 2020-12) of what a command prints with --json, failures included.

    Example: linattn schema train > train.schema.json

    Without COMMAND it lists the commands. With --format table, csv or markdown the fields of COMMAND are rows.
    """
    with output.command("schema", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli.render import to_json
        from linattn_cli.schema_fields import OUTPUTS
        from linattn_cli.schemas import field_rows, schema_of

        name = " ".join(words or [])
        known = [*OUTPUTS, METRICS]
        if not name:
            doc.results = [{"command": command, "about": made.about} for command, made in OUTPUTS.items()]
            doc.note("next: linattn schema COMMAND prints the schema of one")
            return
        if name not in known:
            from linattn_cli.recipe import nearest

            raise output.CliError(
                f"there is no schema of {name!r}{nearest(name, known)}", hint=f"there are {', '.join(known)}"
            )
        if fmt in (None, "json"):
            doc.fmt, doc.text = "table", to_json(schema_of(name))
        else:
            doc.results = list(field_rows(name))
