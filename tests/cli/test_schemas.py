"""Every command's real output, failures included, against the schema it publishes."""

from __future__ import annotations

import ast
import copy
import csv
import io
import json
import shutil
from pathlib import Path

import jsonschema
import pytest

import linattn_cli
from linattn_cli.app import app, main
from linattn_cli.schema_fields import ERROR_TYPES, OUTPUTS
from linattn_cli.schemas import quantities, schema_of

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.ffn=16", "--batch-size", "4"),
    *("--set", "task.vocab_size=16", "--device", "cpu", "--set", "train.eval_examples=16", "--quiet"),
]
TRAIN = [*TINY, "--d-head", "8", "--n-pairs", "2"]
SWEEP = [*TINY, "--d-heads", "8", "--steps", "2", "--workers", "1"]
FAST = ["--seq-lens", "8,16", "--d-head", "8", "--heads", "1", "--device", "cpu", "--budget-s", "0.05", "--quiet"]

CASES: dict[str, list[list[str]]] = {
    "linattn": [[], ["trian"], ["--no-such-option"]],
    "train": [
        [*TRAIN, "--steps", "2", "--out", "{new}"],
        [*TRAIN, "--steps", "2", "--out", "{new}", "--model", "softmax", "--require", "accuracy>2"],
        [*TINY, "--steps", "2", "--out", "{new}", "--task", "copy", "--seq-len", "4", "--model", "hla2"],
        [*TRAIN, "--steps", "3", "--out", "{new}", "--lr", "1e30", "--set", "train.warmup_steps=0"],
        [*TRAIN, "--out", "{run}"],
        ["--model", "vlaa"],
        ["--steps", "x"],
        ["--device", "cuda:99", "--out", "{new}"],
        ["--recipe", "no-such"],
    ],
    "eval": [
        ["{run}", "--quiet", "--n-pairs", "1,2,4"],
        ["{run}", "--quiet", "--require", "accuracy>2"],
        ["{run}", "--quiet", "--show", "2"],
        ["{new}"],
        ["{run}", "--step", "77"],
        [],
    ],
    "compare": [
        ["{run}", "{other}"],
        ["{run}"],
        ["{run}", "{new}"],
    ],
    "report": [
        ["{run}", "{other}", "--out", "{new}.html", "--quiet"],
        ["{new}"],
        ["{run}", "--out", "{new}.pdf"],
        [],
    ],
    "verify-scan": [
        ["--models", "linear_scan,penalty_gain", "--quick", "--published", "--device", "cpu", "--quiet"],
        ["--models", "vla", "--quick", "--dtypes", "float64", "--inject", "stale-state", "--device", "cpu", "--quiet"],
        ["--models", "nothing"],
    ],
    "latency": [
        ["--models", "linear,penalty_gain", "--impl", "chunk,reference", *FAST],
        ["--models", "linear", "--mode", "decode", *FAST],
        ["--mode", "forwards"],
    ],
    "probe-norm": [
        ["--seq-len", "20", "--heads", "1", "--d-head", "4", "--no-normalise-gate", "--device", "cpu", "--quiet"],
        ["--run", "{run}", "--quiet"],
        ["--models", "vlaa"],
        ["--run", "{new}"],
    ],
    "capacity-sweep": [
        [*SWEEP, "--models", "linear,vla:penalty=none", "--n-pairs", "1,2", "--lrs", "1e-3,1e-2", "--out", "{new}"],
        [*SWEEP, "--models", "lienar"],
        ["--resume"],
    ],
    "task": [["shwo"]],
    "task show": [["mqar"], ["copy"], ["mqar", "--updates", "2"], ["mqra"], []],
    "list": [[], ["models"], ["recipes"], ["modles"]],
    "doctor": [["--device", "cpu", "--quiet"], ["--device", "gpu"]],
    "schema": [[], ["nothing"]],
    "completion": [["bash"], ["tcsh"], []],
}


def commands() -> set[str]:
    """Every command line that the tool has, from the app itself."""
    names = {str(command.name) for command in app.registered_commands}
    for group in app.registered_groups:
        names |= {f"{group.name} {command.name}" for command in group.typer_instance.registered_commands}
        names.add(str(group.name))
    return names | {"linattn"}


def document(capsys, command: str, words: list[str]) -> tuple[int, dict]:
    capsys.readouterr()
    path = [] if command == "linattn" else command.split()
    with pytest.raises(SystemExit) as left:
        main([*path, *words, "--json"])
    return int(left.value.code or 0), json.loads(capsys.readouterr().out)


def validator(command: str) -> jsonschema.Draft202012Validator:
    schema = schema_of(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(command: str, instance: object) -> list[str]:
    found = validator(command).iter_errors(instance)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in found]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.raises(SystemExit) as left:
        main(["train", *TRAIN, "--steps", "3", "--set", "train.eval_every=1", "--out", str(path)])
    assert not left.value.code
    return path


def words_of(words: list[str], run: Path, folder: Path) -> list[str]:
    """The words with their places filled in; `{other}` is a copy of the run."""
    if "{other}" in words:
        shutil.copytree(run, folder / "other")
    return [word.format(new=folder / "new", run=run, other=folder / "other") for word in words]


def test_every_command_has_a_schema_and_is_tried():
    assert set(OUTPUTS) == commands()
    assert set(CASES) == commands()


@pytest.mark.parametrize(
    ("command", "words"),
    [(command, words) for command, cases in CASES.items() for words in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_the_output_is_as_published(capsys, run, tmp_path, command, words):
    code, found = document(capsys, command, words_of(words, run, tmp_path))
    assert problems(command, found) == []
    assert (code == 0) == (found["status"] == "ok")


def test_what_a_run_leaves_is_as_published(run):
    assert problems("train", json.loads((run / "result.json").read_text())) == []
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert [problem for line in lines for problem in problems("metrics", json.loads(line))] == []


def test_a_fault_of_our_own_is_as_published(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("linattn_cli.recipe.recipe_names", lambda: 1 / 0)
    code, found = document(capsys, "list", ["recipes"])
    assert code == 70
    assert problems("list", found) == []


def test_the_schema_can_fail(capsys):
    _, good = document(capsys, "list", ["models"])
    for change in (
        lambda d: d.update(extra=1),
        lambda d: d.pop("env"),
        lambda d: d.update(command="train"),
        lambda d: d.update(status="fine"),
        lambda d: d.update(status="failed"),
        lambda d: d.update(error={"type": "usage", "message": "m", "hint": ""}),
        lambda d: d["results"][0].update(sumary="x"),
        lambda d: d["results"][0].pop("name"),
        lambda d: d["results"][0].update(impls="chunk"),
        lambda d: d["env"].update(seed="0"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        assert problems("list", bad), change


def test_a_summary_that_lacks_a_figure_fails_only_where_it_succeeded(run):
    found = json.loads((run / "result.json").read_text())
    del found["summary"]["accuracy"]
    assert problems("train", found)
    found |= {"status": "interrupted", "error": {"type": "interrupted", "message": "m", "hint": ""}}
    assert problems("train", found) == []
    del found["config"]["train"]["lr"]
    assert problems("train", found)


def test_what_is_not_finite_is_null_with_a_flag(run):
    found = json.loads((run / "result.json").read_text())
    found["summary"] |= {"loss": None, "loss_is_nan": True}
    assert problems("train", found) == []
    found["summary"]["loss_is_nan"] = False
    assert problems("train", found)


def test_every_kind_of_error_is_listed():
    found = set()
    for path in Path(linattn_cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind" and name == "CliError"]
            kinds += node.args[1:2] if name == "Failure" else []
            found |= {
                literal.value for kind in kinds for literal in ast.walk(kind) if isinstance(literal, ast.Constant)
            }
    assert {"check", "internal", "non_finite", "require"} <= found
    assert found <= set(ERROR_TYPES)


def test_the_command_prints_the_schema(capsys):
    for words in (["train"], ["task", "show"], ["task show"], ["metrics"]):
        with pytest.raises(SystemExit):
            main(["schema", *words, "--json"])
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema_of(" ".join(words))))
    with pytest.raises(SystemExit):
        main(["schema", "eval", "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert ("summary", "accuracy_min", "number") in [(row["part"], row["field"], row["type"]) for row in rows]


def test_every_field_says_what_it_means():
    from linattn_cli.schemas import field_rows

    for name, made in OUTPUTS.items():
        assert made.about.endswith("."), name
        assert [row["field"] for row in field_rows(name) if not row["meaning"]] == []
    assert "accuracy" in quantities("eval")
    assert not any("run" in quantities(command) for command in OUTPUTS)
