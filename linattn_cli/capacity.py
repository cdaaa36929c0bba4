"""The grid of `linattn capacity-sweep`: from a recipe to cells, each a whole training run. No torch here.

A cell needs nothing but its configuration. Its key is a digest of everything that decides its figures, so the
same cell is recognised in another grid, by another process and after a kill.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from linattn_cli.config import derive
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.output import CliError
from linattn_cli.own_mixer import is_own
from linattn_cli.recipe import nearest, parse_value
from linattn_cli.settings import RunConfig, Scalar, SweepConfig, SweepGrid, split_arm

Changes = dict[str, Scalar]

LISTS = {
    "n_pairs": "task.n_pairs",
    "d_heads": "model.d_head",
    "seq_lens": "task.seq_len",
    "lrs": "train.lr",
    "seeds": "seed",
}
"""Lists of a sweep with a name of their own, and the dotted key that each sets."""

IMMATERIAL = {"train.device", "train.log_every", "train.checkpoint_every", "train.cuda_graph"}
"""Keys that do not decide what a cell reaches (another device rounds differently, and is noted beside it)."""


@dataclass(frozen=True)
class Arm:
    """One row of the table: a mixer, or a variant of one, and the dotted keys that make it."""

    name: str
    changes: Changes


@dataclass(frozen=True)
class Cell:
    """One training run of a sweep.

    arm      name of the model in tables
    config   everything that decides the run
    threads  CPU threads it computes with
    """

    arm: str
    config: RunConfig
    threads: int = 1

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted keys of all settings; the length as the task resolves it."""
        flat = dict(flatten(self.config.model_dump(mode="json", exclude={"sweep"})))
        return flat | {"task.seq_len": self.task_settings.get("seq_len")}

    @cached_property
    def task_settings(self) -> dict[str, Any]:
        from linattn_cli.tasks import make_task

        return make_task(self.config.task.name, self.config.task.model_dump()).config()

    @cached_property
    def key(self) -> str:
        """12 hex digits that change with anything that decides the figures."""
        material = {key: value for key, value in self.settings.items() if key not in IMMATERIAL}
        text = json.dumps([material, self.threads], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @cached_property
    def tokens(self) -> int:
        """Tokens trained on if no target stops the run."""
        from linattn_cli.tasks import make_task

        task = make_task(self.config.task.name, self.config.task.model_dump())
        return self.config.train.steps * self.config.train.batch_size * task.input_len

    @property
    def place(self) -> dict[str, Any]:
        """What the cell is called in rows and tables."""
        settings = self.settings
        return {
            "model": self.arm,
            "n_pairs": settings.get("task.n_pairs"),
            "d_head": settings["model.d_head"],
            "seq_len": settings["task.seq_len"],
            "lr": settings["train.lr"],
            "seed": settings["seed"],
        }

    @property
    def label(self) -> str:
        """The cell in words."""
        return " ".join(f"{key} {_short(value)}" for key, value in self._told)

    @property
    def folder(self) -> str:
        """Name of its run folder, readable and never another cell's."""
        words = "-".join(_short(value) for _, value in self._told)
        return f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', words)[:80]}-{self.key}"

    @property
    def _told(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self.place.items() if value is not None]


def cells_of(config: RunConfig) -> list[Cell]:
    """Every cell of a recipe's grids, each once, in the order written.

    Raises `CliError` (exit 2) for a key that two lists set, for arms that are the same, and for a cell that is
    impossible, which it names.

    >>> sweep = SweepConfig(models=["vla", "vla:penalty=none"], n_pairs=[4, 8], seeds=[0, 1])
    >>> [cell.label for cell in cells_of(RunConfig(sweep=sweep))][3:5]
    ['model vla n_pairs 8 d_head 32 seq_len 25 lr 0.0003 seed 1', 'model vla:penalty=none n_pairs 4 d_head 32 \
seq_len 13 lr 0.0003 seed 0']
    """
    sweep = config.sweep or SweepConfig()
    found: dict[str, Cell] = {}
    for grid in _grids(sweep):
        for arm, changes in _combinations(grid, sweep, config):
            place = ", ".join(f"{key} = {value}" for key, value in changes.items())
            label = f"the cell of {arm.name}" + (f" with {place}" if place else "")
            cell = Cell(arm.name, derive(config, arm.changes | changes, label=label), sweep.threads)
            same = found.setdefault(cell.key, cell)
            if same.arm != cell.arm:
                raise CliError(
                    f"{same.arm} and {cell.arm} are the same model", hint="drop one of the two", kind="recipe"
                )
    return list(found.values())


def _grids(sweep: SweepConfig) -> Iterator[SweepGrid]:
    yield sweep
    for further in sweep.more:
        own = {name: value for name in SweepGrid.model_fields if (value := getattr(further, name))}
        yield sweep.model_copy(update=own)


def _combinations(grid: SweepGrid, sweep: SweepConfig, config: RunConfig) -> Iterator[tuple[Arm, Changes]]:
    names = grid.models or list(sweep.variants) or [config.model.name]
    arms = [parse_arm(name, sweep.variants) for name in names]
    axes: list[list[Changes]] = []
    if grid.points:
        axes.append(list(grid.points))
    lists: dict[str, list[Any]] = {key: getattr(grid, name) for name, key in LISTS.items()}
    tuned = {key: lists.pop(key) for key in ("train.lr", "seed")}
    for key, values in (lists | grid.grid | tuned).items():
        if values:
            axes.append([{key: value} for value in values])
    _refuse_two_values(grid, arms)
    for arm in arms:
        for combination in itertools.product(*axes):
            yield arm, {key: value for changes in combination for key, value in changes.items()}


def _refuse_two_values(grid: SweepGrid, arms: list[Arm]) -> None:
    """A key has one value in a cell: lists, points, grid and arms must not set the same one."""
    owners = {key: name for name, key in LISTS.items() if getattr(grid, name)}
    claims = [*((key, "points") for point in grid.points for key in point), *((key, "grid") for key in grid.grid)]
    claims += [(key, arm.name) for arm in arms for key in arm.changes]
    for key, name in claims:
        owner = owners.setdefault(key, name)
        by_arms = owner in {arm.name for arm in arms}
        if owner != name and not (by_arms and name in {arm.name for arm in arms}):
            raise CliError(f"sweep: {key} is set by {owner} and by {name}", hint="keep one of the two", kind="recipe")


def parse_arm(name: str, variants: Mapping[str, Changes] | None = None) -> Arm:
    """The arm of a name: a variant, a mixer, or a mixer with `:option=value` or `:dotted.key=value` behind it.

    >>> parse_arm("vla:penalty=none:model.short_conv=4").changes
    {'model.name': 'vla', 'model.options.penalty': 'none', 'model.short_conv': 4}
    """
    head, tail = split_arm(name)
    known = variants or {}
    if head in known:
        changes = dict(known[head])
    elif head in MIXERS or is_own(head):
        changes = {"model.name": head}
    else:
        names = [*MIXERS, *known]
        raise CliError(f"there is no model {head!r}{nearest(head, names)}", hint=f"there are {', '.join(names)}")
    for setting in tail:
        key, equals, value = setting.partition("=")
        if not equals or not key or not value:
            raise CliError(f"model {name}: {setting!r} is no setting", hint="write vla:penalty=none:readout=raw")
        changes[key if "." in key or key == "seed" else f"model.options.{key}"] = parse_value(value, f"model {name}")
    return Arm(name, changes)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by dotted key.

    >>> dict(flatten({"train": {"lr": 1}}))
    {'train.lr': 1}
    """
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
