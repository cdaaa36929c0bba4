"""Options shared by the commands, so that each has one spelling and one help text.

A `train`-like command takes one of each (`--n-pairs 8`). Commands over a grid take comma-separated lists
under the plural name (`--n-pairs 4,8`, `--seq-lens 1k,128k`) as text, for `parsing.parse_ints` and its siblings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from linattn_cli import completions
from linattn_cli.output import FORMATS
from linattn_cli.parsing import parse_int

_OUTPUT = "Output"
_RUN = "Run"
_MODEL = "Model"
_TASK = "Task"
_TRAIN = "Training"
_COMPUTE = "Compute"


def _length(text: str) -> int:
    return parse_int(text, "--seq-len")


FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Form of the results: table, json, csv or markdown.",
        show_default="table",
        autocompletion=completions.choices(*FORMATS),
        rich_help_panel=_OUTPUT,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Short for --format json; `linattn schema` describes it.", rich_help_panel=_OUTPUT),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress and no notes; only results and errors.", rich_help_panel=_OUTPUT),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)]


def require_option(command: str) -> Any:
    """`--require` of a command that has quantities to hold to."""
    return typer.Option(
        "--require",
        metavar="CONDITION",
        help="Exit with 1 unless this holds of the summary, as in 'accuracy>=0.99'; >=, >, <=, < or ==; may be "
        "repeated.",
        autocompletion=completions.quantities_of(command),
        rich_help_panel=_OUTPUT,
    )


def plot_option(what: str) -> Any:
    """`--plot` of a command, with what it draws."""
    return typer.Option("--plot", metavar="FILE", help=f"Draw {what}; .png or .svg.", rich_help_panel=_OUTPUT)


def device_option(default: str) -> Any:
    return typer.Option(
        "--device",
        help="auto (the first GPU, else the CPU), cpu, cuda or cuda:N.",
        show_default=default,
        autocompletion=completions.choices("auto", "cpu", "cuda"),
        rich_help_panel=_COMPUTE,
    )


def dtype_option(default: str) -> Any:
    return typer.Option(
        "--dtype",
        help="float32, bfloat16 (autocast over float32 weights) or float64.",
        show_default=default,
        autocompletion=completions.choices("float32", "bfloat16", "float64"),
        rich_help_panel=_COMPUTE,
    )


def impl_option(default: str) -> Any:
    return typer.Option(
        "--impl",
        help="auto (triton on a supported GPU, else chunk), chunk, triton, scan or reference.",
        show_default=default,
        autocompletion=completions.choices("auto", "chunk", "triton", "scan", "reference"),
        rich_help_panel=_COMPUTE,
    )


def seed_option(default: str) -> Any:
    return typer.Option(
        "--seed", min=0, help="Seed of the weights and of the data.", show_default=default, rich_help_panel=_COMPUTE
    )


def d_head_option(default: str, panel: str = _MODEL) -> Any:
    return typer.Option(
        "--d-head", min=1, help="Dimension of a head, at most 256.", show_default=default, rich_help_panel=panel
    )


def seq_len_option(default: str, panel: str = _TASK) -> Any:
    return typer.Option(
        "--seq-len",
        parser=_length,
        metavar="INTEGER",
        help="Tokens of an example; 4k is 4096.",
        show_default=default,
        rich_help_panel=panel,
    )


def updates_option(default: str) -> Any:
    return typer.Option(
        "--updates",
        min=0,
        help="Keys of mqar that are assigned again; the latest counts.",
        show_default=default,
        rich_help_panel=_TASK,
    )


DeviceOption = Annotated[str | None, device_option("auto")]
DtypeOption = Annotated[str | None, dtype_option("float32")]
ImplOption = Annotated[str | None, impl_option("auto")]
SeedOption = Annotated[int | None, seed_option("0")]
SeedsOption = Annotated[
    str | None,
    typer.Option("--seeds", help="Seeds, comma-separated.", show_default="0", rich_help_panel=_COMPUTE),
]

RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="Name of a packaged recipe, or a path to a YAML file.",
        autocompletion=completions.complete_recipe,
        rich_help_panel=_RUN,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the recipe, as in model.d_head=64; may be repeated.",
        autocompletion=completions.complete_setting,
        rich_help_panel=_RUN,
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the code of a mixer that only the recipe or the run folder names; read it first.",
        rich_help_panel=_RUN,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder to write to; it must not exist yet.",
        show_default="runs/MODEL-TASK-N",
        rich_help_panel=_RUN,
    ),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Mixer; `linattn list models` shows them. Or your own: path/to/mine.py:MyMixer.",
        show_default="vla",
        autocompletion=completions.complete_model,
        rich_help_panel=_MODEL,
    ),
]
ModelsOption = Annotated[
    str | None,
    typer.Option(
        "--models",
        help="Mixers, comma-separated, or all; your own are path/to/mine.py:MyMixer.",
        autocompletion=completions.complete_models,
        rich_help_panel=_MODEL,
    ),
]
DHeadOption = Annotated[int | None, d_head_option("32")]
DHeadsOption = Annotated[
    str | None,
    typer.Option("--d-heads", help="Head dimensions, comma-separated.", show_default="32", rich_help_panel=_MODEL),
]

TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Task; `linattn list tasks` shows them.",
        show_default="mqar",
        autocompletion=completions.complete_task,
        rich_help_panel=_TASK,
    ),
]
NPairsOption = Annotated[
    int | None,
    typer.Option("--n-pairs", min=1, help="Key-value pairs of mqar.", show_default="8", rich_help_panel=_TASK),
]
NPairsListOption = Annotated[
    str | None,
    typer.Option("--n-pairs", help="Key-value pairs of mqar, comma-separated.", rich_help_panel=_TASK),
]
SeqLenOption = Annotated[int | None, seq_len_option("the shortest legal; copy 32")]
SeqLensOption = Annotated[
    str | None,
    typer.Option("--seq-lens", help="Lengths in tokens, comma-separated; 128k is 131072.", rich_help_panel=_TASK),
]
UpdatesOption = Annotated[int | None, updates_option("0")]
ProtocolOption = Annotated[
    str | None,
    typer.Option(
        "--protocol",
        help="Protocol of mqar: vla or zoology.",
        show_default="vla",
        autocompletion=completions.choices("vla", "zoology"),
        rich_help_panel=_TASK,
    ),
]

StepsOption = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="Optimiser steps.", show_default="3000", rich_help_panel=_TRAIN),
]
LrOption = Annotated[
    float | None, typer.Option("--lr", help="Peak learning rate.", show_default="0.0003", rich_help_panel=_TRAIN)
]
LrsOption = Annotated[
    str | None,
    typer.Option("--lrs", help="Peak learning rates, comma-separated.", show_default="0.0003", rich_help_panel=_TRAIN),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Examples a step.", show_default="64", rich_help_panel=_TRAIN),
]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        min=1,
        help="Steps between checkpoints; the last two are kept.",
        show_default="500",
        rich_help_panel=_TRAIN,
    ),
]
TargetAccuracyOption = Annotated[
    float | None,
    typer.Option("--target-accuracy", help="Stop once validation reaches this share, as 0.99.", rich_help_panel=_TRAIN),
]
