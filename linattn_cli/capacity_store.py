"""The folder of a sweep: one SQLite file that has every cell, and a run folder for each.

    sweep.yaml      the recipe with its grid (sweep-2.yaml, ... where a resume added cells)
    sweep.sqlite    table `cells`, one row a cell; plain columns, see `COLUMNS`
    runs/           recipe.yaml, metrics.jsonl and result.json of each cell
    workers.log     what worker processes printed

A row is written in one transaction when its cell is over, so a sweep that is killed keeps every finished cell.
This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from linattn_cli.capacity import Cell
from linattn_cli.capacity_cell import Outcome
from linattn_cli.config import dump_recipe
from linattn_cli.experiment import record_recipe
from linattn_cli.output import CliError, write_stderr
from linattn_cli.recipe import read_recipe
from linattn_cli.runs import RunFolder, make_numbered, newer_format, storage_errors, write_atomic
from linattn_cli.settings import RunConfig

DATABASE = "sweep.sqlite"
RECIPE = "sweep.yaml"
RUNS = "runs"
LOG = "workers.log"
SCHEMA_VERSION = 1

COLUMNS = {
    "key": "TEXT PRIMARY KEY",
    "model": "TEXT NOT NULL",
    "mixer": "TEXT NOT NULL",
    "task": "TEXT NOT NULL",
    "n_pairs": "INTEGER",
    "updates": "INTEGER",
    "seq_len": "INTEGER",
    "vocab_size": "INTEGER",
    "d_model": "INTEGER",
    "d_head": "INTEGER",
    "heads": "INTEGER",
    "layers": "INTEGER",
    "short_conv": "INTEGER",
    "lr": "REAL",
    "seed": "INTEGER",
    "threads": "INTEGER",
    "status": "TEXT NOT NULL",
    "accuracy": "REAL",
    "loss": "REAL",
    "exact_sequence_accuracy": "REAL",
    "validation_accuracy": "REAL",
    "validation_loss": "REAL",
    "chance_vocab": "REAL",
    "chance_pairs": "REAL",
    "parameters": "INTEGER",
    "state_bytes": "INTEGER",
    "steps": "INTEGER",
    "stopped_by": "TEXT",
    "train_s": "REAL",
    "wall_s": "REAL",
    "tokens_per_s": "REAL",
    "device": "TEXT",
    "device_name": "TEXT",
    "impl": "TEXT",
    "fingerprint": "TEXT",
    "attempts": "INTEGER NOT NULL DEFAULT 0",
    "error_type": "TEXT",
    "error": "TEXT",
    "run": "TEXT",
    "finished_at": "TEXT",
    "config": "TEXT NOT NULL",
}
"""Columns of the table `cells`. status: pending, finished, diverged, failed; config: all settings, as JSON;
run: the run folder, relative to the sweep's."""

LOCK_TIMEOUT_S = 30.0

DONE = ("finished", "diverged")
"""States that a resume leaves alone: both are results, the second that training left the finite numbers."""

TIMING = ("train_s", "wall_s", "tokens_per_s", "attempts", "finished_at", "device", "device_name")
"""Columns that differ between two runs of the same cell."""


class SweepFolder:
    """The folder of one sweep, owned by this process until `close`.

    Raises `CliError` (exit 2) when the folder exists already (`create`), holds no sweep (`resume`) or belongs to
    another process; exit 4 when the disk is full.
    """

    def __init__(self, path: Path, lock: RunFolder | None, database: sqlite3.Connection) -> None:
        self.path = path
        self._lock = lock
        self._database = database

    @classmethod
    def create(cls, out: Path | None, config: RunConfig) -> SweepFolder:
        """A new folder, `out` or the first free `runs/sweep-N`."""
        if out is None:
            path = make_numbered(Path("runs"), "sweep")
        else:
            path = out
            if (path / DATABASE).exists():
                raise CliError(
                    f"there is a sweep in {path} already",
                    hint=f"continue it: {resume_command(path)}; or choose another --out",
                    kind="run_folder",
                )
            if path.exists():
                hint = "choose another --out, or remove it yourself"
                raise CliError(f"{path} exists already", hint=hint, kind="run_folder")
            with storage_errors(path):
                path.mkdir(parents=True)
        lock = RunFolder(path)
        lock.acquire()
        try:
            with storage_errors(path):
                (path / RUNS).mkdir()
            write_atomic(path / RECIPE, dump_recipe(config))
            folder = cls(path, lock, _open(path / DATABASE))
            folder._make_table()
        except BaseException:
            lock.close()
            raise
        return folder

    @classmethod
    def look(cls, path: Path) -> SweepFolder:
        """Read a sweep without owning it, so also one that runs."""
        _require_sweep(path)
        folder = cls(path, None, _open(path / DATABASE))
        folder._check()
        return folder

    @classmethod
    def resume(cls, path: Path) -> SweepFolder:
        """Take over the folder of an earlier sweep, which may have been killed before it had its table."""
        if not (path / RECIPE).is_file():
            _require_sweep(path)
        lock = RunFolder(path)
        lock.acquire()
        try:
            with storage_errors(path):
                (path / RUNS).mkdir(exist_ok=True)
            folder = cls(path, lock, _open(path / DATABASE))
            if not folder._has_tables():
                folder._make_table()
            folder._check()
            lock.clear_leftovers()
        except BaseException:
            lock.close()
            raise
        return folder

    def __enter__(self) -> SweepFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back."""
        self._database.close()
        if self._lock is not None:
            self._lock.close()

    def add(self, cells: Iterable[Cell]) -> list[Cell]:
        """Enter cells as pending, and return those that were not there yet."""
        known = {row["key"] for row in self.rows()}
        new = [cell for cell in cells if cell.key not in known]
        if new:
            entries = [_entry(cell) for cell in new]
            marks = ", ".join(f":{name}" for name in entries[0])
            self._write(f"INSERT INTO cells ({', '.join(entries[0])}) VALUES ({marks})", entries)
        return new

    def add_recipe(self, config: RunConfig) -> Path:
        """Keep the recipe of a resume that added cells, beside the first one."""
        number = 2
        while (path := self.path / f"sweep-{number}.yaml").exists():
            number += 1
        write_atomic(path, dump_recipe(config))
        return path

    def rows(self) -> list[dict[str, Any]]:
        """Every cell, in the order entered."""
        with database_errors(self.path):
            found = self._database.execute("SELECT * FROM cells ORDER BY rowid").fetchall()
        return [dict(row) for row in found]

    def missing(self) -> list[Cell]:
        """Cells still to be run: pending ones, and those that failed."""
        return [self._cell_of(row) for row in self.rows() if row["status"] not in DONE]

    def _cell_of(self, row: dict[str, Any]) -> Cell:
        """The cell of a row, whoever wrote it."""
        try:
            return cell_of(row)
        except (ValueError, TypeError, RecursionError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CliError(
                f"{self.path / DATABASE} is damaged: the cell {row['key']} cannot be read: {reason}",
                hint="restore it from a copy, or start again with another --out",
                kind="file",
            ) from None

    def missing_of(self, cells: Iterable[Cell]) -> list[Cell]:
        """What a resume with this grid would run, without entering it."""
        known = {row["key"] for row in self.rows()}
        return [*self.missing(), *(cell for cell in cells if cell.key not in known)]

    def begin(self, cell: Cell) -> None:
        """Clear what an unfinished earlier run of the cell left."""
        shutil.rmtree(self.path / RUNS / cell.folder, ignore_errors=True)

    def record(self, cell: Cell, outcome: Outcome, *, attempts: int, env: dict[str, Any]) -> dict[str, Any]:
        """Keep a cell that is over, its run folder first and its row last; return the row."""
        status = "failed" if outcome["status"] == "crashed" else outcome["status"]
        error = outcome["error"]
        row = _entry(cell) | {name: value for name, value in outcome["figures"].items() if name in COLUMNS}
        row |= {
            "status": status,
            "attempts": attempts,
            "error_type": error["type"] if error else None,
            "error": error["message"] if error else None,
            "run": f"{RUNS}/{cell.folder}",
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self._write_run(cell, outcome, row, env)
        marks = ", ".join(f"{name} = :{name}" for name in row if name != "key")
        self._write(f"UPDATE cells SET {marks} WHERE key = :key", [row])
        return row

    def _write_run(self, cell: Cell, outcome: Outcome, row: dict[str, Any], env: dict[str, Any]) -> None:
        run = RunFolder(self.path / RUNS / cell.folder)
        with storage_errors(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        with run:
            record_recipe(run, cell.config)
            for line in outcome["metrics"]:
                run.append_metrics(line)
            for name, data in outcome["files"].items():
                path = run.path / name
                with storage_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
            run.write_result(
                {
                    "schema_version": 1,
                    "command": "capacity-sweep",
                    "status": "ok" if row["status"] == "finished" else "failed",
                    "env": {**env, "device": row.get("device"), "seed": cell.config.seed},
                    "config": cell.config,
                    "results": [],
                    "summary": outcome["figures"] | {"run": row["run"]},
                    "error": outcome["error"],
                }
            )

    def _write(self, statement: str, rows: list[dict[str, Any]] | None = None) -> None:
        while True:
            try:
                with database_errors(self.path), self._database:
                    if rows is None:
                        self._database.execute(statement)
                    else:
                        self._database.executemany(statement, rows)
                return
            except CliError as error:
                if error.kind != "in_use":
                    raise
                # A reader that forgot to let go must not cost a sweep of hours.
                write_stderr(f"warning: {error.message}: waiting; {error.hint}")

    def _has_tables(self) -> bool:
        with database_errors(self.path):
            (count,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return bool(count)

    def _make_table(self) -> None:
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        self._write(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._write(f"CREATE TABLE cells ({columns})")

    def _check(self) -> None:
        with database_errors(self.path):
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            columns = {row["name"] for row in self._database.execute("PRAGMA table_info(cells)")}
        if version > SCHEMA_VERSION:
            writer = ""
            with contextlib.suppress(CliError):
                writer = read_recipe(str(self.path / RECIPE)).written_by or ""
            raise newer_format(self.path / DATABASE, writer, version, SCHEMA_VERSION)
        if not columns >= set(COLUMNS):
            raise CliError(
                f"{self.path / DATABASE} is no database of a sweep: the table cells lacks columns",
                hint="start again with another --out",
                kind="run_folder",
            )


class database_errors:
    """Turns what SQLite refuses into one line that names the file and the remedy."""

    def __init__(self, path: Path) -> None:
        self.path = path / DATABASE

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, sqlite3.Error):
            return
        text = str(error)
        if "full" in text:
            hint, code, what = "free some space, then continue with --resume", 4, "disk"
        elif "locked" in text:
            hint, code, what = "close the program that reads it", 2, "in_use"
        elif "readonly" in text:
            # Reading needs no writing, but for undoing what a killed process left half written.
            hint, code, what = "a write was cut off: copy the folder to where it can be written", 2, "file"
        else:
            hint, code, what = "restore it from a copy, or start again with another --out", 2, "file"
        raise CliError(f"{self.path}: {text}", hint=hint, exit_code=code, kind=what) from error


def _require_sweep(path: Path) -> None:
    if not (path / DATABASE).is_file():
        what = "has no sweep" if path.is_dir() else "does not exist"
        raise CliError(
            f"{path} {what}: there is no {DATABASE}",
            hint="`linattn capacity-sweep --out FOLDER` without --resume and --report begins one",
            kind="run_folder",
        )


def resume_command(path: Path) -> str:
    """The command that continues a sweep, quoted for a shell.

    >>> resume_command(Path("runs/sweep-1"))
    'linattn capacity-sweep --resume --out runs/sweep-1'
    """
    return f"linattn capacity-sweep --resume --out {shlex.quote(str(path))}"


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell of a row of the database."""
    return Cell(row["model"], RunConfig.model_validate(json.loads(row["config"])), row["threads"])


def _entry(cell: Cell) -> dict[str, Any]:
    """The columns of a cell that has not run."""
    settings = cell.settings
    task = {name: settings.get(f"task.{name}") for name in ("n_pairs", "updates", "seq_len", "vocab_size")}
    model = {name: settings[f"model.{name}"] for name in ("d_model", "d_head", "heads", "layers", "short_conv")}
    config = cell.config.model_dump(mode="json", exclude={"sweep"})
    return {
        "key": cell.key,
        "model": cell.arm,
        "mixer": settings["model.name"],
        "task": settings["task.name"],
        **task,
        **model,
        "lr": settings["train.lr"],
        "seed": settings["seed"],
        "threads": cell.threads,
        "status": "pending",
        "config": json.dumps(config),
    }


def _open(path: Path) -> sqlite3.Connection:
    with database_errors(path.parent):
        # A reader may hold the file for a while; a rollback journal also works on network file systems.
        database = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)
        database.row_factory = sqlite3.Row
        database.execute("PRAGMA synchronous = FULL")
    return database
