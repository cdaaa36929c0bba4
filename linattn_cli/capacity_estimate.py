"""How long a sweep would take: a few steps of its smallest and largest cells, timed side by side as in the sweep."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from linattn_cli.capacity import Cell
from linattn_cli.capacity_cell import job_of
from linattn_cli.capacity_workers import Pool
from linattn_cli.output import CliError

_SIZES = {"task.n_pairs", "task.seq_len", "task.updates"}
_FREE = _SIZES | {"train.lr", "seed", "train.steps", "train.warmup_steps"}
"""Settings whose cells share a probe: the time of a step is taken to be linear in its tokens."""

Timed = tuple[float, float, float]
"""Tokens a step, seconds a step, seconds to judge an example."""


def estimate(cells: Sequence[Cell], pool: Pool, device: str) -> dict[str, Any]:
    """Seconds for all cells on this pool, if none stops early, and what that was reckoned from."""
    families: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        families[_family(cell)].append(cell)
    ends = {name: [min(group, key=_tokens), max(group, key=_tokens)] for name, group in families.items()}
    probes = [cell for name in ends for cell in {cell.key: cell for cell in ends[name]}.values()]
    # Too few would have the machine to themselves, which the cells of the sweep do not.
    probes += [probes[index % len(probes)] for index in range(max(0, pool.slots - len(probes)))]
    timed = _time(probes, pool, device)
    seconds = [_cell_seconds(cell, [timed[end.key] for end in ends[_family(cell)]]) for cell in cells]
    return {
        "workers": pool.slots,
        "estimate_s": max(sum(seconds) / pool.slots, max(seconds)),
        "longest_cell_s": max(seconds),
        "estimate_is": "at most; cells may reach their target accuracy earlier"
        if any(cell.config.train.target_accuracy is not None for cell in cells)
        else "for all steps",
    }


def _family(cell: Cell) -> str:
    return json.dumps({key: value for key, value in cell.settings.items() if key not in _FREE}, sort_keys=True)


def _tokens(cell: Cell) -> float:
    return cell.tokens / cell.config.train.steps


def _time(probes: list[Cell], pool: Pool, device: str) -> dict[str, Timed]:
    waiting = list(enumerate(probes))
    running: dict[int, Cell] = {}
    timed: dict[str, Timed] = {}
    while waiting or running:
        while waiting and len(running) < pool.slots:
            number, cell = waiting.pop(0)
            running[number] = cell
            pool.submit(number, job_of(cell, device, kind="probe"))
        for number, outcome in pool.wait():
            cell = running.pop(number)
            if outcome["status"] != "finished":
                why = outcome["error"]["message"] if outcome["error"] else outcome["status"]
                raise CliError(
                    f"the probe of {cell.label} failed: {why}", hint="no cell like it would run", kind="probe"
                )
            figures = outcome["figures"]
            timed[cell.key] = (_tokens(cell), figures["step_s"], figures["example_s"])
    return timed


def _cell_seconds(cell: Cell, ends: list[Timed]) -> float:
    (few, fast_step, fast_example), (many, slow_step, slow_example) = ends
    share = (_tokens(cell) - few) / (many - few) if many > few else 0.0
    step_s = fast_step + share * (slow_step - fast_step)
    example_s = fast_example + share * (slow_example - fast_example)
    train = cell.config.train
    judgements = 1 + (train.steps // train.eval_every if train.eval_every else 1)
    return train.steps * step_s + judgements * train.eval_examples * example_s
