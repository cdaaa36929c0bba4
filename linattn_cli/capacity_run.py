"""`linattn capacity-sweep`: run what is missing of a grid, keep each cell as it ends, and report."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn_cli import capacity_report as report
from linattn_cli.capacity import IMMATERIAL, Cell, cells_of
from linattn_cli.capacity_cell import Outcome, job_of
from linattn_cli.capacity_store import LOG, RECIPE, SweepFolder, resume_command
from linattn_cli.capacity_workers import LocalPool, Pool
from linattn_cli.config import load_run_config
from linattn_cli.experiment import differences
from linattn_cli.output import EXIT_INTERRUPTED, EXIT_TERMINATED, CliError, Document, Terminated
from linattn_cli.render import cell as shown
from linattn_cli.settings import RunConfig, SweepConfig

if TYPE_CHECKING:
    import torch

ATTEMPTS = 2
"""How often a cell is tried whose worker crashed or ran out of memory."""

STREAMS = 4
"""Cells that a worker trains side by side on a GPU, where the command line does not say."""


@dataclass(frozen=True)
class Request:
    """The command line of `capacity-sweep`; None is not given.

    overrides  dedicated options by dotted key, lists already parsed
    workers    None is one a core over the threads of a cell, or on a GPU eight for each
    streams    None is `STREAMS` on a GPU where every cell can be recorded, else 1
    """

    recipe: str | None = None
    sets: list[str] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    out: Path | None = None
    resume: bool = False
    workers: int | None = None
    ray: str | None = None
    plot: Path | None = None
    keep_weights: bool = False
    dry_run: bool = False
    report: bool = False
    trust: bool = False
    streams: int | None = None


def run(request: Request, doc: Document) -> None:
    """Fill `doc`: one row a cell, the aggregated table in the summary, failure if cells failed."""
    from linattn_cli.plotting import check_plot_path

    if request.plot is not None:
        check_plot_path(request.plot, coming=request.out)
    if request.resume and request.out is None:
        raise CliError("--resume needs the folder of the sweep", hint="add --out FOLDER")
    if request.report:
        _report_only(request, doc)
        return
    with contextlib.ExitStack() as stack:
        folder = None
        if request.resume:
            assert request.out is not None
            folder = stack.enter_context(SweepFolder.resume(request.out))
        config = _load(request)
        cells = cells_of(config)
        if request.dry_run:
            _dry_run(request, doc, config, cells if folder is None else folder.missing_of(cells))
            return
        device = _begin(doc, config, request)
        if folder is None:
            folder = stack.enter_context(SweepFolder.create(request.out, config))
        _enter(folder, config, cells, request, doc)
        _run_missing(folder, config, device, request, doc)
        _report(folder, config, doc, request)
    doc.note(f"saved in {folder.path}: every cell in sweep.sqlite, table cells")
    doc.note(f"next: more seeds with {resume_command(folder.path)} --seeds 0,1,2; any SQLite tool reads it")


def _report_only(request: Request, doc: Document) -> None:
    """Report what there is of a sweep, also while another process runs it."""
    if request.out is None:
        raise CliError("--report needs the folder of the sweep", hint="add --out FOLDER")
    with SweepFolder.look(request.out) as folder:
        config = _load(replace(request, resume=True))
        doc.config = config
        _report(folder, config, doc, request)
        if missing := len(folder.missing()):
            doc.note(f"{missing} of {len(folder.rows())} cells are still to run: {resume_command(folder.path)}")


def _load(request: Request) -> RunConfig:
    """The recipe; on a resume the one of the folder, where no other is given, and it must be of the same base."""
    if not request.resume:
        return load_run_config(request.recipe, request.sets, _overrides(request, request.recipe), trust=request.trust)
    assert request.out is not None
    first = str(request.out / RECIPE)
    stored = load_run_config(first, trust=request.trust)
    config = load_run_config(
        request.recipe or first, request.sets, _overrides(request, request.recipe or first), trust=request.trust
    )
    before, after = (each.model_dump(mode="json", exclude={"sweep"}) for each in (stored, config))
    for key, old, new in differences(before, after):
        if key not in IMMATERIAL:
            raise CliError(
                f"the sweep in {request.out} was started with {key} = {old}, not {new}",
                hint="a resume may add to the grid, the rest stays; choose another --out for another sweep",
                kind="run_folder",
            )
    before_threads, threads = ((each.sweep or SweepConfig()).threads for each in (stored, config))
    if before_threads != threads:
        raise CliError(
            f"the sweep in {request.out} was started with sweep.threads = {before_threads}, not {threads}",
            hint="sums over another number of threads round differently; choose another --out",
            kind="run_folder",
        )
    return config


def _overrides(request: Request, recipe: str | None) -> dict[str, Any]:
    """The options; a list given on the command line replaces that list in the further grids of the recipe too."""
    from linattn_cli.recipe import read_recipe

    overrides = dict(request.overrides)
    given = {key.rpartition(".")[2] for key, value in overrides.items() if key.startswith("sweep.") and value}
    data = read_recipe(recipe).data if recipe else {}
    sweep = data.get("sweep")
    more = sweep.get("more") if isinstance(sweep, dict) else None
    set_anew = any(text.partition("=")[0].strip() == "sweep.more" for text in request.sets or [])
    if given and not set_anew and isinstance(more, list) and all(isinstance(grid, dict) for grid in more):
        overrides["sweep.more"] = [{key: value for key, value in grid.items() if key not in given} for grid in more]
    return overrides


def _begin(doc: Document, config: RunConfig, request: Request) -> torch.device:
    from linattn_cli import environment

    device = environment.resolve_device(config.train.device)
    environment.resolve_dtype(config.train.dtype, device)
    if (request.streams or 1) > 1 and (request.ray is not None or device.type != "cuda"):
        raise CliError(
            f"--streams {request.streams} needs a GPU of this machine, not "
            + (f"the {device.type.upper()}" if request.ray is None else "--ray"),
            hint="leave it out; --workers says how many cells are trained at a time",
        )
    doc.config = config
    doc.memory_hint = "lower --workers, --streams, the batch size, the sequence length or d_model"
    dtype = config.train.dtype
    doc.begin(device=device, dtype=dtype, impl=environment.resolve_impl(config.model.impl, device, dtype))
    return device


def _enter(folder: SweepFolder, config: RunConfig, cells: list[Cell], request: Request, doc: Document) -> None:
    """Put the grid into the database; say what a resume adds to it."""
    new = folder.add(cells)
    if request.resume and new:
        path = folder.add_recipe(config)
        doc.log(f"{len(new)} cells are new to this sweep; their grid is kept in {path}")


def _run_missing(folder: SweepFolder, config: RunConfig, device: torch.device, request: Request, doc: Document) -> None:
    missing = folder.missing()
    total = len(folder.rows())
    if not missing:
        doc.log("every cell is there already")
        return
    for cell in missing:
        folder.begin(cell)
    told = _teller(missing)
    with doc.progress(total, "cells", work=sum(cell.tokens for cell in missing)) as bar:
        bar.log(f"sweep folder {folder.path}: {len(missing)} of {total} cells to run")
        bar.skip(total - len(missing))
        try:
            streams = choose_streams(missing, device, request, bar.log)
            with make_pool(config, device, request, len(missing), streams=streams, log=folder.path / LOG) as pool:
                bar.log(f"{pool.slots} at a time, CPU threads a cell: {missing[0].threads}")
                for cell, outcome, attempts in run_cells(
                    missing, pool, str(device), log=bar.log, weights=request.keep_weights
                ):
                    row = folder.record(cell, outcome, attempts=attempts, env=doc.env)
                    if row["status"] != "finished":
                        bar.log(f"{row['status']}: {cell.label}: {row['error']}")
                    reached = row["accuracy"] if row["status"] == "finished" else row["status"]
                    bar.update(1, worked=cell.tokens, last=f"{told(cell)}: {shown(reached)}")
        except KeyboardInterrupt as error:
            _report(folder, config, doc, request)
            left = len(folder.missing())
            terminated = isinstance(error, Terminated)
            raise CliError(
                f"{'terminated' if terminated else 'interrupted'}: {total - left} of {total} cells are kept",
                hint=f"continue: {resume_command(folder.path)}",
                exit_code=EXIT_TERMINATED if terminated else EXIT_INTERRUPTED,
                kind="terminated" if terminated else "interrupted",
            ) from None


def _teller(cells: list[Cell]) -> Callable[[Cell], str]:
    """A short name for each of these cells: its model, and the settings in which they differ."""
    varying = [name for name in cells[0].place if len({cell.place[name] for cell in cells}) > 1 and name != "model"]
    return lambda cell: " ".join([cell.arm, *(f"{name} {shown(cell.place[name])}" for name in varying)])


def choose_streams(
    cells: list[Cell], device: torch.device, request: Request, log: Callable[[str], object] = lambda _: None
) -> int:
    """How many cells a worker trains side by side.

    One, unless all are recorded as CUDA graphs: the host sets the pace of the others, and it runs one thread at a
    time. Code of the user's own may draw global random numbers, and so is never beside another's.
    """
    if device.type != "cuda" or request.ray is not None:
        return 1
    from linattn_cli.cuda_graph import will_record

    other = next((cell for cell in cells if not will_record(cell.config, device)), None)
    if other is None:
        return request.streams or STREAMS
    if (request.streams or 1) > 1:
        log(f"one cell at a time in a worker, not {request.streams}: no CUDA graph for {other.label}")
    return 1


def make_pool(
    config: RunConfig, device: torch.device, request: Request, jobs: int, *, streams: int = 1, log: Path
) -> Pool:
    """Workers on this machine, or on a Ray cluster with `--ray`."""
    threads = (config.sweep or SweepConfig()).threads
    if request.ray is not None:
        from linattn_cli.capacity_ray import RayPool

        return RayPool(request.ray, request.workers, threads=threads, device=config.train.device)
    devices = _devices(config.train.device, device)
    workers = max(1, min(request.workers or default_workers(devices, threads), jobs))
    streams = min(streams, -(-jobs // workers))
    return LocalPool(workers, devices=devices, threads=threads, log=log, streams=streams)


def default_workers(devices: list[str], threads: int) -> int:
    """A worker for as many threads as there are cores; on GPUs eight each, as far as the cores go."""
    from linattn_cli.environment import usable_cores

    cores = max(1, usable_cores() // threads)
    return cores if devices == ["cpu"] else min(cores, 8 * len(devices))


def _devices(asked: str, device: torch.device) -> list[str]:
    """Every GPU where none was named, else the one device."""
    import torch

    if device.type == "cuda" and asked in ("auto", "cuda"):
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [str(device)]


def run_cells(
    cells: list[Cell], pool: Pool, device: str, *, log: Callable[[str], object], weights: bool = False
) -> Iterator[tuple[Cell, Outcome, int]]:
    """Run cells, the longest first, and yield each as it ends, with the number of attempts.

    A cell whose worker crashed, or that ran out of memory, is tried once more when the others are under way, alone in
    its worker: the first time the fault may have been a neighbour's.
    """
    fresh = deque(sorted(cells, key=lambda cell: -cell.tokens))
    again: deque[Cell] = deque()
    running: dict[int, tuple[Cell, int]] = {}
    number = 0
    while fresh or again or running:
        while len(running) < pool.slots and (fresh or (again and pool.can_be_alone())):
            cell, attempt = (fresh.popleft(), 1) if fresh else (again.popleft(), ATTEMPTS)
            number += 1
            running[number] = cell, attempt
            pool.submit(number, job_of(cell, device, weights=weights), alone=attempt > 1)
        for done, outcome in pool.wait():
            cell, attempt = running.pop(done)
            error = outcome["error"]
            retry = outcome["status"] == "crashed" or (error is not None and error["type"] == "memory")
            if retry and attempt < ATTEMPTS:
                log(f"once more: {cell.label}: {error['message'] if error else ''}")
                again.append(cell)
            else:
                yield cell, outcome, attempt


def _report(folder: SweepFolder, config: RunConfig, doc: Document, request: Request) -> None:
    rows = folder.rows()
    found = report.groups(rows)
    doc.results = report.result_rows(rows)
    states = [row["status"] for row in rows]
    doc.summary = {
        "cells": len(rows),
        **{state: states.count(state) for state in ("finished", "diverged", "failed", "pending")},
        "train_s": sum(row["train_s"] or 0.0 for row in rows),
        "steps": sum(row["steps"] or 0 for row in rows),
        "sweep": str(folder.path),
        "table": found,
    }
    doc.tables = _tables(rows, found, config, doc)
    if request.plot is not None:
        from linattn_cli import plotting
        from linattn_cli.capacity_plot import picture

        env = doc.env | report.machines(rows)
        plotting.save(request.plot, picture(config.model_dump(mode="json"), env, found))
        doc.note(f"plot saved in {request.plot}")
    if failed := states.count("failed"):
        doc.fail(
            f"{failed} of {len(rows)} cells failed; the others are kept",
            hint=f"the reasons are in the column error; run them again: {resume_command(folder.path)}",
        )


def _tables(
    rows: list[dict[str, Any]], found: list[dict[str, Any]], config: RunConfig, doc: Document
) -> list[tuple[str, list[dict[str, Any]]]]:
    """The small table at the recipe's own rate where others were tried too, at the best rate, and the long one."""
    tables = []
    rates = {row["lr"] for row in rows}
    own = config.train.lr
    if len(rates) > 1 and own in rates:
        fixed = report.groups_at(rows, own)
        doc.summary["table_at_lr"] = fixed
        across, small = report.pivot(fixed)
        tables.append((f"Held-out accuracy at lr {own:g}, by {across}:", small))
    across, small = report.pivot(found)
    at = "at the best lr, chosen on validation data" if len(rates) > 1 else f"at lr {next(iter(rates)):g}"
    tables.append((f"Held-out accuracy {at}, by {across}; mean [least, largest] over seeds:", small))
    tables.append((f"In full {at}:", report.detail(found)))
    return tables


def _dry_run(request: Request, doc: Document, config: RunConfig, cells: list[Cell]) -> None:
    from linattn_cli.capacity_estimate import estimate

    device = _begin(doc, config, request)
    if not cells:
        doc.log("every cell is there already")
        doc.summary = {"cells": 0, "steps": 0}
        return
    doc.results = [{**cell.place, "steps": cell.config.train.steps, "tokens": cell.tokens} for cell in cells]
    streams = choose_streams(cells, device, request, doc.log)
    with make_pool(config, device, request, len(cells), streams=streams, log=Path(os.devnull)) as pool:
        started = time.perf_counter()
        found = estimate(cells, pool, str(device))
        doc.log(f"probed in {time.perf_counter() - started:.0f} s")
    doc.summary = {
        "cells": len(cells),
        "steps": sum(cell.config.train.steps for cell in cells),
        "tokens": sum(cell.tokens for cell in cells),
        **found,
    }
    doc.note("nothing was run; leave out --dry-run to run it")
