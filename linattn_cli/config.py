"""How command line, recipe and defaults become one resolved `RunConfig`.

Precedence: command line over recipe over defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from linattn_cli import __version__
from linattn_cli.output import CliError
from linattn_cli.own_mixer import (
    absolute_name,
    is_own,
    names_in,
    portable_name,
    replace_at,
    short_name,
)
from linattn_cli.recipe import KeyPath, dump_yaml, nearest
from linattn_cli.settings import TASK_CONFIGS, ModelConfig, RunConfig, Section, SweepConfig, TrainConfig
from linattn_cli.sources import Sources

_SECTIONS: dict[str, type[Section]] = {"model": ModelConfig, "train": TrainConfig, "sweep": SweepConfig}


def load_run_config(
    recipe: str | None = None,
    sets: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    *,
    trust: bool = False,
) -> RunConfig:
    """The resolved configuration of a run.

    recipe     name of a packaged recipe, or a path; None is the defaults
    sets       `--set` arguments, `section.key=value` with YAML values
    overrides  what dedicated options were given, by dotted key (`{"model.d_head": 64}`); None is not given
    trust      run a file that only the recipe names as its mixer; one given by `sets` or `overrides` always is

    Raises `CliError` (exit 2) naming file, line, key and the nearest valid key.

    >>> load_run_config(sets=["model.d_head=16"], overrides={"task.n_pairs": 4}).task.n_pairs
    4
    """
    sources = Sources.collect(recipe, sets or [], overrides or {})
    _refuse_leftovers(sources)
    sources.admit_code(trust)
    data = sources.data
    if isinstance(task := data.setdefault("task", {}), dict):
        task.setdefault("name", "mqar")
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise _explain(error, sources) from None
    _check_task(config, sources)
    return config


def derive(config: RunConfig, changes: Mapping[str, Any], *, label: str) -> RunConfig:
    """`config` without its sweep, with some dotted keys set anew; everything is checked again.

    Another mixer takes none of the options of `config`, and another task none of its settings. Raises
    `CliError` (exit 2) that begins with `label`.

    >>> derive(RunConfig(), {"model.name": "linear", "task.n_pairs": 4}, label="a cell").model.options["readout"]
    'ratio'
    """
    # Only what was written: what was resolved from it must be resolved anew.
    data = config.model_dump(mode="json", exclude={"sweep"}, exclude_unset=True)
    if changes.get("model.name", config.model.name) != config.model.name:
        data["model"] = {key: value for key, value in data.get("model", {}).items() if key != "options"}
    if changes.get("task.name", config.task.name) != config.task.name:
        data["task"] = {}
    data.setdefault("task", {}).setdefault("name", config.task.name)
    sources = Sources(None, data)
    for key, value in changes.items():
        sources.put(tuple(key.split(".")), value, "")
    sources.given.clear()  # these are no options of a command line
    try:
        derived = RunConfig.model_validate(data)
        _check_task(derived, sources)
    except ValidationError as error:
        found = _explain(error, sources)
        raise CliError(f"{label}: {found.message}", hint=found.hint, kind=found.kind) from None
    except CliError as error:
        raise CliError(f"{label}: {error.message}", hint=error.hint, kind=error.kind) from None
    return derived


def _check_task(config: RunConfig, sources: Sources) -> None:
    """Let the task itself refuse what is impossible, before anything is built."""
    from linattn_cli.tasks import make_task

    try:
        make_task(config.task.name, config.task.model_dump())
    except ValueError as error:
        place = sources.where_any(("task",))
        raise CliError(f"{place}: {error}" if place else str(error), kind="recipe") from None


def dump_recipe(config: RunConfig, *, beside_code: bool = False) -> str:
    """The resolved recipe as YAML, accepted back unchanged.

    beside_code  the recipe will lie beside a copy of the user's own mixer, and names that
    """
    data = config.model_dump(mode="json")
    for path, name in list(names_in(data)):
        copied = beside_code and path == ("model", "name")
        replace_at(data, path, portable_name(name) if copied else absolute_name(name))
    if data["sweep"] is None:
        del data["sweep"]
    return f"# Resolved by linattn {__version__}: every key of the run, accepted as a recipe.\n{dump_yaml(data)}"


def _refuse_leftovers(sources: Sources) -> None:
    """A `--model` other than the recipe's keeps the backbone; options of the other mixer are an error."""
    recipe = sources.recipe
    if recipe is None:
        return
    for section, default, own in (("model", "vla", "options"), ("task", "mqar", None)):
        written = recipe.data.get(section)
        chosen = sources.get((section, "name"))
        if not isinstance(written, dict) or chosen is None:
            continue
        before = written.get("name", default)
        if chosen == before or (is_own(chosen) and is_own(before) and short_name(chosen) == short_name(before)):
            continue
        if own is None:
            known = TASK_CONFIGS[chosen].model_fields if chosen in TASK_CONFIGS else written
            left: list[KeyPath] = [(section, key) for key in written if key not in known]
            remedy = f"replace the section: --set '{section}={{name: {chosen}}}'"
        else:
            options = written.get(own)
            left = [(section, own, key) for key in options] if isinstance(options, dict) else []
            remedy = f"drop them with --set {section}.{own}={{}}"
        left = [path for path in left if sources.comes_from_recipe(path)]
        if left:
            keys = ", ".join(".".join(path) for path in left)
            raise CliError(
                f"{recipe.where(left[0])}: {keys} was written for {section} {before}, not for {chosen}",
                hint=remedy,
                kind="recipe",
            )


def _explain(error: ValidationError, sources: Sources) -> CliError:
    problems = [_explain_one(dict(item), sources) for item in error.errors(include_url=False)]
    message, hint = problems[0]
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    writer = sources.recipe.written_by if sources.recipe is not None else None
    if writer is not None and _release(writer) > _release(__version__):
        return CliError(
            f"{message}; the recipe was written by a newer linattn, {writer}, this is {__version__}",
            hint="update linattn: pip install -U linattn",
            kind="newer_format",
        )
    return CliError(message, hint=hint, kind="recipe")


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare it by.

    >>> _release("0.10.2.dev1") > _release("0.9")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _explain_one(item: dict[str, Any], sources: Sources) -> tuple[str, str]:
    context = item.get("ctx", {})
    path = tuple(str(part) for part in item["loc"])
    if path[:1] == ("task",) and len(path) > 1 and path[1] in TASK_CONFIGS:
        path = (path[0], *path[2:])  # pydantic puts the chosen task's name between section and key
    path = (*path, *context.get("at", ()))
    key = ".".join(path)
    place = sources.where(path) or sources.where_any(path)
    where = f"{place}: " if place else ""
    if item["type"] == "extra_forbidden":
        section = ".".join(path[:-1])
        valid = list(_keys_of(section, sources))
        owner = f"task {sources.get(('task', 'name'))}" if section == "task" else section or "a recipe"
        return (
            f"{where}{key} is not a key of {owner}{nearest(path[-1], valid)}",
            f"{owner} has {', '.join(valid)}",
        )
    if item["type"] == "union_tag_invalid":
        name = str(sources.get(("task", "name")))
        place = sources.where(("task", "name"))
        message = f"{place}: there is no task {name!r}{nearest(name, TASK_CONFIGS)}"
        return message, f"there are {', '.join(TASK_CONFIGS)}; linattn list tasks describes them"
    if item["type"] == "linattn":
        return f"{where}{context['message']}", context["hint"]
    said = item["msg"].removeprefix("Value error, ")
    return f"{where}{key}: {said[:1].lower()}{said[1:]}, got {item.get('input')!r}"[:300], ""


def _keys_of(section: str, sources: Sources) -> dict[str, Any]:
    if section == "task":
        return TASK_CONFIGS[str(sources.get(("task", "name")))].model_fields
    return _SECTIONS[section].model_fields if section in _SECTIONS else RunConfig.model_fields
