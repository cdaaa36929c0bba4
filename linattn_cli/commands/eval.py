"""`linattn eval`: what a trained run answers, also on other sizes than it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn_cli import output
from linattn_cli.completions import complete_run
from linattn_cli.options import (
    DebugOption,
    FormatOption,
    JsonOption,
    NPairsListOption,
    QuietOption,
    SeqLensOption,
    TrustOption,
    device_option,
    dtype_option,
    impl_option,
    plot_option,
    require_option,
    seed_option,
    updates_option,
)
from linattn_cli.parsing import parse_ints


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run folder that `linattn train` saved.", autocompletion=complete_run),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Your own mixer, where the run was trained with one: path/to/mine.py:MyMixer.",
            rich_help_panel="Run",
        ),
    ] = None,
    trust: TrustOption = False,
    n_pairs: NPairsListOption = None,
    seq_lens: SeqLensOption = None,
    updates: Annotated[int | None, updates_option("the run's")] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            "--examples",
            min=1,
            help="Held-out sequences a row.",
            show_default="the run's train.eval_examples",
            rich_help_panel="Task",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=0, help="Checkpoint to evaluate.", show_default="the last one", rich_help_panel="Run"
        ),
    ] = None,
    seed: Annotated[int | None, seed_option("the run's")] = None,
    device: Annotated[str | None, device_option("the run's")] = None,
    dtype: Annotated[str | None, dtype_option("the run's")] = None,
    impl: Annotated[str | None, impl_option("the run's")] = None,
    require: Annotated[list[str] | None, require_option("eval")] = None,
    plot: Annotated[Path | None, plot_option("accuracy by size and by distance")] = None,
    show: Annotated[
        int,
        typer.Option(
            "--show",
            min=0,
            max=64,
            metavar="N",
            help="Print the first N sequences of each size with what the model answered.",
            rich_help_panel="Output",
        ),
    ] = 0,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Evaluate a run on held-out data: accuracy overall and by distance, exact sequences.

    Example: linattn eval runs/vla-mqar-1 --n-pairs 4,8,16,32

    Every combination of --n-pairs and --seq-lens is a row. Without --seq-lens the trained sizes keep the
    trained length, others take the shortest legal one. Rows longer than the training sequences are marked. With
    --show the sequences are in the table format, and in JSON as summary.examples.
    """
    with output.command("eval", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli import heldout
        from linattn_cli.plotting import check_plot_path
        from linattn_cli.require import check, parse

        requirements = parse(require, "eval")
        if plot is not None:
            check_plot_path(plot)
        heldout.evaluate_run(
            run,
            doc,
            n_pairs=None if n_pairs is None else parse_ints(n_pairs, "--n-pairs"),
            seq_lens=None if seq_lens is None else parse_ints(seq_lens, "--seq-lens"),
            updates=updates,
            examples=examples,
            step=step,
            plot=plot,
            show=show,
            trust=trust,
            overrides={
                "model.name": model,
                "seed": seed,
                "train.device": device,
                "train.dtype": dtype,
                "model.impl": impl,
            },
        )
        check(requirements, doc)
