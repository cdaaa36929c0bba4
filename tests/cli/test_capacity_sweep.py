"""`linattn capacity-sweep` as a user meets it: real processes, real kills, a real Ray, one table."""

import contextlib
import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sweep_cells import cells, measured

BASE = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.ffn=16", "--d-heads", "8"),
    *("--set", "task.vocab_size=16", "--batch-size", "4", "--device", "cpu", "--set", "train.eval_examples=32"),
    *("--set", "train.warmup_steps=5", "--set", "train.log_every=5"),
]
GRID = ["--models", "linear,vla:penalty=none", "--n-pairs", "2,3", "--lrs", "1e-3,1e-2", "--seeds", "0,1"]
"""16 cells."""


STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_runs_on():
    """A test that fails must not leave a sweep running."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def start(*words):
    process = subprocess.Popen(
        [sys.executable, "-m", "linattn_cli", "capacity-sweep", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    STARTED.append(process)
    return process


def finish(process):
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def sweep(*words):
    return finish(start(*words))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished sweep of 16 cells on two workers, its document and stderr; tests do not change it."""
    path = tmp_path_factory.mktemp("sweeps") / "unbroken"
    code, out, err = sweep(*BASE, *GRID, "--steps", 30, "--workers", 2, "--out", path, "--json")
    assert code == 0, err
    return path, json.loads(out), err


def table(document):
    return [
        {name: value for name, value in row.items() if "train_s" not in name} for row in document["summary"]["table"]
    ]


def wait_until(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def done(path):
    if not (path / "sweep.sqlite").exists():
        return 0
    try:
        return sum(row["status"] == "finished" for row in cells(path))
    except sqlite3.OperationalError:
        return 0  # the table is being made


def children(process):
    """Worker processes of a sweep."""
    found = []
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def test_the_document_has_a_row_a_cell_and_the_table(finished):
    path, document, _ = finished
    assert document["status"] == "ok"
    rows = document["results"]
    assert len(rows) == 16
    assert {"model", "n_pairs", "d_head", "seq_len", "lr", "seed", "accuracy"} <= set(rows[0])
    for row in rows:
        assert row["status"] == "finished"
        assert 0 <= row["accuracy"] <= 1
        assert row["chance_vocab"] == 1 / 16
        assert row["steps"] == 30
        assert row["parameters"] > 0
        assert row["state_bytes"] > 0
    summary = document["summary"]
    assert (summary["cells"], summary["finished"], summary["sweep"]) == (16, 16, str(path))
    assert [(row["model"], row["n_pairs"]) for row in summary["table"]] == [
        (model, n) for model in ("linear", "vla:penalty=none") for n in (2, 3)
    ]
    for line in summary["table"]:
        mine = [row for row in rows if all(row[name] == line[name] for name in ("model", "n_pairs", "lr"))]
        assert line["seeds"] == len(mine) == 2
        assert line["accuracy_mean"] == pytest.approx(sum(row["accuracy"] for row in mine) / 2)
        assert line["accuracy_min"] == min(row["accuracy"] for row in mine)
        assert line["accuracy_max"] == max(row["accuracy"] for row in mine)


def test_every_cell_has_a_run_folder_whose_recipe_repeats_it(finished, linattn, tmp_path):
    path, document, _ = finished
    row = document["results"][5]
    run = path / row["run"]
    assert {file.name for file in run.iterdir()} == {"recipe.yaml", "metrics.jsonl", "result.json"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 30
    code, out, err = linattn("train", "--recipe", run / "recipe.yaml", "--out", tmp_path / "alone", "--json", "--quiet")
    assert code == 0, err
    assert json.loads(out)["summary"]["accuracy"] == row["accuracy"]


def test_the_progress_counts_cells_and_tells_the_time_left(finished):
    _, _, err = finished
    assert "16 of 16 cells to run" in err
    assert "cells 16/16, last " in err
    assert "s left" in err


@pytest.mark.slow
def test_the_table_does_not_depend_on_the_number_of_workers(finished, tmp_path):
    path, document, _ = finished
    code, out, err = sweep(*BASE, *GRID, "--steps", 30, "--workers", 1, "--out", tmp_path / "one", "--json", "--quiet")
    assert (code, err) == (0, "")
    assert measured(cells(tmp_path / "one")) == measured(cells(path))
    assert table(json.loads(out)) == table(document)


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed_it_gives_the_same_table(finished, tmp_path):
    path, document, _ = finished
    again = tmp_path / "killed"
    process = start(*BASE, *GRID, "--steps", 30, "--workers", 2, "--out", again)
    wait_until(lambda: done(again) >= 3, process)
    workers = children(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {row["key"]: row["finished_at"] for row in cells(again) if row["status"] == "finished"}
    assert 3 <= len(kept) < 16
    code, out, err = sweep("--resume", "--out", again, "--json")
    assert code == 0, err
    assert f"{16 - len(kept)} of 16 cells to run" in err
    rows = cells(again)
    assert measured(rows) == measured(cells(path))
    assert table(json.loads(out)) == table(document)
    assert all(row["finished_at"] == kept.get(row["key"], row["finished_at"]) for row in rows), "nothing ran twice"
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_sweep_keeps_what_is_done(tmp_path, number, code):
    out = tmp_path / "sweep"
    process = start(*BASE, *GRID, "--steps", 200, "--workers", 1, "--out", out, "--json")
    wait_until(lambda: done(out) >= 1, process)
    os.kill(process.pid, number)
    returned, text, err = finish(process)
    assert returned == code
    document = json.loads(text)
    assert document["status"] == ("interrupted" if code == 130 else "terminated")
    assert document["summary"]["finished"] == sum(row["status"] == "finished" for row in document["results"]) >= 1
    assert f"hint: continue: linattn capacity-sweep --resume --out {out}" in err


@pytest.mark.slow
def test_a_killed_worker_costs_its_cell_a_retry(tmp_path):
    out = tmp_path / "sweep"
    process = start(*BASE, "--models", "linear", "--n-pairs", 2, "--seeds", "0,1", "--steps", 300, "--out", out)
    wait_until(lambda: len(children(process)) == 2, process)
    os.kill(children(process)[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert "once more: model linear n_pairs 2" in err
    assert sorted(row["attempts"] for row in cells(out)) == [1, 2]
    assert {row["status"] for row in cells(out)} == {"finished"}


@pytest.mark.slow
def test_two_processes_on_one_folder(tmp_path):
    out = tmp_path / "sweep"
    process = start(*BASE, *GRID, "--steps", 300, "--workers", 1, "--out", out)
    wait_until(lambda: done(out) >= 1, process)
    code, text, err = sweep("--report", "--out", out, "--json")
    assert code == 0, err
    assert 1 <= json.loads(text)["summary"]["finished"] < 16, "a report may be had while it runs"
    assert "cells are still to run: linattn capacity-sweep --resume" in err
    for words in (["--resume"], [*BASE, *GRID]):
        code, _, err = sweep(*words, "--out", out)
        assert code == 2
        assert "in use by process" in err or "already" in err
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_resume_may_add_to_the_grid(tmp_path):
    out = tmp_path / "sweep"
    first = [*BASE, "--models", "linear", "--n-pairs", "2", "--steps", "5", "--workers", "1", "--out", str(out)]
    assert sweep(*first)[0] == 0
    before = cells(out)
    code, text, err = sweep("--resume", "--out", out, "--seeds", "0,1", "--models", "linear,deltanet", "--json")
    assert code == 0, err
    rows = cells(out)
    assert rows[0] == before[0], "what was there is kept as it was"
    assert [(row["model"], row["seed"]) for row in rows] == [
        ("linear", 0),
        ("linear", 1),
        ("deltanet", 0),
        ("deltanet", 1),
    ]
    assert "3 cells are new to this sweep" in err
    assert (out / "sweep-2.yaml").exists()
    assert len(json.loads(text)["summary"]["table"]) == 2
    code, _, err = sweep("--resume", "--out", out)
    assert code == 0
    assert "every cell is there already" in err


def test_a_resume_must_be_of_the_same_settings(finished, linattn):
    path, _, _ = finished
    code, _, err = linattn("capacity-sweep", "--resume", "--out", path, "--steps", 40)
    assert code == 2
    assert f"the sweep in {path} was started with train.steps = 30, not 40" in err
    code, _, err = linattn("capacity-sweep", "--resume", "--out", path, "--threads", 2)
    assert code == 2
    assert "was started with sweep.threads = 1, not 2" in err


def test_formats(finished, linattn, tmp_path):
    path, document, _ = finished
    again = ["capacity-sweep", "--resume", "--out", path, "--quiet"]
    code, out, _ = linattn(*again, "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["run"] for row in rows] == [row["run"] for row in document["results"]]
    code, out, _ = linattn(*again, "--format", "markdown", "--plot", tmp_path / "plot.svg")
    assert "| model" in out
    assert "| vla:penalty=none |" in out
    assert (tmp_path / "plot.svg").exists()
    code, out, _ = linattn("capacity-sweep", "--report", "--out", path, "--json", "--quiet")
    assert (code, json.loads(out)["summary"]) == (0, document["summary"])
    code, out, err = linattn(*again[:-1], "--dry-run")
    assert (code, "every cell is there already" in err) == (0, True)
    code, out, _ = linattn(*again)
    assert "Held-out accuracy at the best lr, chosen on validation data, by n_pairs" in out
    assert all(len(line) < 250 for line in out.splitlines())


def test_a_dry_run_lists_the_cells_and_estimates_from_a_probe(tmp_path):
    out = tmp_path / "sweep"
    code, text, err = sweep(*BASE, *GRID, "--steps", 30, "--workers", 1, "--out", out, "--dry-run", "--json")
    assert code == 0, err
    document = json.loads(text)
    assert len(document["results"]) == document["summary"]["cells"] == 16
    assert document["summary"]["steps"] == 16 * 30
    assert 0 < document["summary"]["longest_cell_s"] < document["summary"]["estimate_s"]
    assert not out.exists()


def test_a_diverged_cell_is_a_result_and_the_sweep_goes_on(tmp_path):
    words = ["--models", "linear", "--n-pairs", "2", "--lrs", "1e-2,1e30", "--steps", "5", "--workers", "1"]
    code, text, err = sweep(*BASE, *words, "--out", tmp_path / "sweep", "--json")
    assert code == 0, err
    rows = {row["lr"]: row for row in json.loads(text)["results"]}
    assert (rows[1e30]["status"], rows[1e30]["accuracy"], rows[1e30]["error_type"]) == ("diverged", None, "non_finite")
    assert rows[1e-2]["status"] == "finished"
    assert "diverged: model linear" in err


def test_a_failed_cell_fails_the_sweep_after_all_others_ran(tmp_path):
    words = ["--models", "linear:model.impl=triton,linear", "--n-pairs", "2", "--steps", "2", "--workers", "1"]
    code, text, err = sweep(*BASE, *words, "--out", tmp_path / "sweep", "--json")
    assert code == 1
    document = json.loads(text)
    assert document["status"] == "failed"
    assert [row["status"] for row in document["results"]] == ["failed", "finished"]
    assert "impl triton was asked for, but" in document["results"][0]["error"]
    assert "failed: 1 of 2 cells failed; the others are kept" in err


def test_weights_are_kept_on_demand_and_can_be_evaluated(tmp_path, linattn):
    words = ["--models", "linear", "--n-pairs", "2", "--steps", "5", "--workers", "1", "--keep-weights", "--json"]
    code, text, err = sweep(*BASE, *words, "--out", tmp_path / "sweep")
    assert code == 0, err
    (row,) = json.loads(text)["results"]
    code, out, _ = linattn("eval", tmp_path / "sweep" / row["run"], "--json")
    assert code == 0
    assert json.loads(out)["results"][0]["accuracy"] == row["accuracy"]


def test_a_target_accuracy_stops_cells(tmp_path):
    words = ["--models", "linear", "--n-pairs", "2", "--steps", "50", "--workers", "1", "--target-accuracy", "0.01"]
    code, text, err = sweep(*BASE, *words, "--out", tmp_path / "sweep", "--json")
    assert code == 0, err
    (row,) = json.loads(text)["results"]
    assert row["stopped_by"] == "target_accuracy"
    assert row["steps"] < 50


@pytest.mark.slow
def test_a_real_ray_with_two_workers_gives_the_same_table(finished, tmp_path):
    path, document, _ = finished
    out = tmp_path / "ray"
    code, text, err = sweep(*BASE, *GRID, "--steps", 30, "--ray", "local", "--workers", 2, "--out", out, "--json")
    assert code == 0, err
    assert "2 at a time" in err
    assert measured(cells(out)) == measured(cells(path))
    assert table(json.loads(text)) == table(document)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--models", "vlaa"], 2, "there is no model 'vlaa' (did you mean 'vla'?)"),
        (["--n-pairs", "2,x"], 2, "--n-pairs: 'x' is not a whole number"),
        (["--lrs", "1e-3,1e-3"], 2, "--lrs: 1e-3 is given twice"),
        (["--lrs", "-1"], 2, "input should be greater than 0"),
        (["--resume"], 2, "--resume needs the folder of the sweep"),
        (["--resume", "--out", "/nowhere"], 2, "/nowhere does not exist"),
        (["--report"], 2, "--report needs the folder of the sweep"),
        (["--report", "--out", "/nowhere"], 2, "/nowhere does not exist"),
        (["--plot", "plot.txt"], 2, "--plot must end in .png or .svg"),
        (["--workers", "0"], 2, "--workers"),
        (["--device", "cuda"], 3, "cuda"),
        (["--device", "cpu", "--impl", "triton"], 3, "impl triton was asked for"),
        (["--ray", "127.0.0.1:1"], 3, "ray"),
        (["--task", "copy", "--n-pairs", "4"], 2, "task.n_pairs is not a key of task copy"),
        (["--seq-lens", "5"], 2, "needs seq_len >= 3*n_pairs + 2*updates + 1 = 25, got 5"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing_behind(linattn, monkeypatch, tmp_path, words, code, message):
    if words[:1] == ["--ray"]:
        monkeypatch.setitem(sys.modules, "ray", None)
    if words == ["--device", "cuda"]:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    returned, out, err = linattn("capacity-sweep", *words)
    assert returned == code, err
    assert out == ""
    assert message in err
    if words[:1] != ["--ray"]:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [("--device", "cpu"), ("--device", "cpu", "--ray", "local")])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_streams_without_a_gpu_here_are_refused(linattn, tmp_path, place, dry):
    code, _, err = linattn("capacity-sweep", *BASE, *GRID, *place, "--streams", 2, "--out", tmp_path / "new", *dry)
    assert code == 2
    assert "--streams 2 needs a GPU of this machine" in err
    assert "--workers" in err
    assert not (tmp_path / "new").exists()
