"""`linattn capacity-sweep`: how much each mixer can hold, over a grid of sizes, rates and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from linattn_cli import completions, output
from linattn_cli.options import (
    BatchSizeOption,
    DebugOption,
    DeviceOption,
    DHeadsOption,
    DtypeOption,
    FormatOption,
    ImplOption,
    JsonOption,
    LrsOption,
    NPairsListOption,
    ProtocolOption,
    QuietOption,
    RecipeOption,
    SeedsOption,
    SeqLensOption,
    SetOption,
    StepsOption,
    TargetAccuracyOption,
    TaskOption,
    TrustOption,
    UpdatesOption,
    plot_option,
)
from linattn_cli.parsing import parse_arms, parse_floats, parse_ints


def capacity_sweep(
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help="Mixers, comma-separated, or all; options of one behind colons: vla,vla:penalty=none.",
            show_default="sweep.variants, else model.name",
            autocompletion=completions.complete_models,
            rich_help_panel="Grid",
        ),
    ] = None,
    n_pairs: NPairsListOption = None,
    d_heads: DHeadsOption = None,
    seq_lens: SeqLensOption = None,
    lrs: LrsOption = None,
    seeds: SeedsOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    trust: TrustOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of the sweep; it must not exist yet.",
            show_default="runs/sweep-N",
            rich_help_panel="Run",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Run what is missing in --out; a larger grid adds its new cells.",
            rich_help_panel="Run",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only list the cells, and estimate the time from a probe.", rich_help_panel="Run"
        ),
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Only report what is in --out, also while another process runs it.",
            rich_help_panel="Run",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        plot_option("accuracy against n_pairs and against the bytes of the state"),
    ] = None,
    keep_weights: Annotated[
        bool,
        typer.Option(
            "--keep-weights",
            help="Keep the trained weights in the run folders, for linattn eval.",
            rich_help_panel="Run",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Processes that train cells.",
            show_default="cores over threads; on GPUs at most 8 each",
            rich_help_panel="Compute",
        ),
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(
            "--streams",
            min=1,
            max=16,
            help="Cells that a worker trains side by side on a GPU, each on a CUDA stream of its own.",
            show_default="4 on a GPU, 1 without CUDA graphs and with --ray",
            rich_help_panel="Compute",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Run on this Ray cluster instead; `auto` finds one, `local` starts one here.",
            rich_help_panel="Compute",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            help="CPU threads of a cell, which its figures depend on.",
            show_default="1",
            rich_help_panel="Compute",
        ),
    ] = None,
    task: TaskOption = None,
    protocol: ProtocolOption = None,
    updates: UpdatesOption = None,
    steps: StepsOption = None,
    batch_size: BatchSizeOption = None,
    target_accuracy: TargetAccuracyOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    impl: ImplOption = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a grid of models x n_pairs x d_head x seq_len x lr x seeds, and tabulate what each can hold.

    Example: linattn capacity-sweep --models softmax,linear,vla --n-pairs 4,8,16 --lrs 1e-3,3e-3 --seeds 0,1

    The best learning rate is chosen on validation data and reported on held-out data. Every cell is kept in one
    SQLite file as it ends; --resume goes on after a kill.
    """
    with output.command("capacity-sweep", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        overrides: dict[str, Any] = {
            "sweep.models": None if models is None else parse_arms(models),
            "sweep.n_pairs": None if n_pairs is None else parse_ints(n_pairs, "--n-pairs"),
            "sweep.d_heads": None if d_heads is None else parse_ints(d_heads, "--d-heads"),
            "sweep.seq_lens": None if seq_lens is None else parse_ints(seq_lens, "--seq-lens"),
            "sweep.lrs": None if lrs is None else parse_floats(lrs, "--lrs"),
            "sweep.seeds": None if seeds is None else parse_ints(seeds, "--seeds"),
            "sweep.threads": threads,
            "task.name": task,
            "task.protocol": protocol,
            "task.updates": updates,
            "model.impl": impl,
            "train.steps": steps,
            "train.batch_size": batch_size,
            "train.target_accuracy": target_accuracy,
            "train.device": device,
            "train.dtype": dtype,
        }
        from linattn_cli import capacity_run

        request = capacity_run.Request(
            recipe,
            sets,
            overrides,
            out,
            resume,
            workers,
            ray,
            plot,
            keep_weights=keep_weights,
            dry_run=dry_run,
            report=report,
            trust=trust,
            streams=streams,
        )
        capacity_run.run(request, doc)
