"""Run folders: what a training run leaves on disk, written so that nothing is lost or mixed up.

A run folder holds::

    recipe.yaml      the resolved recipe; `linattn train --recipe RUN/recipe.yaml` repeats the run
    metrics.jsonl    one line per logged step; append-only, cut back to the checkpoint on resume
    result.json      the document `train --json` prints, once the run is over
    mixer.py         where the mixer is the user's own: its file as it was
    checkpoints/     step-N/, the last two (see checkpoints.py)

An existing folder is never taken over or deleted silently, and one process at a time owns it. This module
imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from linattn_cli import __version__
from linattn_cli.output import CliError
from linattn_cli.render import to_json

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
RESULT = "result.json"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
CODE = "mixer.py"

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        blocked = error.errno in (errno.EEXIST, errno.ENOTDIR)
        reason = "a file is in the way" if blocked else error.strerror or str(error)
        where = error.filename or path
        if error.errno in _FULL:
            raise CliError(
                f"cannot write {where}: {reason}",
                hint="free some space or point --out at another disk, then continue with --resume",
                exit_code=4,
                kind="disk",
            ) from error
        raise CliError(
            f"cannot use {where}: {reason}",
            hint="choose a folder you can write to with --out",
            exit_code=2,
            kind="file",
        ) from error


def fsync_folder(path: Path) -> None:
    """Make a rename or a new file in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a whole file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` in one step: a reader sees the old text or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            # a path need not be valid text; in JSON such a byte is an escape like any other
            write_synced(temporary, text.encode(errors="backslashreplace"))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(path.parent)


class RunFolder:
    """One run folder, owned (locked) by this process until `close`.

    Raises `CliError` with exit code 2 when the folder exists already (`create`), is not a run folder
    (`resume`), is owned by another process, or cannot be written; with exit code 4 when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._metrics: IO[str] | None = None

    @classmethod
    def create(cls, out: Path | None, *, stem: str, root: Path = Path("runs")) -> RunFolder:
        """Make a new folder: `out`, or the first free `root/<stem>-<n>`; two processes never get the same."""
        if out is None:
            run = cls(make_numbered(root, stem))
        else:
            with storage_errors(out):
                out.parent.mkdir(parents=True, exist_ok=True)
                try:
                    out.mkdir()
                except FileExistsError:
                    raise _exists(out) from None
            run = cls(out)
        run.acquire()
        return run

    @classmethod
    def resume(cls, path: Path) -> RunFolder:
        """Take over an existing run folder, to continue it."""
        require_run(path)
        run = cls(path)
        run.acquire()
        return run

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back."""
        for file in (self._metrics, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._metrics = self._lock = None

    def acquire(self) -> None:
        """Own the folder, or raise `CliError` (exit 2) naming the process that does."""
        path = self.path / LOCK
        with storage_errors(path):
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(path)
            file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                with storage_errors(path):
                    raise
            raise _in_use(self.path, owner) from None
        with storage_errors(path):
            file.seek(0)
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()
        self._lock = file

    def write_recipe(self, text: str) -> None:
        """Write `recipe.yaml`."""
        write_atomic(self.path / RECIPE, text)

    def write_code(self, source: str) -> None:
        """Write a copy of the user's own mixer, by which the run can be repeated."""
        write_atomic(self.path / CODE, source)

    def write_result(self, document: dict[str, Any]) -> None:
        """Write `result.json`."""
        write_atomic(self.path / RESULT, to_json(document) + "\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to `metrics.jsonl`; it reaches the kernel before this returns."""
        path = self.path / METRICS
        with storage_errors(path):
            if self._metrics is None:
                self._metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held until close
            self._metrics.write(to_json(row, indent=None) + "\n")
            self._metrics.flush()

    def clear_leftovers(self) -> None:
        """Remove what killed processes left half written; the lock says that nobody else is writing."""
        for left in self.path.glob(".*.tmp"):
            with storage_errors(left):
                left.unlink(missing_ok=True)

    def sync_metrics(self) -> None:
        """Wait until the disk has every line; called before a checkpoint that vouches for them."""
        if self._metrics is not None:
            with storage_errors(self.path / METRICS):
                os.fsync(self._metrics.fileno())

    def cut_metrics(self, step: int) -> int:
        """Drop the lines after `step`, and a last line torn by a kill; return how many were dropped."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        path = self.path / METRICS
        if not path.exists():
            return 0
        with storage_errors(path):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if (row := _parse(line)) is not None and row["step"] <= step]
        if len(kept) < len(lines):
            write_atomic(path, "".join(line + "\n" for line in kept))
        return len(lines) - len(kept)


def require_run(path: Path) -> None:
    """Raise `CliError` unless `path` is a run folder."""
    if not path.exists():
        raise CliError(f"run folder {path} does not exist", hint=_neighbours(path), kind="run_folder")
    if not (path / RECIPE).is_file():
        raise CliError(
            f"{path} is not a run folder: it has no {RECIPE}",
            hint="a run folder is what `linattn train` saved; start a new run with another --out",
            kind="run_folder",
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`; a torn last line is left out.

    >>> read_metrics(Path("no/such/run"))
    []
    """
    file = path / METRICS
    if not file.exists():
        return []
    with storage_errors(file):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [row for line in lines if (row := _parse(line)) is not None]


def newer_format(what: object, writer: str, found: int, known: int) -> CliError:
    """The refusal to read what a newer linattn wrote; `writer` is its version where the file tells it."""
    return CliError(
        f"{what} was written by a newer linattn{f', {writer}' if writer else ''} "
        f"(format {found}); this is linattn {__version__}, which reads format {known}",
        hint="update linattn: pip install -U linattn",
        kind="newer_format",
    )


def resume_command(path: Path) -> str:
    """The command that continues a run, quoted for a shell.

    >>> resume_command(Path("runs/my run"))
    "linattn train --resume --out 'runs/my run'"
    """
    trust = " --trust" if (path / CODE).is_file() else ""
    return f"linattn train --resume --out {shlex.quote(str(path))}{trust}"


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    # Anything but numbers in a line is none of ours: torn, or from somebody else.
    numbers = all(value is None or isinstance(value, (int, float)) for value in row.values())
    return row if numbers and all(abs(value) < 2**63 for value in row.values() if isinstance(value, int)) else None


def make_numbered(root: Path, stem: str) -> Path:
    """A new folder, the first free `root/<stem>-<n>`; two processes never get the same."""
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        taken = [name[len(stem) + 1 :] for name in os.listdir(root) if name.startswith(f"{stem}-")]
        number = max((int(tail) for tail in taken if tail.isdecimal()), default=0)
        while True:
            number += 1
            path = root / f"{stem}-{number}"
            # mkdir either makes the folder or fails: a number is handed out once.
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path


def _exists(path: Path) -> CliError:
    if not path.is_dir():
        return CliError(f"{path} exists and is not a folder", hint="choose another --out", kind="run_folder")
    if is_locked(path):
        return _in_use(path, _owner(path / LOCK))
    if (path / RECIPE).is_file():
        hint = f"continue it: {resume_command(path)}; or choose another --out"
    else:
        hint = "choose another --out, or remove the folder yourself"
    return CliError(f"run folder {path} exists already", hint=hint, kind="run_folder")


def _in_use(path: Path, owner: str) -> CliError:
    by = f" by process {owner}" if owner else " by another process"
    return CliError(
        f"run folder {path} is in use{by}",
        hint="wait for it to end, stop it, or choose another --out",
        kind="in_use",
    )


def is_locked(path: Path) -> bool:
    """Whether a process owns this run folder now."""
    try:
        with open(path / LOCK, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def _owner(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text.isdecimal() else ""


def _neighbours(path: Path) -> str:
    parent = path.parent
    runs = []
    with contextlib.suppress(OSError):
        runs = sorted((p for p in parent.iterdir() if (p / RECIPE).is_file()), key=lambda p: p.stat().st_mtime)
    if not runs:
        return "train one first: linattn train --model vla --task mqar"
    return f"runs in {parent}: " + ", ".join(p.name for p in runs[-5:])
