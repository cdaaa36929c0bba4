"""`linattn verify-scan`: every form of every operator against its serial recurrence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn_cli import completions, output
from linattn_cli.options import (
    DebugOption,
    DeviceOption,
    FormatOption,
    JsonOption,
    QuietOption,
    d_head_option,
    plot_option,
    seq_len_option,
)

_CHECK = "Check"
BUGS = (
    "drop-last-token",
    "shift-mask",
    "drop-decay",
    "stale-state",
    "swap-read-write",
    "skip-tail-chunk",
    "low-precision-state",
)


def verify_scan(
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help="Mixers and primitives, comma-separated; your own are path/to/mine.py:MyMixer.",
            show_default="all",
            autocompletion=completions.complete_operators,
            rich_help_panel=_CHECK,
        ),
    ] = None,
    forms: Annotated[
        str | None,
        typer.Option(
            "--forms",
            help="serial, chunk, scan, triton, or single forms such as chunk-split, comma-separated.",
            show_default="all",
            autocompletion=completions.choices("serial", "chunk", "scan", "triton", several=True),
            rich_help_panel=_CHECK,
        ),
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(
            "--dtypes",
            "--dtype",
            help="float64, float32, bfloat16, float16, comma-separated.",
            show_default="the first three; the first two with --quick",
            autocompletion=completions.choices("float64", "float32", "bfloat16", "float16", several=True),
            rich_help_panel=_CHECK,
        ),
    ] = None,
    seq_len: Annotated[int | None, seq_len_option("97; 37 with --quick", _CHECK)] = None,
    d_head: Annotated[int | None, d_head_option("20; 8 with --quick", _CHECK)] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the inputs.", rich_help_panel=_CHECK)] = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Smaller sizes, float64 and float32, options one by one.", rich_help_panel=_CHECK),
    ] = False,
    inject: Annotated[
        str | None,
        typer.Option(
            "--inject",
            metavar="BUG",
            help=f"Plant a bug that must be caught: {', '.join(BUGS)}.",
            autocompletion=completions.choices(*BUGS),
            rich_help_panel=_CHECK,
        ),
    ] = None,
    published: Annotated[
        bool,
        typer.Option(
            "--published", help="Also compare the papers' printed formulas with the exact ones.", rich_help_panel=_CHECK
        ),
    ] = False,
    interpret: Annotated[
        bool,
        typer.Option(
            "--interpret",
            help="Run Triton's kernels in its interpreter, on the CPU, in float32.",
            rich_help_panel=_CHECK,
        ),
    ] = False,
    device: DeviceOption = None,
    plot: Annotated[Path | None, plot_option("the error of every check by form, against its budget")] = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Prove every form of every operator against its serial recurrence in float64.

    Example: linattn verify-scan --models vla,linear --quick

    Outputs, final states and gradients of chunks, scans, split calls and decoding; exit code 1 if one is off.
    The error allowed is twice that of the serial recurrence in the same dtype, plus four roundings; in float64
    1e-9, and 1e-8 for gradients. The table shows the worst check of each group, --json all of them.
    """
    with output.command("verify-scan", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli.verify_report import Request, run

        doc.memory_hint = "lower --seq-len or --d-head, or choose fewer --models"
        request = Request(
            models=models,
            forms=forms,
            dtypes=dtypes,
            seq_len=seq_len,
            d_head=d_head,
            seed=seed,
            device=device or "auto",
            quick=quick,
            inject=inject,
            published=published,
            interpret=interpret,
            plot=plot,
        )
        run(request, doc)
