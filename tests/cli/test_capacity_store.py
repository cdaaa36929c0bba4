"""The folder of a sweep: owned by one process, readable with any SQLite tool, never taken over silently."""

import contextlib
import json
import sqlite3
import threading

import pytest

from linattn_cli.capacity import cells_of
from linattn_cli.capacity_cell import crashed
from linattn_cli.capacity_store import COLUMNS, DATABASE, SweepFolder, cell_of
from linattn_cli.output import CliError
from linattn_cli.settings import RunConfig, SweepConfig
from tests.sweep_cells import cells, cut_off_a_write

CONFIG = RunConfig(sweep=SweepConfig(n_pairs=[2, 4], seeds=[0, 1]))
FINISHED = {"accuracy": 0.5, "validation_accuracy": 0.6, "steps": 3, "parameters": 9, "unknown_figure": 1}


def outcome(status="finished", **figures):
    error = None if status == "finished" else {"type": "non_finite", "message": "training is not finite"}
    return {
        "status": status,
        "figures": FINISHED | figures,
        "metrics": [{"step": 3, "loss": 1.5}],
        "files": {"checkpoints/step-3/x": b"abc"},
        "error": error,
    }


@pytest.fixture
def folder(tmp_path):
    with SweepFolder.create(tmp_path / "sweep", CONFIG) as folder:
        folder.add(cells_of(CONFIG))
        yield folder


def test_a_new_sweep_has_every_cell_pending(folder):
    assert [row["status"] for row in folder.rows()] == ["pending"] * 4
    assert [cell.key for cell in folder.missing()] == [cell.key for cell in cells_of(CONFIG)]
    assert (folder.path / "sweep.yaml").exists()


def test_cells_are_entered_once(folder):
    assert folder.add(cells_of(CONFIG)) == []
    larger = CONFIG.model_copy(update={"sweep": SweepConfig(n_pairs=[2, 4, 8], seeds=[0])})
    assert [cell.place["n_pairs"] for cell in folder.add(cells_of(larger))] == [8]


def test_a_finished_cell_is_a_row_and_a_run_folder(folder):
    cell = folder.missing()[0]
    row = folder.record(cell, outcome(), attempts=1, env={"linattn": "x"})
    assert (row["accuracy"], row["status"], row["attempts"]) == (0.5, "finished", 1)
    run = folder.path / row["run"]
    assert json.loads((run / "metrics.jsonl").read_text()) == {"step": 3, "loss": 1.5}
    assert (run / "checkpoints" / "step-3" / "x").read_bytes() == b"abc"
    result = json.loads((run / "result.json").read_text())
    assert (result["summary"]["accuracy"], result["status"], result["config"]["task"]["n_pairs"]) == (0.5, "ok", 2)
    assert cell.key not in {other.key for other in folder.missing()}


def test_a_diverged_cell_is_a_result_and_a_failed_one_is_not(folder):
    first, second, *_ = folder.missing()
    folder.record(first, outcome("diverged"), attempts=1, env={})
    folder.record(second, crashed("killed"), attempts=2, env={})
    keys = [cell.key for cell in folder.missing()]
    assert first.key not in keys
    assert second.key in keys
    rows = {row["key"]: row for row in folder.rows()}
    assert (rows[second.key]["status"], rows[second.key]["error"]) == ("failed", "killed")


def test_any_sqlite_tool_reads_it_also_while_the_sweep_runs(folder):
    folder.record(folder.missing()[0], outcome(), attempts=1, env={})
    other = sqlite3.connect(folder.path / DATABASE)
    found = other.execute("SELECT model, n_pairs, accuracy FROM cells WHERE status = 'finished'").fetchall()
    assert found == [("vla", 2, 0.5)]
    layers = other.execute("SELECT json_extract(config, '$.model.layers') FROM cells").fetchone()
    assert layers == (2,)
    assert [line[1] for line in other.execute("PRAGMA table_info(cells)")] == list(COLUMNS)
    other.close()


def test_a_row_is_enough_to_run_its_cell(folder):
    for row, cell in zip(folder.rows(), cells_of(CONFIG), strict=True):
        assert cell_of(row) == cell


def test_a_reader_that_does_not_let_go_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("linattn_cli.capacity_store.LOCK_TIMEOUT_S", 0.1)
    with SweepFolder.create(tmp_path / "sweep", CONFIG) as folder:
        folder.add(cells_of(CONFIG))
        other = sqlite3.connect(folder.path / DATABASE, check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE")
        timer = threading.Timer(0.5, other.rollback)
        timer.start()
        with contextlib.closing(other):
            cell = next(iter(cells_of(CONFIG)))
            folder.record(cell, outcome(), attempts=1, env={})
            timer.join()
        assert next(row["status"] for row in folder.rows()) == "finished"
    assert "database is locked: waiting; close the program that reads it" in capsys.readouterr().err


@pytest.mark.parametrize("begin", [SweepFolder.look, SweepFolder.resume])
def test_a_write_that_was_cut_off_is_undone(folder, begin):
    folder.record(folder.missing()[0], outcome(), attempts=1, env={})
    folder.close()
    before = cells(folder.path)
    cut_off_a_write(folder.path)
    with begin(folder.path) as again:
        assert again.rows() == before


def test_a_second_process_is_refused(folder):
    with pytest.raises(CliError, match="in use by process"):
        SweepFolder.resume(folder.path)


def test_an_existing_folder_is_never_taken_over(folder, tmp_path):
    with pytest.raises(CliError, match=r"there is a sweep in .* already") as refused:
        SweepFolder.create(folder.path, CONFIG)
    assert "linattn capacity-sweep --resume --out" in refused.value.hint
    (tmp_path / "other").mkdir()
    with pytest.raises(CliError, match="other exists already"):
        SweepFolder.create(tmp_path / "other", CONFIG)


def test_a_folder_without_a_sweep_cannot_be_resumed(tmp_path):
    with pytest.raises(CliError, match="does not exist"):
        SweepFolder.resume(tmp_path / "nothing")
    with pytest.raises(CliError, match="has no sweep"):
        SweepFolder.resume(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"no database at all, but long enough" * 40), "file is not a database"),
        (lambda path: sqlite3.connect(path).executescript("PRAGMA user_version = 99"), "a newer linattn"),
        (lambda path: sqlite3.connect(path).executescript("ALTER TABLE cells DROP COLUMN lr"), "lacks columns"),
    ],
)
def test_a_damaged_database_is_named(folder, damage, message):
    folder.close()
    damage(folder.path / DATABASE)
    with pytest.raises(CliError, match=message) as refused:
        SweepFolder.resume(folder.path)
    assert refused.value.exit_code == 2


def test_a_full_disk_is_told_apart(folder):
    folder._database.execute("PRAGMA max_page_count = 1")
    first, *_ = folder.missing()
    long = outcome("diverged")
    long["error"]["message"] = "x" * 100_000
    with pytest.raises(CliError, match="full") as refused:
        folder.record(first, long, attempts=1, env={})
    assert refused.value.exit_code == 4


def test_the_default_folder_is_the_first_free_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sweep-1", "sweep-2"):
        with SweepFolder.create(None, CONFIG) as folder:
            assert str(folder.path) == f"runs/{name}"
