"""Commands in a pipeline: a reader that goes away, a full disk behind stdout, a closed stream, and what goes where."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linattn_cli.app import main

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--d-head", "8", "--set", "model.ffn=16"),
    *("--n-pairs", "2", "--batch-size", "4", "--set", "task.vocab_size=16", "--device", "cpu", "--steps", "2"),
    *("--set", "train.eval_examples=16"),
]
SWEEP = [word if word != "--d-head" else "--d-heads" for word in TINY]

QUICK = {
    "list": ["list"],
    "list csv": ["list", "models", "--format", "csv"],
    "schema": ["schema"],
    "schema train": ["schema", "train"],
    "completion": ["completion", "bash"],
    "task show": ["task", "show", "mqar", "--count", "500", "--json"],
    "help": ["--help"],
    "help of a command": ["train", "--help"],
    "version": ["--version"],
}
SLOW = {
    "train": ["train", *TINY, "--out", "{new}"],
    "eval": ["eval", "{run}", "--json"],
    "capacity-sweep": ["capacity-sweep", *SWEEP, "--workers", "1", "--out", "{new}"],
    "verify-scan": ["verify-scan", "--models", "linear_scan", "--quick", "--dtypes", "float64", "--device", "cpu"],
    "latency": ["latency", "--models", "linear", "--seq-lens", "8", "--d-head", "8", "--budget-s", "0.05", "--no-gate"],
    "doctor": ["doctor", "--device", "cpu"],
}
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.raises(SystemExit) as left:
        main(["train", *TINY, "--out", str(path), "--quiet"])
    assert not left.value.code
    return path


def started(words: list[str], **streams) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "linattn_cli", *words]
    return subprocess.run(command, text=True, timeout=120, check=False, env=ENV, **streams)


@pytest.mark.parametrize("words", [*QUICK.values(), *SLOW.values()], ids=[*QUICK, *SLOW])
def test_a_reader_that_went_away_is_met_with_silence(words, run, tmp_path):
    read, write = os.pipe()
    os.close(read)  # so that every write fails, not only one that comes late
    filled = [word.format(new=tmp_path / "new", run=run) for word in words]
    if words in SLOW.values():
        filled.append("--quiet")
    done = started(filled, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    err = done.stderr.replace("warning: --no-gate: nothing is checked, these may be the times of wrong results\n", "")
    assert (done.returncode, "\n".join(x for x in err.splitlines() if "the machine is busy" not in x)) == (0, "")


def test_a_reader_of_stderr_that_went_away_does_not_stop_the_work(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = started(["train", *TINY, "--out", str(tmp_path / "run"), "--json"], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert done.returncode == 0
    assert json.loads(done.stdout)["summary"]["steps"] == 2


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["--help"], ["schema", "train"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_said(words):
    with open("/dev/full", "w") as full:
        done = started(words, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        "error: no space left on the disk",
        "hint: free some, or write elsewhere (--out)",
    ]


@pytest.mark.parametrize(("closed", "words", "code"), [(">&-", "list", 0), ("2>&-", "nothing", 2)])
def test_a_closed_stream(closed, words, code):
    command = f'exec "$0" -m linattn_cli {words} {closed}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], capture_output=True, text=True, timeout=120, check=False, env=ENV
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_stdout_has_the_results_and_nothing_else(run, tmp_path):
    filled = [word.format(new=tmp_path / "new", run=run) for word in SLOW["train"]]
    done = started([*filled, "--format", "csv"], capture_output=True)
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert row["stopped_by"] == "steps"
    assert "run folder" in done.stderr
    assert "next: linattn eval" in done.stderr


VERIFY = "linattn verify-scan --models linear_scan --quick --quiet --device cpu"
STATUS = "import json, sys; print(json.load(sys.stdin)['status'])"


@pytest.mark.parametrize(
    ("line", "out"),
    [
        ("linattn list models --format csv | cut -d, -f2 | sed -n 2p", "softmax"),
        (f"{VERIFY} > checks && echo trusted", "trusted"),
        (f"{VERIFY} --inject shift-mask > checks 2>&1 || echo wrong", "wrong"),
        (f'linattn task show mqar --json | python -c "{STATUS}"', "ok"),
        ("linattn eval {run} -q --require 'accuracy>1' > table 2> why || cut -c 1-20 why", "failed: accuracy>1 w"),
    ],
)
def test_pipelines_as_a_shell_runs_them(line, out, run, tmp_path):
    functions = f'linattn() {{ "{sys.executable}" -m linattn_cli "$@"; }}; python() {{ "{sys.executable}" "$@"; }}; '
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", functions + line.replace("{run}", str(run))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENV,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == out + "\n"
