"""Worker processes of a sweep on this machine: spawned once, kept over cells, replaced when they die.

A worker imports torch and opens the GPU once. If one crashes or is killed, that costs the cells it had; the others
do not notice. When the parent dies, even by `kill -9`, its workers end within a second.

The small kernels of one cell leave most of a GPU idle, and a GPU runs the kernels of one process at a time. So a
worker may train several cells side by side, each in a thread with a CUDA stream of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

from linattn_cli.capacity_cell import Outcome, Work, crashed
from linattn_cli.output import EXIT_INTERNAL, CliError

STARTS = 3
"""Workers that may die one after another before they could begin; then something is wrong with all of them."""

Finished = tuple[int, Outcome]


class Pool(Protocol):
    """Where cells are computed. `submit` at most `slots` jobs at a time; `wait` blocks until some are over.

    A job that is to be `alone` shares its process with no other; submit one only while `can_be_alone`.
    """

    slots: int

    def can_be_alone(self) -> bool: ...

    def submit(self, number: int, job: Work, *, alone: bool = False) -> None: ...

    def wait(self, timeout: float | None = None) -> list[Finished]: ...

    def __enter__(self) -> Pool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    device: str
    jobs: set[int] = field(default_factory=set)
    alone: bool = False
    ready: bool = False


class LocalPool:
    """`workers` processes of `streams` jobs each, spread over `devices` in turn; what they print goes to `log`."""

    def __init__(self, workers: int, *, devices: list[str], threads: int, log: Path, streams: int = 1) -> None:
        self.slots = workers * streams
        self.workers = workers
        self.streams = streams
        self.devices = devices
        self.threads = threads
        self.log = log
        self._workers: list[_Worker] = []
        self._failed_starts = 0

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            if kind is None:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def can_be_alone(self) -> bool:
        """Whether a job can have a worker alone with at most one more than `workers` in all."""
        spare = len(self._workers) < self.workers or any(not worker.jobs for worker in self._workers)
        return spare or not any(worker.alone for worker in self._workers)

    def submit(self, number: int, job: Work, *, alone: bool = False) -> None:
        """Give a job to the worker with the fewest, or to a new one.

        While a job has a worker alone, the others may need one more than `workers`; never are more jobs running.
        """
        open_ = [w for w in self._workers if not w.alone and len(w.jobs) < (1 if alone else self.streams)]
        worker = min(open_, key=lambda w: len(w.jobs), default=None)
        if worker is None or (worker.jobs and len(self._workers) < self.workers):
            worker = self._start()
        worker.jobs.add(number)
        worker.alone = alone
        # A worker that died meanwhile is noticed by `wait`.
        with contextlib.suppress(OSError):
            worker.pipe.send((number, {**job, "device": worker.device}))

    def wait(self, timeout: float | None = None) -> list[Finished]:
        """Outcomes of the jobs that are over; those of a dead worker come back as `crashed`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            pipes: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers}
            ready = wait_for_any(list(pipes), left)
            found = [outcome for pipe in ready for outcome in self._hear(pipes[pipe])]
            if found or (deadline is not None and time.monotonic() >= deadline):
                return found

    def _hear(self, worker: _Worker) -> Iterator[Finished]:
        try:
            number, outcome = worker.pipe.recv()
        except (EOFError, OSError):
            yield from self._bury(worker)
            return
        if number is None:
            worker.ready = True
            self._failed_starts = 0
            return
        worker.jobs.remove(number)
        if worker.alone and len(self._workers) > self.workers:
            self._dismiss(worker)
        worker.alone = False
        yield number, outcome

    def _dismiss(self, worker: _Worker) -> None:
        """End an idle worker that is one too many now that its job alone is over."""
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()

    def _bury(self, worker: _Worker) -> Iterator[Finished]:
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"left with exit code {code}"
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise CliError(
                    f"no worker process starts: the last one {how}",
                    hint=f"see {self.log}" if self.log.name != os.devnull else "run it with --out and see workers.log",
                    exit_code=EXIT_INTERNAL,
                    kind="workers",
                )
        for number in sorted(worker.jobs):
            yield number, crashed(f"the worker process {how}")

    def _start(self) -> _Worker:
        # Spawned, not forked: a fork would inherit torch's threads and an open GPU.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        taken = [worker.device for worker in self._workers]
        device = min(self.devices, key=taken.count)
        process = context.Process(target=_serve, args=(theirs, str(self.log), os.getpid(), self.streams), daemon=True)
        with _inherited(self.threads):
            process.start()
        theirs.close()
        worker = _Worker(process, ours, device)
        self._workers.append(worker)
        return worker


@contextlib.contextmanager
def _inherited(threads: int) -> Iterator[None]:
    """What a worker is born with: its number of threads, and deafness to the Ctrl-C meant for its parent."""
    ours = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # of 8, the default, more than eight streams would share some
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, log: str, parent: int, streams: int) -> None:
    """The life of a worker: one job after another, or `streams` at a time, until the pipe says None or breaks."""
    _redirect(log)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    import torch  # noqa: F401 - paid before the first job, so that a worker that cannot start is told apart

    from linattn_cli.capacity_cell import work

    with contextlib.suppress(EOFError, OSError):
        pipe.send((None, None))
        if streams > 1:
            _serve_side_by_side(pipe, streams)
        while (message := pipe.recv()) is not None:
            number, job = message
            pipe.send((number, work(job)))


def _serve_side_by_side(pipe: Connection, streams: int) -> NoReturn:
    from linattn_cli import experiment, training  # noqa: F401 - before there are threads, which could meet half a module

    jobs: queue.SimpleQueue[tuple[int, Work]] = queue.SimpleQueue()
    sending = threading.Lock()
    for _ in range(streams):
        threading.Thread(target=_serve_thread, args=(jobs, pipe, sending), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while (message := pipe.recv()) is not None:
            jobs.put(message)
    os._exit(0)  # the threads have nobody to compute for any more


def _serve_thread(jobs: queue.SimpleQueue[tuple[int, Work]], pipe: Connection, sending: threading.Lock) -> NoReturn:
    """The life of a thread of a worker, on one stream to the end: the worker makes no more than `streams` of them.

    What passes through `work` leaves the process unfit, and ends it with the jobs of all threads.
    """
    from linattn_cli.capacity_cell import work
    from linattn_cli.cuda_graph import own_stream

    try:
        number, job = jobs.get()
        with own_stream(job["device"]):
            while True:
                outcome = work(job)
                with sending:
                    pipe.send((number, outcome))
                number, job = jobs.get()
    except BaseException:
        traceback.print_exc()
        with sending:  # no outcome of a neighbour is cut off
            os._exit(1)


def _redirect(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
