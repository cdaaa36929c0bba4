"""The parts of README.md that are generated: `python -m tests.readme_blocks` writes them anew, a test compares.

A part stands between `<!-- name -->` and `<!-- /name -->`.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from linattn_cli.app import app

README = Path(__file__).parent.parent / "README.md"

PUBLIC: dict[str, tuple[str, ...]] = {
    "linattn_cli.layers": (
        *("VLA", "HLA2", "AHLA", "HLA3", "Linear", "DeltaNet", "DecayDelta", "GatedDeltaNet", "RLS", "Mesa", "Softmax"),
        *("Mixer", "MixerState"),
    ),
    "linattn_cli.kernels.linear": ("linear_scan",),
    "linattn_cli.kernels.delta": ("delta_scan",),
    "linattn_cli.kernels.penalty": ("penalty_gain",),
    "linattn_cli.kernels.forms.vla": ("vla",),
    "linattn_cli.kernels.forms.hla2": ("hla2",),
    "linattn_cli.kernels.forms.ahla": ("ahla",),
    "linattn_cli.kernels.forms.hla3": ("hla3",),
    "linattn_cli.kernels.forms.linear": ("linear_attention",),
    "linattn_cli.kernels.forms.deltanet": ("deltanet", "decay_delta"),
    "linattn_cli.kernels.forms.gated_deltanet": ("gated_deltanet",),
    "linattn_cli.kernels.forms.mesa": ("rls", "mesa"),
    "linattn_cli.kernels.forms.softmax": ("softmax",),
    "linattn_cli.kernels.types": ("FormOutput", "ScanOutput", "PenaltyState", "state_bytes"),
    "linattn_cli.tasks": ("make_task",),
    "linattn_cli.config": ("RunConfig", "load_run_config"),
    "linattn_cli.model": ("build_model", "LanguageModel"),
    "linattn_cli.evaluation": ("evaluate",),
    "linattn_cli.probes": ("jacobian_norms", "state_norms"),
}
"""What other people's code may import, by module."""

WIDTH = 110


def api_block() -> str:
    """A table of the public names with the first sentence of each."""
    lines = ["| from | import | |", "|---|---|---|"]
    for module, names in PUBLIC.items():
        for name in names:
            said = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
            first = said.partition("\n")[0].partition("; see ")[0].rstrip(".;:").replace("|", "\\|")
            lines.append(f"| `{module}` | `{name}` | {first} |")
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by the words that call it."""
    for name, command in typer.main.get_command(app).commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", found) for inner, found in command.commands.items())
        else:
            yield name, command


def options_of(command: Any) -> Iterator[Any]:
    """Its options, without --help."""
    yield from (p for p in command.params if p.param_type_name == "option" and p.name != "help")


def default_of(option: Any) -> str:
    """What the help page shows as the default, empty where there is none to show."""
    if isinstance(option.show_default, str):
        return option.show_default
    return "" if option.default in (None, False, ()) else str(option.default)


def help_block(name: str, command: Any) -> str:
    """A help page as text: what it is for, an example, and its options by panel."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = " ".join(p.metavar or p.name.upper() for p in arguments)
    lines = [f"linattn {name} [OPTIONS]{f' {shown}' if shown else ''}", ""]
    for paragraph in inspect.cleandoc(command.help).split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False), ""]
    kinds = kinds_of(name)
    panels: dict[str, list[Any]] = {}
    for option in options_of(command):
        panels.setdefault(option.rich_help_panel or "Options", []).append(option)
    if arguments:
        panels = {"Arguments": arguments, **panels}
    for panel, options in panels.items():
        lines.append(panel)
        for option in options:
            default = default_of(option)
            text = f"{option.help or ''}{f' [default: {default}]' if default else ''}"
            words = " ".join(text.split())
            first = f"  {_call_of(option, kinds)}"
            body = textwrap.wrap(words, WIDTH - 30, break_on_hyphens=False) or [""]
            gap = first.ljust(30) if len(first) < 29 else first
            rest = body if len(first) >= 29 else body[1:]
            lines.append((gap + (body[0] if len(first) < 29 else "")).rstrip())
            lines += [" " * 30 + line for line in rest]
        lines.append("")
    return "\n".join(lines).rstrip()


def _call_of(option: Any, kinds: dict[str, str]) -> str:
    if option.param_type_name == "argument":
        return option.metavar or option.name.upper()
    names = ", ".join(option.opts)
    return names if option.is_flag else f"{names} {option.metavar or kinds[option.name]}"


def kinds_of(name: str) -> dict[str, str]:
    """What each parameter of a command takes, from the annotations of its function."""
    words = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    for found in (command for group in groups for command in group.registered_commands):
        if found.name == name.split()[-1]:
            hints = get_type_hints(found.callback)
            return {
                key: next((word for kind, word in words.items() if kind in _flat(hint)), "")
                for key, hint in hints.items()
            }
    raise KeyError(name)


def _flat(hint: Any) -> list[Any]:
    return [hint, *(part for inner in get_args(hint) for part in _flat(inner))]


def help_blocks() -> str:
    """Every help page, folded."""
    parts = []
    for name, command in commands():
        summary = f"<details><summary><code>linattn {name} --help</code></summary>"
        parts.append(f"{summary}\n\n```text\n{help_block(name, command)}\n```\n\n</details>")
    return "\n".join(parts)


BLOCKS = {"api": api_block, "help": help_blocks}


def shown(name: str, text: str) -> str:
    """What README.md has as a part."""
    return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0].rstrip("\n")


def main() -> None:
    text = README.read_text(encoding="utf-8")
    for name, make in BLOCKS.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{make()}\n<!-- /{name} -->" + rest.split(f"<!-- /{name} -->")[1]
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
