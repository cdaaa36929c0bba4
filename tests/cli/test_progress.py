"""The time left, where the steps of some work are not equally long."""

import pytest

from linattn_cli import progress
from linattn_cli.progress import Progress
from tests.cli.terminal import at_terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_equal_steps_are_counted(clock):
    with Progress(10, "cells") as bar:
        clock[0] = 6.0
        bar.update(2)
        assert bar.left_s() == pytest.approx(24.0)


def test_unequal_steps_are_weighed(clock):
    """The longest cell first: it was half of the work, not a tenth."""
    with Progress(10, "cells", work=100.0) as bar:
        clock[0] = 30.0
        bar.update(1, worked=50.0)
        assert bar.left_s() == pytest.approx(30.0)


def test_what_an_earlier_run_did_is_neither_work_nor_rate(clock, capsys):
    with Progress(10, "cells", work=20.0) as bar:
        bar.skip(8)
        clock[0] = 30.0
        bar.update(1, worked=15.0, last="vla: 0.5")
    assert capsys.readouterr().err == "cells 9/10, last vla: 0.5, 0.0333/s, 10 s left\n"


def test_a_bar_at_a_terminal_shows_the_weighed_time():
    script = (
        "import time\n"
        "from linattn_cli.progress import Progress\n"
        "with Progress(10, 'cells', work=100.0) as bar:\n"
        "    time.sleep(1.2)\n"
        "    bar.update(1, worked=25.0)\n"
        "    time.sleep(0.2)\n"
    )
    shown = at_terminal(script, columns=100)
    assert "1/10 [00:01<00:0" in shown, shown  # 3 or 4 s; by the count of cells it would be 11
