"""The table `cells` of a sweep, as the tests that run, kill and resume sweeps read it."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from linattn_cli.capacity_store import DATABASE, TIMING


def cells(path: Path) -> list[dict[str, Any]]:
    """Every row of the sweep in the folder `path`.

    Opened for writing: after a kill in the middle of a write, whoever reads first has to undo that write.
    """
    with contextlib.closing(sqlite3.connect(f"file:{path / DATABASE}?mode=rw", uri=True, timeout=30)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM cells ORDER BY rowid")]


def measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must repeat: everything but the clock."""
    return [{name: value for name, value in row.items() if name not in TIMING} for row in rows]


HALF_A_WRITE = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 1")  # changed pages go to the disk before the write is complete
database.execute("BEGIN IMMEDIATE")
database.execute("UPDATE cells SET status = 'half written'")
database.execute("CREATE TABLE other AS SELECT zeroblob(1000000)")
os.kill(os.getpid(), signal.SIGKILL)
"""


def cut_off_a_write(path: Path) -> None:
    """kill -9 a process in the middle of a write to the sweep in `path`, which leaves the journal of that write."""
    killed = subprocess.run([sys.executable, "-c", HALF_A_WRITE, str(path / DATABASE)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (path / f"{DATABASE}-journal").exists(), "nothing was left to undo"
