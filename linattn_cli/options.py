"""Options shared by the commands, so that each has one spelling and one help text, and their parsers.

A `train`-like command takes one of each (`--n-pairs 8`). Commands over a grid take comma-separated lists
under the plural name (`--n-pairs 4,8`, `--seq-lens 1k,128k`) as text, for `parse_ints` and its siblings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from linattn_cli import completions
from linattn_cli.output import FORMATS, CliError

T = TypeVar("T")

LARGEST = 2**63 - 1
_SUFFIXES = {"k": 1024, "m": 1024 * 1024}

_OUTPUT = "Output"
_RUN = "Run"
_MODEL = "Model"
_TASK = "Task"
_TRAIN = "Training"
_COMPUTE = "Compute"


def parse_int(text: str, option: str = "the value") -> int:
    """A whole number; `k` and `m` count in 1024s.

    >>> parse_int("128k"), parse_int("73")
    (131072, 73)
    """
    word = text.strip().lower()
    factor = _SUFFIXES.get(word[-1:], 1)
    digits = word[:-1] if factor > 1 else word
    if not digits.isascii() or not digits.isdigit():
        raise CliError(f"{option}: {text!r} is not a whole number", hint="write 4096 or 4k, which is 4 * 1024")
    value = int(digits) * factor if len(digits) < 20 else LARGEST + 1
    if value > LARGEST:
        raise CliError(f"{option}: {text[:40]} is too large", hint=f"the largest number is {LARGEST}")
    return value


def parse_float(text: str, option: str = "the value") -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CliError(f"{option}: {text!r} is not a finite number", hint="write 0.001 or 1e-3")
    return value


def _parse_list(text: str, option: str, parse: Callable[[str], T]) -> list[T]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise CliError(f"{option}: {text!r} has an empty entry", hint=f"separate by commas: {option} a,b")
    values = [parse(word) for word in words]
    for index, value in enumerate(values):
        if value in values[:index]:
            raise CliError(f"{option}: {words[index]} is given twice", hint="give each value once")
    return values


def parse_ints(text: str, option: str = "the list") -> list[int]:
    """A comma-separated list of whole numbers, each value once.

    >>> parse_ints("4,8,1k")
    [4, 8, 1024]
    """
    return _parse_list(text, option, lambda word: parse_int(word, option))


def parse_floats(text: str, option: str = "the list") -> list[float]:
    """A comma-separated list of finite numbers, each value once.

    >>> parse_floats("1e-3,3e-4")
    [0.001, 0.0003]
    """
    return _parse_list(text, option, lambda word: parse_float(word, option))


def parse_names(text: str, valid: Iterable[str], option: str = "the list", *, own: bool = False) -> list[str]:
    """A comma-separated list of known names; `all` is every one of them.

    own  mixers of the user's own, `path/to/mine.py:MyMixer`, are names too; they are loaded

    >>> parse_names("vla,linear", ["linear", "vla"])
    ['vla', 'linear']
    """
    known = list(valid)
    if text.strip() == "all":
        return known

    def parse(word: str) -> str:
        from linattn_cli import own_mixer

        if own and own_mixer.is_own(word):
            own_mixer.allow(word)
            own_mixer.load(word)
            return word
        if word not in known:
            from linattn_cli.recipe import nearest

            mine = "; your own is path/to/mine.py:MyMixer" if own else ""
            raise CliError(
                f"{option}: there is no {word!r}{nearest(word, known)}", hint=f"there are {', '.join(known)}{mine}"
            )
        return word

    return _parse_list(text, option, parse)


def parse_arms(text: str, option: str = "--models") -> list[str]:
    """A comma-separated list of mixers, each with settings of its own behind colons; `all` is every mixer.

    The names are checked where the variants of a recipe are known.

    >>> parse_arms("linear,vla:penalty=none")
    ['linear', 'vla:penalty=none']
    """
    if text.strip() == "all":
        from linattn_cli.kernels.registry import MIXERS

        return list(MIXERS)
    return _parse_list(text, option, str)


def check_choice(option: str, value: str, choices: Sequence[str], *, hint: str = "") -> None:
    """`CliError` where an option has another value than its choices, with the nearest of them."""
    if value not in choices:
        from linattn_cli.recipe import nearest

        raise CliError(
            f"{option} must be one of {', '.join(choices)}; got {value!r}{nearest(value, choices)}", hint=hint
        )


def option_of(stray: str, options: Iterable[str]) -> str | None:
    """How to name a mixer or task that stands where no argument belongs: `train vla`, or `--models vla, linear`.

    >>> option_of("vla,", {"--models"}), option_of("copy", {"--model", "--task"}), option_of("x", {"--model"})
    ('name it in --models: a list has commas and no spaces', 'name it with --task copy', None)
    """
    from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
    from linattn_cli.tasks import TASKS

    name, known = stray.strip(","), set(options)
    for names, single, several in (
        (MIXERS, "--model", "--models"),
        (PRIMITIVES, "", "--models"),
        (TASKS, "--task", ""),
    ):
        if name in names and several in known:
            return f"name it in {several}: a list has commas and no spaces"
        if name in names and single in known:
            return f"name it with {single} {name}"
    return None


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
