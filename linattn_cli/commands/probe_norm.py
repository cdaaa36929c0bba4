"""`linattn probe-norm`: norms of states and of their Jacobians, and what the papers claim of them."""

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
    SetOption,
    TrustOption,
    d_head_option,
    plot_option,
    seq_len_option,
)
from linattn_cli.parsing import check_choice, option_of, parse_arms, parse_ints

SOURCES = ("operator", "model")

_PROBE = "Probe"


def probe_norm(
    named: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Trained runs, whose layers are measured; the same as --run.",
            show_default=False,
            autocompletion=completions.complete_run,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help="Mixers, comma-separated; with settings of their own as in vla:penalty=none.",
            show_default="all, or all that have --impl",
            autocompletion=completions.complete_models,
            rich_help_panel=_PROBE,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            help="operator: bare operators on inputs from N(0, 1). model: the layers of an untrained model on random "
            "tokens. For a trained one give --run.",
            show_default="operator",
            autocompletion=completions.choices(*SOURCES),
            rich_help_panel=_PROBE,
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="The layers of a trained run, on held-out sequences of its task; may be repeated.",
            autocompletion=completions.complete_run,
            rich_help_panel=_PROBE,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=0, help="Checkpoint of the run.", show_default="the last one", rich_help_panel=_PROBE
        ),
    ] = None,
    seq_len: Annotated[int | None, seq_len_option("1000, or what the run was trained on", _PROBE)] = None,
    d_head: Annotated[int | None, d_head_option("32", _PROBE)] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", min=1, help="Heads.", show_default="4", rich_help_panel=_PROBE)
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds", help="Seeds of inputs and weights, comma-separated.", show_default="0", rich_help_panel=_PROBE
        ),
    ] = None,
    no_normalise_gate: Annotated[
        bool,
        typer.Option(
            "--no-normalise-gate",
            help="VLA without normalised gates, and the blow-up of raw keys that the paper reports.",
            rich_help_panel=_PROBE,
        ),
    ] = False,
    trust: TrustOption = False,
    sets: SetOption = None,
    plot: Annotated[
        Path | None,
        plot_option("states, Jacobians, products and gradients over time"),
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Of inputs and states: float32, bfloat16 or float64. Jacobians are always taken in float64.",
            show_default="float32, or the run's",
            autocompletion=completions.choices("float32", "bfloat16", "float64"),
            rich_help_panel="Compute",
        ),
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            "--impl",
            help="What states and gradients go through: auto, chunk, triton, scan or reference. A Jacobian is always "
            "that of the serial step.",
            show_default="auto",
            autocompletion=completions.choices("auto", "chunk", "triton", "scan", "reference"),
            rich_help_panel="Compute",
        ),
    ] = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure states, their Jacobians and gradients over time, and give a verdict on each claim of the papers.

    Example: linattn probe-norm --models vla,linear,hla2 --seq-len 4k --plot norms.png

    J_t = dS_t/dS_(t-1) comes from differentiating the step itself: all singular values and eigenvalues where S is
    one matrix, Krylov iterations where the state is several moments (hla2, ahla, hla3). For VLA it is that of S
    with A held fixed, as in the paper; norm_max_with_A is that of A and S together. Softmax has none. Exit code 1
    if a check fails: the closed form of VLA's norm, or gradients against products of Jacobians.
    """
    with output.command("probe-norm", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        chosen = None if models is None else parse_arms(models)
        seed_list = [0] if seeds is None else parse_ints(seeds, "--seeds")

        if source is not None:
            check_choice("--source", source, SOURCES, hint="a trained model is named as an argument: its run folder")
        for path in named or []:
            if not path.exists() and (hint := option_of(str(path), {"--models"})):
                raise output.CliError(f"linattn probe-norm takes runs, no {str(path)!r}", hint=hint)

        from linattn_cli.probe_report import Request, run

        request = Request(
            models=chosen,
            source=source,
            runs=[*(named or []), *(runs or [])],
            step=step,
            seq_len=seq_len,
            d_head=d_head,
            heads=heads,
            seeds=seed_list,
            sets=sets or [],
            normalise_gate=not no_normalise_gate,
            device=device,
            dtype=dtype,
            impl=impl,
            plot=plot,
            trust=trust,
        )
        run(request, doc)
