"""How every command speaks: one document to stdout, everything else to stderr, and the documented exit codes.

A command body is one `with` block:

    with output.command("train", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        doc.config = config
        doc.begin(device="cpu", dtype="float32", impl="chunk", seed=0)
        doc.results.append({"step": 10, "loss": 2.5})
        doc.summary = {"accuracy": 0.99}
        doc.note("saved in runs/a; next: linattn eval runs/a")

At its end the rows are rendered in the format asked for. Whatever is raised inside becomes one line on
stderr, the `error` of the JSON document, and an exit code: see `describe_error`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from linattn_cli import __version__
from linattn_cli.kernels.faults import DoesNotFit, FallbackWarning

SCHEMA_VERSION = 1
FORMATS = ("table", "json", "csv", "markdown")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEVICE = 3
EXIT_MEMORY = 4
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

MEMORY_HINT = "lower the batch size, the sequence length, the vocabulary or d_model"


invoked: list[str] | None = None
"""The command line of this process, set where it came from one; part of what repeats a result."""


class CliError(Exception):
    """An error that is the user's to fix: one line, and how to fix it."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = EXIT_USAGE, kind: str = "usage") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.kind = kind


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. A `KeyboardInterrupt`, so that one `except` saves a checkpoint for both."""


@dataclass
class Failure:
    """What is reported of an exception: `kind` is `error.type` of the JSON document."""

    exit_code: int
    kind: str
    message: str
    hint: str = ""


@dataclass
class Document:
    """What one run of a command reports; filled by the command, rendered at its end.

    results  rows, dicts of scalars; units in key names
    summary  one dict of scalars
    text     what the table format prints in place of rows and summary, where rows would not be readable
    tables   captions and rows that the table and markdown formats print in place of rows and summary
    columns  the columns of the table format, all by default; the other formats always have all of them
    """

    command: str
    fmt: str = "table"
    quiet: bool = False
    debug: bool = False
    status: str = "ok"
    env: dict[str, Any] = field(default_factory=lambda: {"linattn": __version__})
    config: Any = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    text: str | None = None
    tables: list[tuple[str, list[dict[str, Any]]]] | None = None
    columns: list[str] | None = None
    memory_hint: str = MEMORY_HINT
    exit_code: int = EXIT_OK
    notes: list[str] = field(default_factory=list)

    def log(self, line: str) -> None:
        """One line on stderr, unless `--quiet`."""
        if not self.quiet:
            write_stderr(line)

    def warn(self, line: str) -> None:
        """One warning on stderr, also with `--quiet`."""
        write_stderr(f"warning: {line}")

    def note(self, line: str) -> None:
        """One line for stderr after the results: where things were saved, what to run next."""
        self.notes.append(line)

    def begin(self, *, device: object, dtype: str, impl: str, seed: int | None = None) -> None:
        """Record the environment and print the start line of a command that computes."""
        from linattn_cli import environment

        self.env = environment.describe(device=device, dtype=dtype, impl=impl, seed=seed)
        self.log(environment.start_line(self.env))

    def fail(self, message: str, *, hint: str = "") -> None:
        """Record that a check failed: the results are still printed, and the exit code is 1."""
        self.set_failure(Failure(EXIT_FAILED, "check", message, hint), status="failed")

    def set_failure(self, failure: Failure, *, status: str = "error") -> None:
        self.status = status
        self.exit_code = failure.exit_code
        self.error = {"type": failure.kind, "message": failure.message, "hint": failure.hint}

    def as_dict(self) -> dict[str, Any]:
        """The JSON document, not yet made JSON-safe (`render.jsonable` does that)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "status": self.status,
            "env": self.env,
            "config": self.config,
            "results": self.results,
            "summary": self.summary,
            "error": self.error,
        }

    def progress(self, total: int, label: str, *, every: int | None = None, work: float | None = None) -> Any:
        """A progress bar at a terminal, a plain line per `every` steps (default: per 10 s) elsewhere.

        work  all that is to be done, in any unit, where steps differ in length
        """
        from linattn_cli.progress import Progress

        return Progress(total, label, every=every, quiet=self.quiet, work=work)


def write_stderr(line: str) -> None:
    """One line on stderr; a reader that went away does not stop the work."""
    with contextlib.suppress(BrokenPipeError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def choose_format(fmt: str | None, json: bool) -> str:
    """The output format from `--format` and `--json`.

    >>> choose_format(None, False), choose_format(None, True), choose_format("csv", False)
    ('table', 'json', 'csv')
    """
    if fmt is not None:
        from linattn_cli.parsing import check_choice

        check_choice("--format", fmt, FORMATS)
    if json and fmt not in (None, "json"):
        raise CliError(f"--json and --format {fmt} contradict each other", hint="give one of the two")
    return "json" if json else fmt or "table"


@contextlib.contextmanager
def command(
    name: str, *, fmt: str | None = None, json: bool = False, quiet: bool = False, debug: bool = False
) -> Iterator[Document]:
    """Run a command body, then print its document and leave with its exit code (`SystemExit` unless 0)."""
    doc = Document(name, "json" if json else "table", quiet, debug)
    try:
        with _terminate_on_sigterm(), _warnings_as_lines(doc):
            doc.fmt = choose_format(fmt, json)
            yield doc
    except BrokenPipeError:
        _leave_quietly(doc.exit_code)
    except GeneratorExit:
        raise
    except BaseException as exception:
        if isinstance(exception, SystemExit) or _is_typer_exit(exception):
            raise
        report_exception(doc, exception)
    _finish(doc)


@contextlib.contextmanager
def _warnings_as_lines(doc: Document) -> Iterator[None]:
    """What the kernels warn of as a line of ours, other people's warnings as Python shows them."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if issubclass(category, FallbackWarning):
            doc.warn(str(message))
        else:
            shown(message, category, *place, **options)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def report_exception(doc: Document, exception: BaseException) -> None:
    """Turn an exception into the failure of a document; with `--debug` print its traceback."""
    failure = describe_error(exception, memory_hint=doc.memory_hint)
    if failure.exit_code == EXIT_INTERNAL:
        saved = _save_traceback(exception)
        failure.hint = f"the traceback is {saved}; --debug shows it. Please report it with the command line"
    if doc.debug:
        write_stderr("".join(traceback.format_exception(exception)).rstrip("\n"))
    status = {EXIT_INTERRUPTED: "interrupted", EXIT_TERMINATED: "terminated", EXIT_FAILED: "failed"}
    doc.set_failure(failure, status=status.get(failure.exit_code, "error"))


def describe_error(exception: BaseException, *, memory_hint: str = MEMORY_HINT) -> Failure:
    """Exit code, kind, one line and hint of any exception.

    >>> describe_error(ValueError("beta must be positive,\\n got -1"))
    Failure(exit_code=2, kind='value', message='beta must be positive, got -1', hint='')
    >>> describe_error(KeyError("x")).exit_code
    70
    """
    text = printable(" ".join(str(exception).split()))
    if isinstance(exception, CliError):
        return Failure(exception.exit_code, exception.kind, text, printable(exception.hint))
    if isinstance(exception, Terminated):
        return Failure(EXIT_TERMINATED, "terminated", "terminated by SIGTERM")
    if isinstance(exception, KeyboardInterrupt):
        return Failure(EXIT_INTERRUPTED, "interrupted", "interrupted")
    if _is_disk_full(exception, text):
        filename = getattr(exception, "filename", None)
        place = f" while writing {filename}" if filename else ""
        return Failure(
            EXIT_MEMORY, "disk", f"no space left on the disk{place}", "free some, or write elsewhere (--out)"
        )
    if _is_out_of_memory(exception, text):
        return Failure(EXIT_MEMORY, "memory", f"out of memory: {text[:200]}" if text else "out of memory", memory_hint)
    if isinstance(exception, OSError):
        return _describe_os_error(exception, text)
    if _is_missing_device(text):
        return Failure(EXIT_DEVICE, "device", text.split(". ")[0], "use --device cpu")
    if isinstance(exception, DoesNotFit):
        return Failure(EXIT_DEVICE, "device", text, "use --impl chunk, or --impl auto")
    if isinstance(exception, ValueError):
        return Failure(EXIT_USAGE, "value", text or type(exception).__name__)
    return Failure(EXIT_INTERNAL, "internal", f"internal fault: {type(exception).__name__}: {text}"[:500])


def printable(text: str) -> str:
    """Text without what a terminal would obey instead of showing, such as a key of somebody's recipe may hold.

    >>> print(printable("a key called \\x1b[31mred"))
    a key called \\x1b[31mred
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _describe_os_error(exception: OSError, text: str) -> Failure:
    where = f"{exception.filename}: " if exception.filename else ""
    message = f"{where}{exception.strerror or text}"
    hints = {
        errno.ENOENT: "check the path",
        errno.ENOTDIR: "check the path",
        errno.EISDIR: "give a file",
        errno.EEXIST: "give another name, or remove it first",
        errno.EACCES: "check its permissions, or choose another place",
        errno.EPERM: "check its permissions, or choose another place",
        errno.EROFS: "choose a place that can be written",
        errno.ENAMETOOLONG: "choose a shorter name",
    }
    if exception.errno in hints:
        return Failure(EXIT_USAGE, "file", message, hints[exception.errno])
    return Failure(EXIT_INTERNAL, "internal", f"internal fault: {type(exception).__name__}: {message}")


def _is_disk_full(exception: BaseException, text: str) -> bool:
    # safetensors and torch.save wrap the system's error and keep only its words
    return getattr(exception, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text


def _is_out_of_memory(exception: BaseException, text: str) -> bool:
    if isinstance(exception, MemoryError) or type(exception).__name__ == "OutOfMemoryError":
        return True
    if getattr(exception, "errno", None) == errno.ENOMEM:
        return True
    words = (
        "can't allocate memory",
        "not enough memory",
        "CUDA out of memory",
        "CUDA error: out of memory",
        "Storage size calculation overflowed",  # more than any machine has
        "integer multiplication overflow",
    )
    return isinstance(exception, RuntimeError) and any(word in text for word in words)


def _is_missing_device(text: str) -> bool:
    words = (
        "Torch not compiled with CUDA",
        "Found no NVIDIA driver",
        "No CUDA GPUs are available",
        "invalid device ordinal",
    )
    return any(word in text for word in words)


def _is_typer_exit(exception: BaseException) -> bool:
    return type(exception).__name__ in ("Exit", "Abort") and type(exception).__module__.startswith(("typer", "click"))


def _save_traceback(exception: BaseException) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="linattn-traceback-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("".join(traceback.format_exception(exception)))
    except OSError:
        return "not saved (the temporary folder cannot be written)"
    return f"saved in {file.name}"


def _finish(doc: Document) -> None:
    from linattn_cli import render

    try:
        text = render.render(doc)
    except Exception as exception:  # a row that cannot be rendered is our own fault, not the user's
        report_exception(doc, exception)
        doc.results, doc.summary, doc.config, doc.text, doc.tables = [], {}, {}, None, None
        text = render.render(doc)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly(doc.exit_code)
    except OSError as error:  # the disk behind stdout is full
        report_exception(doc, error)
        _silence_stdout()
    if doc.error is not None:
        label = "failed" if doc.status == "failed" else "error"
        write_stderr(f"{label}: {doc.error['message']}")
        if doc.error["hint"]:
            write_stderr(f"hint: {doc.error['hint']}")
    for line in doc.notes:
        doc.log(line)
    if doc.exit_code:
        raise SystemExit(doc.exit_code)


def _leave_quietly(exit_code: int) -> NoReturn:
    """Leave after a closed pipe."""
    _silence_stdout()
    raise SystemExit(exit_code)


def _silence_stdout() -> None:
    """Put stdout on the null device, or Python would complain at shutdown of what it still holds."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _terminate_on_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        # Schedulers repeat the signal; the second must not break the saving that the first one began.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
