"""Progress of long work on stderr: a tqdm bar at a terminal, a plain line per interval elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from linattn_cli.output import write_stderr
from linattn_cli.render import cell


class Progress:
    """`with Progress(total, "train", every=50) as bar: bar.update(1, loss=2.5)`.

    every  steps between plain lines; None prints one per 10 seconds
    work   all that is to be done, in any unit, where steps differ in length; the time left is judged by it
    """

    seconds_between_lines = 10.0

    def __init__(
        self,
        total: int,
        label: str,
        *,
        every: int | None = None,
        quiet: bool = False,
        done: int = 0,
        work: float | None = None,
    ) -> None:
        self.total = total
        self.work = work
        self.worked = 0.0
        self.label = label
        self.every = every
        self.quiet = quiet
        self.done = done
        self._first = done
        self._values: dict[str, Any] = {}
        self._bar: Any = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        self._started = self._last_line = time.monotonic()
        if not self.quiet and sys.stderr.isatty():
            self._bar = _bar_class(self)(
                total=self.total,
                initial=self.done,
                desc=self.label,
                file=sys.stderr,
                dynamic_ncols=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def skip(self, steps: int) -> None:
        """Count steps that an earlier run did; they do not enter the rate."""
        self.done += steps
        self._first += steps
        if self._bar is not None:
            self._bar.initial += steps
            self._bar.n += steps
            self._bar.refresh()

    def update(self, steps: int = 1, *, worked: float = 0.0, **values: Any) -> None:
        """Advance by `steps`, which were `worked` of the work; `values` (loss, ...) are shown until replaced."""
        previous = self.done
        self.worked += worked
        self.done += steps
        self._values.update(values)
        if self.quiet:
            return
        if self._bar is not None:
            if values:
                self._bar.set_postfix_str(self._shown(), refresh=False)
            self._bar.update(steps)
        elif self._line_due(previous):
            self._last_line = time.monotonic()
            write_stderr(self._line())

    def log(self, line: str) -> None:
        """A line of text beside the bar, without breaking it."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            write_stderr(line)

    def _line_due(self, previous: int) -> bool:
        if self.done >= self.total:
            return previous < self.total
        if self.every is not None:
            return self.done // self.every > previous // self.every
        return time.monotonic() - self._last_line >= self.seconds_between_lines

    def _shown(self) -> str:
        return ", ".join(f"{name} {cell(value)}" for name, value in self._values.items())

    def _line(self) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        rate = (self.done - self._first) / elapsed
        shown = f", {self._shown()}" if self._values else ""
        return f"{self.label} {self.done}/{self.total}{shown}, {rate:.3g}/s, {self.left_s():.0f} s left"

    def left_s(self) -> float:
        """Seconds until the end, if it goes on as it did."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        if self.work is not None:
            return elapsed * (self.work - self.worked) / self.worked if self.worked > 0 else 0.0
        rate = (self.done - self._first) / elapsed
        return (self.total - self.done) / rate if rate > 0 else 0.0


def _bar_class(progress: Progress) -> Any:
    """tqdm, with the time left from the work done where that is known."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        @property
        def format_dict(self) -> dict[str, Any]:
            shown = super().format_dict
            left = progress.left_s()
            if progress.work is not None and left > 0:
                shown["rate"] = (progress.total - progress.done) / left  # tqdm divides by it again
            return dict(shown)

    return Bar
