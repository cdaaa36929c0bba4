"""`linattn list`: the models, tasks and recipes there are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from linattn_cli import output
from linattn_cli.completions import choices
from linattn_cli.options import DebugOption, FormatOption, JsonOption, QuietOption

KINDS = ("models", "tasks", "recipes")


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[models|tasks|recipes]",
            help="Which of them.",
            show_default="all three",
            autocompletion=choices(*KINDS),
        ),
    ] = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """List the models, tasks and recipes there are.

    Example: linattn list models --format csv | cut -d, -f2
    """
    with output.command("list", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        if kind is not None and kind not in KINDS:
            from linattn_cli.recipe import nearest

            raise output.CliError(
                f"there is no list of {kind!r}{nearest(kind, KINDS)}", hint=f"there are {', '.join(KINDS)}"
            )
        rows = {"models": _models, "tasks": _tasks, "recipes": _recipes}
        doc.results = [row for name in KINDS if kind in (None, name) for row in rows[name]()]
        doc.columns = {
            "models": ["name", "summary", "impls", "options", "source"],
            "tasks": ["name", "summary"],
            "recipes": ["name", "model", "task", "steps", "summary"],
        }.get(kind or "", ["kind", "name", "summary"])


def _models() -> list[dict[str, Any]]:
    from linattn_cli.kernels.registry import MIXERS

    return [
        {
            "kind": "model",
            "name": mixer.name,
            "summary": mixer.summary,
            "recurrence": mixer.recurrence,
            "source": mixer.source,
            "impls": list(mixer.impls),
            "options": list(mixer.options),
        }
        for mixer in MIXERS.values()
    ]


def _tasks() -> list[dict[str, Any]]:
    from linattn_cli.tasks import TASKS

    return [{"kind": "task", "name": spec.name, "summary": spec.summary} for spec in TASKS.values()]


def _recipes() -> list[dict[str, Any]]:
    from linattn_cli.recipe import read_recipe, recipe_names, recipe_summary

    rows = []
    for name in recipe_names():
        data = read_recipe(name).data
        rows.append(
            {
                "kind": "recipe",
                "name": name,
                "model": data.get("model", {}).get("name"),
                "task": data.get("task", {}).get("name"),
                "steps": data.get("train", {}).get("steps"),
                "summary": recipe_summary(name),
            }
        )
    return rows
