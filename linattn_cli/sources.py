"""Where each value of a configuration comes from: recipe, `--set`, or an option of its own."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from typing import Any

from linattn_cli import own_mixer
from linattn_cli.output import CliError
from linattn_cli.recipe import KeyPath, Recipe, parse_value, read_recipe

_OPTION_NAMES = {"model.name": "--model", "task.name": "--task"}


def option_name(key: str) -> str:
    """The option that sets a dotted key.

    >>> option_name("model.name"), option_name("model.d_head")
    ('--model', '--d-head')
    """
    return _OPTION_NAMES.get(key, "--" + key.rpartition(".")[2].replace("_", "-"))


@dataclass
class Sources:
    """The merged data of a run, with the place each value came from, for error messages."""

    recipe: Recipe | None
    data: dict[str, Any]
    given: dict[KeyPath, str] = field(default_factory=dict)

    @classmethod
    def collect(cls, recipe: str | None, sets: list[str], overrides: dict[str, Any]) -> Sources:
        """Recipe, then `--set` in order, then the options; contradictions on the command line are refused."""
        read = read_recipe(recipe) if recipe is not None else None
        data = copy.deepcopy(read.data) if read else {}
        for section, value in list(data.items()):
            if value is None:  # `train:` with nothing under it
                del data[section]
        sources = cls(read, data)
        for text in sets:
            key, value = _split_set(text)
            sources._refuse_undoing(key, value, text)
            sources.put(key, value, f"--set {text}")
        for dotted, value in overrides.items():
            if value is not None:
                key = tuple(dotted.split("."))
                sources._refuse_contradiction(key, value)
                sources.put(key, value, option_name(dotted))
        return sources

    def get(self, path: KeyPath) -> Any:
        """The merged value, None where there is none."""
        value: Any = self.data
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    def where(self, path: KeyPath) -> str:
        """The place of a value: an option, `--set`, or file and line; empty for a default."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.given:
                return self.given[path[:end]]
            if self.recipe is not None and path[:end] in self.recipe.lines:
                return self.recipe.where(path)
        return ""

    def where_any(self, section: KeyPath) -> str:
        """The places of whatever was given in a section: the options if there are any, else file and line."""
        labels = [label for path, label in self.given.items() if path[: len(section)] == section]
        return ", ".join(labels) or self.where(section)

    def comes_from_recipe(self, path: KeyPath) -> bool:
        """Whether a value of the recipe is still there, not replaced from the command line."""
        return not any(path[:end] in self.given for end in range(1, len(path) + 1))

    def admit_code(self, trust: bool) -> None:
        """Allow the user's own mixers to be loaded: those of the command line, and with `trust` the recipe's.

        A recipe names them relative to its own folder. Raises `CliError` (exit 2) for one that is not trusted.
        """
        for path, name in list(own_mixer.names_in(self.data)):
            # the further grids of a sweep are the recipe's also where an option changed what else is in them
            if self.recipe is not None and (self.comes_from_recipe(path) or path[:2] == ("sweep", "more")):
                if not trust:
                    raise own_mixer.untrusted(name, self.recipe.name)
                name = os.path.join(os.path.dirname(self.recipe.name), name)
                own_mixer.replace_at(self.data, path, name)
            own_mixer.allow(name)
        model, digest = self.data.get("model"), ("model", "code_sha256")
        if isinstance(model, dict) and not self.comes_from_recipe(("model", "name")) and self.comes_from_recipe(digest):
            model.pop("code_sha256", None)  # it is of the file that the recipe names

    def put(self, path: KeyPath, value: Any, label: str) -> None:
        """Set one value; `label` says where it comes from."""
        section = self.data
        for depth, part in enumerate(path[:-1]):
            inner = section.setdefault(part, {})
            if not isinstance(inner, dict):
                parent = ".".join(path[: depth + 1])
                raise CliError(f"{label}: {parent} holds a single value, not a section", kind="recipe")
            section = inner
        section[path[-1]] = value
        self.given[path] = label

    def _refuse_undoing(self, path: KeyPath, value: Any, text: str) -> None:
        for earlier, label in self.given.items():
            if earlier[: len(path)] == path and not (earlier == path and self.get(path) == value):
                raise CliError(f"--set {text} would undo {label}", hint="give the wider one first, and each key once")

    def _refuse_contradiction(self, path: KeyPath, value: Any) -> None:
        label = self.given.get(path)
        if label is not None and self.get(path) != value:
            raise CliError(f"{label} contradicts {option_name('.'.join(path))} {value}", hint="give one of the two")


def _split_set(text: str) -> tuple[KeyPath, Any]:
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise CliError(f"--set takes section.key=value, got {text!r}", hint="for example --set model.d_head=64")
    return path, parse_value(value, f"--set {text}")
