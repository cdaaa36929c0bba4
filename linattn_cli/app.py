"""The `linattn` command: its subcommands, `--help` and `--version`, and what happens to wrong usage.

Nothing heavy is imported here or at the top of a command's module, so that help and version answer at once.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.completion import completion_init

from linattn_cli import __version__, output
from linattn_cli.commands.capacity_sweep import capacity_sweep
from linattn_cli.commands.compare import compare
from linattn_cli.commands.completion import completion
from linattn_cli.commands.doctor import doctor
from linattn_cli.commands.eval import evaluate
from linattn_cli.commands.latency import latency
from linattn_cli.commands.list import list_
from linattn_cli.commands.probe_norm import probe_norm
from linattn_cli.commands.report import report
from linattn_cli.commands.schema import schema
from linattn_cli.commands.task import task_app
from linattn_cli.commands.train import train
from linattn_cli.commands.verify_scan import verify_scan
from linattn_cli.threads import share_the_cores

# typer.BadParameter -> UsageError -> ClickException, in click itself or in the copy newer typers carry
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = typer.BadParameter.__mro__[2]

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    name="linattn",
    help="Train, measure, time and prove linear-attention mixers.",
    epilog="Exit codes: 0 fine, 1 a check failed, 2 wrong usage or input, 3 no such device, 4 out of memory "
    "or disk, 70 our own fault, 130 interrupted, 143 terminated.",
    context_settings=_SETTINGS,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"linattn {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    _help_without_subcommand(context)


def _help_without_subcommand(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(output.EXIT_USAGE)


app.command("train")(train)
app.command("eval")(evaluate)
app.command("compare")(compare)
app.command("report")(report)
app.command("verify-scan")(verify_scan)
app.command("latency")(latency)
app.command("probe-norm")(probe_norm)
app.command("capacity-sweep")(capacity_sweep)
app.add_typer(task_app, name="task", callback=_help_without_subcommand, invoke_without_command=True)
app.command("list")(list_)
app.command("doctor")(doctor)
app.command("schema")(schema)
app.command("completion")(completion)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its documented exit code; the entry point of `linattn`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    output.invoked = ["linattn", *words]
    _open_closed_streams()
    if "_LINATTN_COMPLETE" in os.environ:  # a shell asks, through the script of `linattn completion`
        completion_init()
    share_the_cores()
    command = typer.main.get_command(app)
    with output.command("linattn", json=_wants_json(words), debug="--debug" in words) as doc:
        try:
            code = command.main(args=words, prog_name="linattn", standalone_mode=False)
            sys.stdout.flush()  # a reader that went away is noticed here, not in Python's shutdown
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            path = context.command_path if context is not None else "linattn"
            doc.command = path.removeprefix("linattn ")
            message = " ".join(error.format_message().split())
            hint = _option_of_stray_words(message, context) or f"{path} --help shows what it takes"
            raise output.CliError(message + _nearest_command(message, context), hint=hint) from None
        except _ClickException as error:
            raise output.CliError(" ".join(error.format_message().split())) from None
        except typer.Abort:
            raise KeyboardInterrupt from None
        except SystemExit as left:
            if isinstance(left.__context__, BrokenPipeError):  # typer's own answer to a reader that went away
                raise left.__context__ from None
            raise
        raise SystemExit(code if isinstance(code, int) else output.EXIT_OK)
    raise SystemExit(output.EXIT_OK)


def _open_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) swallows what is written to it; none fails for a character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - held until the end
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a file's name need not be valid text


def _nearest_command(message: str, context: Any) -> str:
    from linattn_cli.recipe import nearest

    unknown = re.search(r"No such command '([^']*)'", message)
    if unknown is None or context is None or "Did you mean" in message:
        return ""
    return nearest(unknown[1], context.command.list_commands(context))


def _option_of_stray_words(message: str, context: Any) -> str | None:
    from linattn_cli.parsing import option_of

    stray = re.search(r"unexpected extra arguments?(?:\(s\))? \(([^)]*)\)", message)
    if stray is None or context is None:
        return None
    options = {option for parameter in context.command.params for option in parameter.opts}
    return next(filter(None, (option_of(word, options) for word in stray[1].split())), None)


def _wants_json(words: Sequence[str]) -> bool:
    """Whether wrong usage is to be reported as a document too; options are not parsed yet when it happens."""
    pairs = itertools.pairwise(words)
    return "--json" in words or "--format=json" in words or ("--format", "json") in pairs
