"""The same seed on the same device gives the same bits, and a run says everything that repeats it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linattn_cli import __version__, environment
from linattn_cli.runs import read_metrics
from linattn_cli.tasks import make_task
from linattn_cli.training import TIMING_KEYS

SIZES = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.layers=1", "--set", "model.ffn=16"),
    *("--set", "task.vocab_size=16", "--batch-size", "4", "--device", "cpu", "--set", "train.log_every=1"),
    *("--set", "train.eval_examples=16", "--d-head", "8", "--n-pairs", "2", "--steps", "6", "--seed", "3"),
]
TIMING = {"tokens_per_s", "train_s", "run"}


def linattn(*words, threads=1, cwd=None):
    done = subprocess.run(
        [sys.executable, "-m", "linattn_cli", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def bits(run: Path) -> str:
    (weights,) = run.glob("checkpoints/step-6/model.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def rows(run: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in read_metrics(run)]


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def figures(run: Path) -> dict:
    return {k: v for k, v in result(run)["summary"].items() if k not in TIMING}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    run = tmp_path_factory.mktemp("first") / "a run"
    linattn("train", "--model", "vla", *SIZES, "--out", run, "--quiet")
    return run


def test_two_processes_give_the_same_bits_and_a_recipe_repeats_a_run(first, tmp_path):
    again = tmp_path / "again"
    linattn("train", "--recipe", first / "recipe.yaml", "--out", again, "--quiet")
    assert bits(again) == bits(first)
    assert rows(again) == rows(first)
    assert len(rows(again)) == 6
    assert figures(again) == figures(first)
    assert result(again)["config"] == result(first)["config"]


@pytest.mark.slow
def test_the_number_of_threads_is_recorded_and_repeats(tmp_path):
    """Sums split over another number of threads round differently; over the same one they do not."""
    for name in ("one", "two"):
        linattn("train", "--model", "hla2", *SIZES, "--out", tmp_path / name, "--quiet", threads=2)
    assert bits(tmp_path / "one") == bits(tmp_path / "two")
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    assert result(tmp_path / "one")["env"]["threads"] == min(2, environment.usable_cores())


def test_another_seed_gives_other_bits(first, tmp_path):
    linattn("train", "--recipe", first / "recipe.yaml", "--seed", 4, "--out", tmp_path / "other", "--quiet")
    assert bits(tmp_path / "other") != bits(first)
    assert figures(tmp_path / "other")["fingerprint"] != figures(first)["fingerprint"]


def test_the_command_line_that_is_recorded_repeats_the_run(first, tmp_path):
    command = shlex.split(result(first)["env"]["command_line"])
    assert command[:2] == ["linattn", "train"]
    at = command.index("--out") + 1
    assert command[at] == str(first)
    command[at] = str(tmp_path / "again")
    linattn(*command[1:])
    assert bits(tmp_path / "again") == bits(first)


def test_a_result_says_on_what_it_was_measured(first):
    document = result(first)
    env = document["env"]
    assert env["linattn"] == __version__
    assert env["commit"] == environment.git_commit()
    assert env["python"] == platform.python_version()
    assert env["torch"] == torch.__version__
    for name in ("triton", "numpy"):
        assert env[name] == importlib.metadata.version(name)
    assert (env["device"], env["dtype"], env["impl"], env["seed"], env["threads"]) == ("cpu", "float32", "chunk", 3, 1)
    assert env["device_name"]
    task = document["config"]["task"]
    assert document["summary"]["fingerprint"] == make_task("mqar", task).fingerprint(3)


def test_the_commit_is_that_of_the_checkout_and_tells_of_changes(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout" / "linattn_cli"
    checkout.mkdir(parents=True)
    file = Path(shutil.copy(environment.__file__, checkout / "environment.py"))
    monkeypatch.setattr(environment, "__file__", str(file))

    def git(*words):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.run(
            ["git", *identity, "-C", str(checkout), *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit():
        environment.git_commit.cache_clear()
        return environment.git_commit()

    try:
        git("init", "-q")
        assert commit() is None, "a file that the repository does not know, as an installed wheel"
        git("add", "environment.py")
        git("commit", "-q", "-m", "x")
        head = git("rev-parse", "--short=12", "HEAD")
        assert commit() == head
        file.write_text(file.read_text() + "# changed\n")
        assert commit() == f"{head}+changes"
        monkeypatch.setenv("PATH", str(tmp_path))
        assert commit() is None, "there is no git"
    finally:
        environment.git_commit.cache_clear()
