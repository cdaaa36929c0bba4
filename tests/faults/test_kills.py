"""kill -9 at any moment of training and sweeping: nothing is lost but the interval that was not saved.

`LINATTN_KILLS=200 pytest tests/faults/test_kills.py` kills ten times as often.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from linattn_cli.checkpoints import list_steps, load
from linattn_cli.runs import is_locked, read_metrics
from linattn_cli.training import TIMING_KEYS
from tests.faults.workshop import Workshop
from tests.sweep_cells import cells, measured

KILLS = int(os.environ.get("LINATTN_KILLS", "20"))

TINY = [
    *("--set", "model.d_model=8", "--set", "model.heads=1", "--set", "model.layers=1", "--set", "model.ffn=8"),
    *("--set", "task.vocab_size=8", "--batch-size", "2", "--device", "cpu", "--set", "train.warmup_steps=5"),
    *("--set", "train.log_every=1", "--set", "train.eval_examples=8"),
]
STEPS = 400
TRAIN = ["train", *TINY, "--d-head", "8", "--n-pairs", "1", "--steps", STEPS, "--checkpoint-every", "7", "--quiet"]
SETTINGS = ["capacity-sweep", *TINY, "--set", "task.n_pairs=1", "--d-heads", "8", "--quiet"]
GRID = ["--models", "linear,deltanet", "--n-pairs", "1,2", "--lrs", "1e-3", "--seeds", "0,1,2,3,4"]
SWEEP = [*SETTINGS, *GRID, "--steps", "10", "--workers", "2"]
CELLS = 20


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with Workshop(tmp_path_factory.mktemp("shop")) as shop:
        yield shop


def deterministic(run: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in read_metrics(run)]


@pytest.fixture(scope="module")
def unbroken(shop, tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    job = shop.run(*TRAIN, "--out", run)
    assert job.code == 0, job.err
    return run


def check_what_is_left(run: Path, saved_before: int) -> int:
    """The state of a run folder after a kill; returns the step of its newest checkpoint."""
    steps = list_steps(run)
    newest = steps[-1] if steps else 0
    assert newest >= saved_before, "a checkpoint that was there is gone"
    assert len(steps) <= 3, "two are kept, and a third for as long as the first is being removed"
    for step in steps:
        assert load(run, step).step == step, "whatever is called step-N is whole"
    rows = read_metrics(run)
    assert [row["step"] for row in rows][:newest] == list(range(1, newest + 1)), "every line before the checkpoint"
    assert not (run / "result.json").exists()
    return newest


def finished_like(run: Path, unbroken: Path) -> None:
    assert deterministic(run) == deterministic(unbroken)
    figures = []
    for path in (run, unbroken):
        summary = json.loads((path / "result.json").read_text())["summary"]
        figures.append({k: v for k, v in summary.items() if k not in ("tokens_per_s", "train_s", "run")})
    assert figures[0] == figures[1]
    assert sorted(p.name for p in run.iterdir()) == sorted(p.name for p in unbroken.iterdir())
    assert sorted(os.listdir(run / "checkpoints")) == sorted(os.listdir(unbroken / "checkpoints"))


def test_training_killed_at_random_moments(shop, unbroken, tmp_path):
    rng = random.Random(20)
    run, saved, kills = tmp_path / "run", 0, 0
    goes_on: list[str] = []
    while kills < KILLS:
        job = shop.start(*TRAIN, "--out", run, *goes_on)
        time.sleep(rng.uniform(0.0, 0.25))
        job.kill()
        if job.wait() != -signal.SIGKILL:  # it was over before, or the folder has no recipe yet
            assert job.code == 0, job.err
            finished_like(run, unbroken)
            run, saved, goes_on = tmp_path / f"run-{kills}", 0, []
            continue
        kills += 1
        if (run / "recipe.yaml").exists():
            saved, goes_on = check_what_is_left(run, saved), ["--resume"]
        elif run.exists():  # killed before there was anything to keep; it is never reused silently
            assert {p.name for p in run.iterdir()} <= {".lock"} | {p.name for p in run.glob(".recipe.yaml.*")}
            run = tmp_path / f"run-{kills}"
    if not goes_on:
        return
    job = shop.run(*TRAIN, "--out", run, "--resume")
    assert job.code == 0, job.err
    finished_like(run, unbroken)


def test_training_killed_at_every_change_of_the_disk(shop, tmp_path):
    words = ["train", *TINY, "--d-head", "8", "--n-pairs", "1", "--steps", 3, "--checkpoint-every", "1", "--quiet"]
    whole = tmp_path / "whole"
    assert shop.run(*words, "--out", whole).code == 0
    died = 0
    for number in range(1, 200):
        run = tmp_path / f"run-{number}"
        if shop.run(*words, "--out", run, die_at=number).code == 0:
            break
        died += 1
        if not (run / "recipe.yaml").exists():
            continue
        over = (run / "result.json").exists()
        if not over:
            check_what_is_left(run, 0)
        # The one that goes on is killed as well, at a moment of its own, and then goes on for good.
        shop.run(*words, "--out", run, "--resume", die_at=1 + number % 7)
        job = shop.run(*words, "--out", run, "--resume")
        assert job.code == 0, job.err
        finished_like(run, whole)
    assert died > 15, "the moments between two changes were not reached"


@pytest.fixture(scope="module")
def whole_sweep(shop, tmp_path_factory):
    path = tmp_path_factory.mktemp("sweeps") / "whole"
    job = shop.run(*SWEEP, "--out", path)
    assert job.code == 0, job.err
    rows = cells(path)
    assert len(rows) == CELLS
    return rows


def workers_are_gone(path: Path) -> None:
    """The workers of a killed sweep end within a second; forked as they are here, they hold its lock until then."""
    deadline = time.monotonic() + 20
    while is_locked(path):
        assert time.monotonic() < deadline, "the workers go on without their parent"
        time.sleep(0.02)


def test_sweeping_killed_at_random_moments(shop, whole_sweep, tmp_path):
    rng = random.Random(21)
    path, kept, kills, overs = tmp_path / "sweep", {}, 0, 0
    goes_on: list[str] = []
    while kills < KILLS:
        job = shop.start(*SWEEP, "--out", path, *goes_on)
        time.sleep(rng.uniform(0.0, 0.5))
        job.kill()
        if job.wait() != -signal.SIGKILL:
            assert job.code == 0, job.err
            assert measured(cells(path)) == measured(whole_sweep)
            overs += 1
            path, kept, goes_on = tmp_path / f"sweep-{overs}", {}, []
            continue
        kills += 1
        workers_are_gone(path)
        if not (path / "sweep.yaml").exists():
            path = tmp_path / f"early-{kills}"
            continue
        goes_on = ["--resume"]
        if (path / "sweep.sqlite").exists() and (path / "sweep.sqlite").stat().st_size:
            rows = {row["key"]: row for row in cells(path) if row["status"] == "finished"}
            assert all(rows[key]["finished_at"] == row["finished_at"] for key, row in kept.items()), "ran twice"
            for row in rows.values():
                result = json.loads((path / row["run"] / "result.json").read_text())
                assert result["summary"]["accuracy"] == row["accuracy"]
            kept = rows
    if not goes_on:
        return
    job = shop.run(*SWEEP, "--out", path, "--resume")
    assert job.code == 0, job.err
    assert measured(cells(path)) == measured(whole_sweep)


def test_a_sweep_killed_at_every_change_of_the_disk_as_it_begins(shop, tmp_path):
    words = [*SETTINGS, "--models", "linear", "--n-pairs", "1", "--steps", "1", "--workers", "1"]
    refused = 0
    for number in range(1, 100):
        path = tmp_path / f"sweep-{number}"
        if shop.run(*words, "--out", path, die_at=number).code == 0:
            break
        workers_are_gone(path)
        job = shop.run(*words, "--out", path, "--resume")
        if job.code == 2:
            assert re.search(r"there is no sweep\.sqlite", job.err), job.err
            refused += 1
            continue
        assert job.code == 0, job.err
        assert [row["status"] for row in cells(path)] == ["finished"]
    assert refused < number - 5, "only a sweep without its recipe has nothing to resume"
