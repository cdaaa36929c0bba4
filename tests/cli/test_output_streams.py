"""The one document of a command seen from outside: in pipes, at terminals, and under signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.cli.terminal import at_terminal


def python(code: str, *, tail: str = "", **options) -> subprocess.CompletedProcess:
    """Run code in a fresh process, piped through the shell command `tail` if given."""
    script = textwrap.dedent(code)
    command = [sys.executable, "-c", script]
    if tail:
        command = ["bash", "-c", f'set -o pipefail; "$0" -c "$1" | {tail}', sys.executable, script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_a_closed_pipe_is_silent():
    code = """
        from linattn_cli import output
        with output.command("probe", fmt="csv") as doc:
            doc.results = [{"a": "x" * 50, "b": i} for i in range(100_000)]
    """
    done = python(code, tail="head -n 1")
    assert done.stdout == "a,b\n"
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_closed_stderr_does_not_stop_the_work():
    code = """
        import os, sys
        from linattn_cli import output
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(reader); os.close(writer)
        with output.command("probe") as doc:
            doc.log("nobody listens")
            doc.results = [{"a": 1}]
            doc.note("nor here")
    """
    done = python(code)
    assert done.stdout.split() == ["a", "---", "1"]
    assert done.returncode == 0


WAIT = """
    import time
    from linattn_cli import output
    with output.command("probe", json=True) as doc:
        doc.results.append({"step": 1})
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            doc.note("checkpoint saved")
            raise
"""


@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_signals_let_the_command_save_and_leave_with_their_code(number, code, status):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WAIT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    document = json.loads(out)
    assert document["status"] == status
    assert document["results"] == [{"step": 1}]
    assert err.splitlines()[-1] == "checkpoint saved"
    assert "Traceback" not in err


TABLE = """
    from linattn_cli import output
    with output.command("probe") as doc:
        doc.results = [{"name": "word " * 30, "value": 0.5}]
"""


def test_a_terminal_gets_a_table_of_its_width_with_every_word():
    shown = at_terminal(TABLE, columns=60)
    assert "─" in shown
    assert shown.count("word") == 30
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert 50 < max(len(line) for line in lines) <= 60


def test_a_narrow_terminal_breaks_between_words_never_inside_numbers():
    code = """
        from linattn_cli import output
        with output.command("probe") as doc:
            doc.results = [{f"a_long_name_{i}": 1.234e-7 for i in range(9)} | {"text": "some words to wrap " * 3}]
    """
    shown = at_terminal(code, columns=40)
    assert shown.count("1.234e-07") == 9
    for word in ("some", "words", "wrap"):
        assert shown.count(word) == 3
    assert "a_long_" in shown


def test_no_color_is_respected():
    plain = at_terminal(TABLE, NO_COLOR="1")
    assert "\x1b[3" not in plain.replace("\x1b[39m", "")


def test_progress_at_a_terminal_is_a_bar():
    code = """
        from linattn_cli.progress import Progress
        with Progress(3, "train") as bar:
            bar.update(3, loss=0.5)
            bar.log("a line beside it")
    """
    shown = at_terminal(code, columns=100)
    assert "100%" in shown
    assert "loss 0.5" in shown
    assert "a line beside it" in shown
