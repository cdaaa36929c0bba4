"""`linattn compare`: what differs, what was reached, and what does not compare."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from linattn_cli.app import main
from linattn_cli.side_by_side import differing, short_paths

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.ffn=16", "--batch-size", "4"),
    *("--set", "task.vocab_size=16", "--device", "cpu", "--set", "train.eval_examples=16", "--quiet"),
    *("--d-head", "8", "--n-pairs", "2", "--steps", "3"),
]


def call(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    found = capsys.readouterr()
    return int(left.value.code or 0), found.out, found.err


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {"vla": [], "linear": ["--model", "linear", "--lr", "1e-2"], "four": ["--n-pairs", "4"]}
    for name, words in made.items():
        with pytest.raises(SystemExit) as left:
            main(["train", *TINY, *words, "--out", str(folder / name)])
        assert not left.value.code
    return [folder / name for name in made]


def test_a_row_a_run_with_what_differs(capsys, runs):
    code, out, err = call(capsys, "compare", *runs[:2], "--json")
    found = json.loads(out)
    assert code == 0, err
    assert found["summary"]["differing"] == ["model.name", "train.lr"]
    assert found["summary"]["same_data"] is found["summary"]["same_machine"] is True
    vla, linear = found["results"]
    assert (vla["model.name"], linear["model.name"]) == ("vla", "linear")
    assert (vla["train.lr"], linear["train.lr"]) == (0.0003, 0.01)
    for row, run in zip((vla, linear), runs, strict=False):
        summary = json.loads((run / "result.json").read_text())["summary"]
        for key in ("accuracy", "loss", "parameters", "state_bytes", "train_s", "fingerprint"):
            assert row[key] == summary[key], key
        assert row["status"] == "finished"
    best = max((vla, linear), key=lambda row: row["accuracy"])
    assert found["summary"]["best_accuracy"] == best["accuracy"]


def test_the_table_has_a_column_a_run(capsys, runs):
    _, out, _ = call(capsys, "compare", *runs[:2])
    heads = [line.split() for line in out.splitlines() if line.startswith(("setting", "figure"))]
    assert heads == [["setting", "vla", "linear"], ["figure", "vla", "linear"]]
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()}
    assert lines["train.lr"] == ["0.0003", "0.01"]
    assert len(lines["state_bytes"]) == 2
    _, out, _ = call(capsys, "compare", *runs[:2], "--format", "markdown")
    assert any(line.replace(" ", "").startswith("|train.lr|0.0003|0.01|") for line in out.splitlines())
    _, out, _ = call(capsys, "compare", *runs[:2], "--format", "csv")
    assert [row["model"] for row in csv.DictReader(io.StringIO(out))] == ["vla", "linear"]


def test_runs_on_other_data_are_told_apart(capsys, runs):
    code, out, err = call(capsys, "compare", *runs, "--json")
    assert code == 0
    assert "the runs answer different data" in err
    assert json.loads(out)["summary"]["same_data"] is False
    assert "task.n_pairs" in json.loads(out)["summary"]["differing"]


def test_runs_of_other_machines_are_told_apart(capsys, runs, tmp_path):
    copy = tmp_path / "moved"
    shutil.copytree(runs[0], copy)
    result = json.loads((copy / "result.json").read_text())
    result["env"]["device_name"] = "another"
    (copy / "result.json").write_text(json.dumps(result))
    _, out, err = call(capsys, "compare", runs[0], copy)
    assert "their times do not compare" in err
    assert "(none: the recipes are the same)" in out
    assert any(line.split()[0:1] == ["device_name"] for line in out.splitlines())


def test_a_run_that_is_not_finished_has_its_last_line(capsys, runs, tmp_path):
    copy = tmp_path / "half way"
    shutil.copytree(runs[0], copy)
    (copy / "result.json").unlink()
    code, out, err = call(capsys, "compare", runs[0], copy, "--json")
    row = json.loads(out)["results"][1]
    assert code == 0
    assert (row["status"], row["steps"], row["accuracy"]) == ("unfinished", 3, None)
    assert "linattn train --resume --out" in err
    assert "half way" in err
    assert json.loads(out)["summary"]["same_data"] is None


def test_wrong_usage_is_one_line_with_the_remedy(capsys, runs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(runs[0], broken)
    cases = [
        ([runs[0]], "compare takes at least two runs"),
        ([runs[0], runs[0]], "is given twice"),
        ([runs[0], tmp_path / "no such"], "does not exist"),
        ([runs[0], tmp_path], "is not a run folder"),
        ([runs[0], broken], "is not JSON"),
    ]
    (broken / "result.json").write_text("{")
    for words, message in cases:
        code, out, err = call(capsys, "compare", *words)
        assert (code, out) == (2, ""), message
        assert message in err
        assert "hint: " in err
    (broken / "result.json").write_text('{"schema_version": 99}')
    assert "written by a newer linattn" in call(capsys, "compare", runs[0], broken)[2]
    (broken / "result.json").write_text('{"schema_version": 1, "command": "train"}')
    assert "no document of linattn" in call(capsys, "compare", runs[0], broken)[2]
    (broken / "recipe.yaml").write_text("model: {name: vla}\n")
    assert "task is missing" in call(capsys, "compare", runs[0], broken)[2]


def test_options_of_one_mixer_are_no_difference_to_another():
    vla = {"model": {"name": "vla", "options": {"lambda0": 0.1}}}
    other = {"model": {"name": "vla", "options": {"lambda0": 0.2}}}
    assert list(differing([vla, {"model": {"name": "linear", "options": {}}}])) == ["model.name"]
    assert list(differing([vla, other])) == ["model.options.lambda0"]
    assert differing([vla, vla]) == {}


def test_no_code_of_a_run_is_executed(capsys, runs, tmp_path):
    strange = tmp_path / "strange"
    shutil.copytree(runs[0], strange)
    (strange / "mixer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    recipe = (strange / "recipe.yaml").read_text().replace("name: vla", "name: mixer.py:Mine", 1)
    (strange / "recipe.yaml").write_text(recipe)
    code, out, _ = call(capsys, "compare", runs[0], strange, "--json")
    assert code == 0
    assert json.loads(out)["results"][1]["model"] == "Mine"
    assert not (tmp_path / "ran").exists()


def test_names_are_as_long_as_they_must_be():
    assert short_paths([Path("a/x/1"), Path("b/x/1"), Path("a/x/2")]) == ["a/x/1", "b/x/1", "a/x/2"]
