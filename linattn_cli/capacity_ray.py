"""Cells of a sweep on a Ray cluster: the same `Pool` as the worker processes of this machine.

Every node needs linattn installed; a cell is sent as its configuration and comes back as figures and lines of
metrics. The database and the run folders are written here, by the process that drives the sweep.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import traceback
from types import TracebackType
from typing import Any

from linattn_cli.capacity_cell import Outcome, Work, crashed, work
from linattn_cli.capacity_workers import Finished
from linattn_cli.output import EXIT_DEVICE, CliError

EXTRA = "pip install 'linattn[ray]'"


class RayPool:
    """Jobs on the cluster at `address`; `local` starts one on this machine, `auto` finds a running one.

    workers  jobs at a time; None is what the cluster's CPUs hold
    device   a job asks the cluster for its share of a GPU where this is `cuda`, or `auto` and there are any

    Raises `CliError` (exit 3) when ray is not installed or the cluster does not answer.
    """

    def __init__(self, address: str, workers: int | None, *, threads: int, device: str) -> None:
        self._ray = ray = _import_ray()
        self._device = device
        self._threads = threads
        with _signals_kept():
            self._connect(address, workers)
        total = ray.cluster_resources()
        cpus, gpus = int(total.get("CPU", 0)), int(total.get("GPU", 0))
        self.slots = workers or max(1, cpus // threads)
        # More would only queue, and their place in the queue would count as time.
        self.slots = min(self.slots, max(1, cpus // threads))
        wants_gpu = device.startswith("cuda") or (device == "auto" and gpus > 0)
        if wants_gpu and not gpus:
            self._leave()
            raise CliError(
                f"device {device} was asked for, but the Ray cluster has no GPU",
                hint="use --device cpu",
                exit_code=EXIT_DEVICE,
                kind="device",
            )
        # Several cells share a GPU, as many as there are slots for each.
        share = 1 / -(-self.slots // gpus) if wants_gpu else 0
        self._place = "cuda" if wants_gpu else "cpu"
        remote = ray.remote(num_cpus=threads, num_gpus=share, max_retries=0)
        self._work = remote(_work_or_end)
        self._running: dict[Any, int] = {}

    def __enter__(self) -> RayPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            for reference in self._running:
                self._ray.cancel(reference, force=True)
        self._leave()

    def can_be_alone(self) -> bool:
        """Yes: `submit` says why."""
        return True

    def submit(self, number: int, job: Work, *, alone: bool = False) -> None:
        """Send a job to the cluster, where every one has a process to itself."""
        self._running[self._work.remote({**job, "device": self._place})] = number

    def wait(self, timeout: float | None = None) -> list[Finished]:
        """Outcomes of the jobs that are over; one whose worker or node died comes back as `crashed`."""
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout)
        found: list[Finished] = []
        for reference in done:
            number = self._running.pop(reference)
            try:
                found.append((number, self._ray.get(reference)))
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause  # a node without linattn, for instance
                found.append((number, crashed(f"the Ray task ended with {type(cause).__name__}: {_first_line(cause)}")))
            except self._ray.exceptions.RayError as error:
                found.append((number, crashed(f"Ray lost the worker: {_first_line(error)}")))
        return found

    def _connect(self, address: str, workers: int | None) -> None:
        ray = self._ray
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        try:
            if address == "local":
                # Never `auto`: a cluster that happens to run here is not the one asked for.
                cpus = None if workers is None else workers * self._threads
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise CliError(
                f"no Ray cluster answers at {address!r}: {_first_line(error)}",
                hint="start one with `ray start --head`, or use --ray local",
                exit_code=EXIT_DEVICE,
                kind="ray",
            ) from error

    def _leave(self) -> None:
        with _signals_kept(), contextlib.suppress(Exception):
            self._ray.shutdown()


def _work_or_end(job: Work) -> Outcome:
    """Do a job; where that leaves the process unfit for more, end it, as a worker process here would."""
    try:
        return work(job)
    except BaseException:
        traceback.print_exc()  # into Ray's log
        os._exit(1)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a sweep reports to nobody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise CliError(
            "--ray needs the package ray, which is not installed",
            hint=f"{EXTRA}, or use --workers",
            exit_code=EXIT_DEVICE,
            kind="ray",
        ) from error
    return ray


@contextlib.contextmanager
def _signals_kept() -> Any:
    """Ray puts its own handler on SIGTERM, which would leave without saying what was kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
