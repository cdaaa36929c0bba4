"""Task generators: labelled token sequences with no model and no global RNG.

`TASKS` names them; importing this package imports neither numpy nor torch.

>>> task = TASKS["mqar"].make({"n_pairs": 4, "protocol": "zoology"})
>>> task.input_len, task.chance()["chance_pairs"]
(16, 0.25)
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn_cli.tasks.types import Task


@dataclass(frozen=True)
class TaskSpec:
    """One task: what it is and where it lives; `target` is `module:class`, imported only when used."""

    name: str
    summary: str
    target: str

    def load(self) -> type:
        """The class of the task, a frozen dataclass of its settings."""
        module, attribute = self.target.split(":")
        return getattr(importlib.import_module(module), attribute)

    def make(self, config: Mapping[str, Any] | None = None) -> Task:
        """The task with these settings; unknown keys and impossible values raise `ValueError`."""
        settings = dict(config or {})
        name = settings.pop("name", self.name)
        if name != self.name:
            raise ValueError(f"this is the task {self.name!r}, the settings are for {name!r}")
        cls = self.load()
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                nearest = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}"
                raise ValueError(f"{self.name} has no setting {key!r}; {hint}")
        return cls(**settings)


TASKS: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(
            "mqar",
            "multi-query associative recall: answer keys with their latest value (protocols vla, zoology)",
            "linattn_cli.tasks.mqar:Mqar",
        ),
        TaskSpec(
            "copy",
            "repeat a sequence after a separator",
            "linattn_cli.tasks.copy:Copy",
        ),
    )
}


def make_task(name: str, config: Mapping[str, Any] | None = None) -> Task:
    """The task called `name`; an unknown name raises `ValueError` with the nearest one.

    >>> make_task("copy", {"seq_len": 5}).input_len
    10
    """
    if name not in TASKS:
        nearest = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(TASKS)}"
        raise ValueError(f"unknown task {name!r}; {hint}")
    return TASKS[name].make(config)
