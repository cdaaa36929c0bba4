"""`linattn latency`: how fast each mixer is, and from which length on it overtakes softmax."""

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
    plot_option,
)
from linattn_cli.parsing import check_choice, option_of, parse_int, parse_names

MODES = ("forward", "train", "decode")
IMPLS = ("auto", "reference", "scan", "chunk", "triton")
MODELS = "linear,deltanet,vla,hla2"
FEWEST_REPETITIONS = 20

_TIMING = "Timing"


def latency(
    action: Annotated[
        str | None, typer.Argument(metavar="sweep", help="`linattn latency sweep` is the same.", show_default=False)
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help="Mixers and primitives, comma-separated, or all mixers; your own are path/to/mine.py:MyMixer. "
            "Softmax is always there.",
            show_default=MODELS,
            autocompletion=completions.complete_operators,
            rich_help_panel=_TIMING,
        ),
    ] = None,
    seq_lens: Annotated[
        str | None,
        typer.Option(
            "--seq-lens",
            help="Lengths in tokens: 1024,2048 or 1k,2k, or a doubling range, 1k..128k.",
            show_default="256..8k, on a GPU 1k..128k",
            rich_help_panel=_TIMING,
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            help="forward, train (forward and backward), or decode (one token after a context of each length).",
            autocompletion=completions.choices(*MODES),
            rich_help_panel=_TIMING,
        ),
    ] = "forward",
    impl: Annotated[
        str | None,
        typer.Option(
            "--impl",
            help="Implementations, comma-separated: auto, chunk, triton, scan, reference (token by token; the "
            "others then show their speed-up over it).",
            show_default="auto",
            autocompletion=completions.choices(*IMPLS, several=True),
            rich_help_panel="Compute",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences of a call.", rich_help_panel=_TIMING)] = 1,
    heads: Annotated[
        int | None,
        typer.Option("--heads", min=1, help="Heads.", show_default="4, on a GPU 16", rich_help_panel=_TIMING),
    ] = None,
    d_head: Annotated[
        int, typer.Option("--d-head", min=1, max=256, help="Dimension of a head.", rich_help_panel=_TIMING)
    ] = 64,
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph",
            help="Time calls recorded as CUDA graphs and replayed, as servers run them: without Python's launches.",
            rich_help_panel=_TIMING,
        ),
    ] = False,
    with_fla: Annotated[
        bool,
        typer.Option("--with-fla", help="Time the kernels of flash-linear-attention too.", rich_help_panel=_TIMING),
    ] = False,
    repetitions: Annotated[
        int | None,
        typer.Option(
            "--repetitions",
            min=FEWEST_REPETITIONS,
            help="Repetitions of a cell.",
            show_default="20, on a GPU 50",
            rich_help_panel=_TIMING,
        ),
    ] = None,
    budget_s: Annotated[
        float,
        typer.Option(
            "--budget-s",
            help="Seconds for the repetitions of a cell; one that needs more is marked.",
            rich_help_panel=_TIMING,
        ),
    ] = 10.0,
    no_gate: Annotated[
        bool,
        typer.Option("--no-gate", help="Time without checking the results first.", rich_help_panel=_TIMING),
    ] = False,
    plot: Annotated[
        Path | None,
        plot_option("time over length in log-log, with the crossovers"),
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="float32, bfloat16, float16 or float64; states are never less than float32.",
            show_default="float32, on a GPU bfloat16",
            autocompletion=completions.choices("float32", "bfloat16", "float16", "float64"),
            rich_help_panel="Compute",
        ),
    ] = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Time mixers against fused softmax attention, and find from which length on each is faster.

    Example: linattn latency --models vla,deltanet --seq-lens 1k..16k --mode train

    Mixers are timed as functions of their tensors, without a model around them; the primitives linear_scan,
    delta_scan and penalty_gain can be named too. Every cell is checked against the serial recurrence before it
    is timed. Exit code 1 if a check fails.
    """
    with output.command("latency", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli.kernels.registry import MIXERS, PRIMITIVES

        if action not in (None, "sweep"):
            raise output.CliError(
                f"linattn latency takes no {action!r}",
                hint=option_of(action, {"--models"}) or "linattn latency, or linattn latency sweep",
            )
        known = [*MIXERS, *PRIMITIVES]
        chosen = list(MIXERS) if models == "all" else parse_names(models or MODELS, known, "--models", own=True)
        impls = parse_names(impl or "auto", IMPLS, "--impl")
        check_choice("--mode", mode, MODES)
        if not 0 < budget_s < float("inf"):
            raise output.CliError(f"--budget-s must be a positive number of seconds, got {budget_s:g}")
        lengths = None if seq_lens is None else parse_lengths(seq_lens)
        if plot is not None:
            from linattn_cli.plotting import check_plot_path

            check_plot_path(plot)

        from linattn_cli import environment

        place = environment.resolve_device(device or "auto")
        gpu = place.type == "cuda"
        precision = dtype or ("bfloat16" if gpu else "float32")
        lengths = lengths or parse_lengths("1k..128k" if gpu else "256..8k")
        torch_dtype = environment.resolve_dtype(precision, place)
        if cuda_graph and not gpu:
            raise output.CliError(
                f"--cuda-graph needs a GPU; this would run on {place}",
                hint="leave it out, or name a GPU: --device cuda",
                exit_code=output.EXIT_DEVICE,
                kind="device",
            )

        from linattn_cli import latency as bench
        from linattn_cli.latency_cases import Setting
        from linattn_cli.latency_gate import describe
        from linattn_cli.latency_own import explain
        from linattn_cli.own_mixer import is_own

        setting = Setting(batch, heads or (16 if gpu else 4), d_head, torch_dtype, place, mode)
        plan = bench.Plan(
            bench.make_arms(chosen, impls, setting, with_fla=with_fla),
            lengths,
            setting,
            repetitions or (50 if gpu else FEWEST_REPETITIONS),
            budget_s,
            not no_gate,
            plot,
            cuda_graph,
        )
        doc.config = {
            "models": list(dict.fromkeys(arm.model for arm in plan.arms)),
            "seq_lens": plan.seq_lens,
            "mode": mode,
            "impl": impls,
            "batch": setting.batch,
            "heads": setting.heads,
            "d_head": setting.d_head,
            "dtype": precision,
            "repetitions": plan.repetitions,
            "budget_s": plan.budget_s,
            "gate": plan.gate,
            "with_fla": with_fla,
            "cuda_graph": cuda_graph,
            "plot": plot,
        }
        for model in filter(is_own, chosen):
            if (said := explain(model)) is not None:
                doc.log(said)
        ours = dict.fromkeys(arm.impl for arm in plan.arms if not arm.peer)
        doc.begin(device=place, dtype=precision, impl=",".join(ours), seed=setting.seed)
        if no_gate:
            doc.warn("--no-gate: nothing is checked, these may be the times of wrong results")
        else:
            doc.log(describe(setting))
        bench.run(plan, doc)


def parse_lengths(text: str) -> list[int]:
    """Lengths in increasing order: a comma-separated list, in which `a..b` is a, 2a, 4a, ... up to b.

    >>> parse_lengths("1k..4k"), parse_lengths("256,1k,512")
    ([1024, 2048, 4096], [256, 512, 1024])
    """
    option, lengths = "--seq-lens", []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        if not word.strip():
            raise output.CliError(f"{option}: {text!r} has an empty entry", hint=f"separate by commas: {option} 1k,2k")
        low = parse_int(first, option)
        high = parse_int(last, option) if dots else low
        if low < 1 or high < low:
            raise output.CliError(
                f"{option}: {word.strip()!r} holds no length",
                hint="lengths are at least 1, a range goes upwards: 1k..128k",
            )
        while low <= high:
            lengths.append(low)
            low *= 2
    twice = [n for n in lengths if lengths.count(n) > 1]
    if twice:
        raise output.CliError(f"{option}: {twice[0]} is given twice", hint="give each value once")
    return sorted(lengths)
