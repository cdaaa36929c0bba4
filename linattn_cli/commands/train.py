"""`linattn train`: one training run, from a recipe and options to a run folder and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from linattn_cli import output
from linattn_cli.options import (
    BatchSizeOption,
    CheckpointEveryOption,
    DebugOption,
    DeviceOption,
    DHeadOption,
    DtypeOption,
    FormatOption,
    ImplOption,
    JsonOption,
    LrOption,
    ModelOption,
    NPairsOption,
    OutOption,
    ProtocolOption,
    QuietOption,
    RecipeOption,
    SeedOption,
    SeqLenOption,
    SetOption,
    StepsOption,
    TargetAccuracyOption,
    TaskOption,
    TrustOption,
    UpdatesOption,
    plot_option,
    require_option,
)


def train(
    model: ModelOption = None,
    task: TaskOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run folder --out from its last checkpoint.", rich_help_panel="Run"),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step",
            min=0,
            help="With --resume: continue from this checkpoint instead, dropping later ones.",
            rich_help_panel="Run",
        ),
    ] = None,
    steps: StepsOption = None,
    lr: LrOption = None,
    batch_size: BatchSizeOption = None,
    target_accuracy: TargetAccuracyOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    n_pairs: NPairsOption = None,
    seq_len: SeqLenOption = None,
    protocol: ProtocolOption = None,
    updates: UpdatesOption = None,
    d_head: DHeadOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    impl: ImplOption = None,
    require: Annotated[list[str] | None, require_option("train")] = None,
    plot: Annotated[Path | None, plot_option("loss and accuracy over the steps")] = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train one model on one task.

    Example: linattn train --model vla --task mqar --n-pairs 8 --steps 1000

    Writes a run folder (recipe.yaml, metrics.jsonl, result.json, checkpoints) and ends with a table: held-out
    accuracy beside chance, norms of the state, the largest Jacobian norm, speed and size. A recipe's values come
    before the defaults shown here, and options before both.
    """
    overrides: dict[str, Any] = {
        "model.name": model,
        "model.d_head": d_head,
        "model.impl": impl,
        "task.name": task,
        "task.n_pairs": n_pairs,
        "task.seq_len": seq_len,
        "task.protocol": protocol,
        "task.updates": updates,
        "train.steps": steps,
        "train.lr": lr,
        "train.batch_size": batch_size,
        "train.target_accuracy": target_accuracy,
        "train.checkpoint_every": checkpoint_every,
        "train.device": device,
        "train.dtype": dtype,
        "seed": seed,
    }
    with output.command("train", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli import experiment
        from linattn_cli.plotting import check_plot_path
        from linattn_cli.require import parse

        requirements = parse(require, "train")
        if plot is not None:
            check_plot_path(plot, coming=out)
        start = experiment.resolve(
            recipe=recipe, sets=sets, overrides=overrides, out=out, resume=resume, from_step=from_step, trust=trust
        )
        experiment.train(start, doc, out=out, requirements=requirements, plot=plot)
