"""What a shell offers for the words of a command line; asked anew at every TAB, so nothing heavy is imported.

Where a function offers nothing the shell falls back to file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import typer

Offer = tuple[str, str]
"""A word and what it means."""


def _starting(incomplete: str, offers: Iterable[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer[0].startswith(incomplete)]


def _in_list(incomplete: str, offers: Iterable[Offer]) -> list[Offer]:
    """Offers for the last entry of a comma-separated list, without those that stand in it already.

    >>> _in_list("vla,li", [("vla", ""), ("linear", "")])
    [('vla,linear', '')]
    """
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [(f"{before}{comma}{word}", text) for word, text in _starting(last, offers) if word not in taken]


def choices(*words: str, several: bool = False) -> Callable[[str], list[Offer]]:
    """A completion of fixed words, or with `several` of a comma-separated list of them."""

    def complete(incomplete: str) -> list[Offer]:
        offers = [(word, "") for word in words]
        return _in_list(incomplete, offers) if several else _starting(incomplete, offers)

    return complete


def complete_model(incomplete: str) -> list[Offer]:
    return _starting(incomplete, _models())


def complete_models(incomplete: str) -> list[Offer]:
    return _in_list(incomplete, _models())


def complete_operators(incomplete: str) -> list[Offer]:
    from linattn_cli.kernels.registry import PRIMITIVES

    return _in_list(incomplete, [*_models(), *((p.name, p.recurrence) for p in PRIMITIVES.values())])


def _models() -> list[Offer]:
    from linattn_cli.kernels.registry import MIXERS

    return [(mixer.name, mixer.summary) for mixer in MIXERS.values()]


def complete_task(incomplete: str) -> list[Offer]:
    from linattn_cli.tasks import TASKS

    return _starting(incomplete, [(spec.name, spec.summary) for spec in TASKS.values()])


def complete_recipe(incomplete: str) -> list[Offer]:
    from linattn_cli.recipe import recipe_names, recipe_summary

    return [(name, recipe_summary(name)) for name in recipe_names() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[Offer]:
    """Run folders in `runs/`, the newest first."""
    from linattn_cli.runs import RECIPE

    found = sorted(Path("runs").glob(f"*/{RECIPE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return _starting(incomplete, [(str(path.parent), "") for path in found])


def complete_setting(incomplete: str) -> list[Offer]:
    """Keys of a recipe, as `--set` takes them."""
    from linattn_cli.kernels.registry import MIXERS
    from linattn_cli.settings import TASK_CONFIGS, ModelConfig, TrainConfig

    keys = ["seed"]
    keys += [f"model.{key}" for key in ModelConfig.model_fields if key != "options"]
    keys += [f"model.options.{key}" for mixer in MIXERS.values() for key in mixer.options]
    keys += [f"task.{key}" for section in TASK_CONFIGS.values() for key in section.model_fields]
    keys += [f"train.{key}" for key in TrainConfig.model_fields]
    return _starting(incomplete, [(f"{key}=", "") for key in dict.fromkeys(keys)])


def quantities_of(command: str) -> Callable[[str], list[Offer]]:
    """A completion of what `--require` may name."""

    def complete(incomplete: str) -> list[Offer]:
        from linattn_cli.schemas import quantities

        return _starting(incomplete, [(name, "") for name in quantities(command) if "*" not in name])

    return complete


def complete_schema(context: typer.Context, incomplete: str) -> list[Offer]:
    """Commands that have a schema; `task` goes on with its subcommand."""
    from linattn_cli.schema_fields import OUTPUTS

    if context.params.get("words"):
        return _starting(incomplete, [("show", OUTPUTS["task show"].about)])
    names = {name.split()[0]: made.about for name, made in OUTPUTS.items()}
    return _starting(incomplete, [*names.items(), ("metrics", "A line of metrics.jsonl.")])
