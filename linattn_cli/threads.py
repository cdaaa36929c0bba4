"""How OpenMP threads wait; decided before torch is imported, which is when OpenMP reads it."""

from __future__ import annotations

import os

BUSY_LOAD = 0.6
"""Running processes a core above which the machine counts as shared."""


def share_the_cores() -> None:
    """Let OpenMP threads sleep while they wait, where other work runs on this machine.

    By default they spin. Alone on the machine that is a third faster for the small matrices of a step; with one
    other busy process it makes a training step ten times slower, because a thread that spins holds the core that
    the thread it waits for needs. An `OMP_WAIT_POLICY` that is set already is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ and _load_per_core() > BUSY_LOAD:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def _load_per_core() -> float:
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):  # not every system keeps a load average
        return 0.0
