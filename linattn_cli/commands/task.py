"""`linattn task show`: examples of a task, without a model."""

from __future__ import annotations

from typing import Annotated

import typer

from linattn_cli import output
from linattn_cli.completions import choices, complete_task
from linattn_cli.options import (
    DebugOption,
    FormatOption,
    JsonOption,
    NPairsOption,
    ProtocolOption,
    QuietOption,
    SeqLenOption,
    SetOption,
    UpdatesOption,
)
from linattn_cli.parsing import check_choice

task_app = typer.Typer(help="Look at a task.")

_DATA = "Data"

STREAMS = ("train", "validation", "test")


@task_app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="TASK", help="`linattn list tasks` shows them.", autocompletion=complete_task),
    ],
    n_pairs: NPairsOption = None,
    seq_len: SeqLenOption = None,
    protocol: ProtocolOption = None,
    updates: UpdatesOption = None,
    sets: SetOption = None,
    count: Annotated[
        int, typer.Option("--count", min=1, max=1000, help="Examples to show.", rich_help_panel=_DATA)
    ] = 2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the data.", rich_help_panel=_DATA)] = 0,
    stream: Annotated[
        str,
        typer.Option(
            "--stream",
            help="train, validation or test.",
            autocompletion=choices(*STREAMS),
            rich_help_panel=_DATA,
        ),
    ] = "test",
    index: Annotated[
        int,
        typer.Option(
            "--index",
            min=0,
            help="Which batch of the stream; training step N reads N - 1.",
            rich_help_panel=_DATA,
        ),
    ] = 0,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Print examples of a task with their labels; one row per token in the other formats.

    Example: linattn task show mqar --n-pairs 4 --updates 1
    """
    with output.command("task show", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli.config import load_run_config
        from linattn_cli.tasks import make_task

        check_choice("--stream", stream, STREAMS)
        config = load_run_config(
            sets=sets,
            overrides={
                "task.name": name,
                "task.n_pairs": n_pairs,
                "task.seq_len": seq_len,
                "task.protocol": protocol,
                "task.updates": updates,
            },
        )
        task = make_task(config.task.name, config.task.model_dump())
        batch = task.batch(count, seed=seed, stream=stream, index=index)
        doc.config = {"task": task.config(), "seed": seed, "stream": stream, "index": index, "count": count}
        doc.results = [
            {"example": example, **record} for example in range(count) for record in task.explain(batch, example)
        ]
        doc.summary = {"input_len": task.input_len, "fingerprint": task.fingerprint(seed), **task.chance()}
        chances = ", ".join(f"{key} {value:.4g}" for key, value in task.chance().items() if value is not None)
        doc.text = "\n\n".join(task.show(batch, example) for example in range(count))
        doc.text += f"\n\n{chances}, fingerprint {doc.summary['fingerprint']} (seed {seed})"
