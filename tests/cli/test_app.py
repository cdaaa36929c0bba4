"""The command line as a user meets it: quick help, one line for wrong usage, documents that parse."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from linattn_cli import __version__
from linattn_cli.app import app, main
from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
from linattn_cli.output import CliError
from linattn_cli.parsing import parse_floats, parse_int, parse_ints, parse_names
from linattn_cli.recipe import recipe_names
from linattn_cli.tasks import TASKS

HEAVY = ("torch", "triton", "numpy", "pydantic", "matplotlib")
COMMANDS = tuple(typer.main.get_command(app).commands)


def call(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line, run in this process."""
    with pytest.raises(SystemExit) as left:
        main(words)
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def fresh(*words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "linattn_cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


def imported_by(*words: str) -> set[str]:
    """The heavy packages that a command line imports, in a fresh process."""
    code = (
        "import sys\nfrom linattn_cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        f"finally:\n    print(*[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize("word", ["--help", "-h", "--version"])
def test_help_and_version_import_nothing_heavy(word):
    assert imported_by(word) == set()


@pytest.mark.parametrize(
    "words", [("list",), ("list", "recipes", "--json"), *((c, "-h") for c in COMMANDS)], ids=" ".join
)
def test_help_of_commands_and_list_import_nothing_that_computes(words):
    assert imported_by(*words) <= {"pydantic"}  # newer typers parse options with it


def test_task_show_does_not_import_torch():
    assert not imported_by("task", "show", "mqar", "--json") & {"torch", "triton"}


def test_version_and_the_commands_of_help(capsys):
    assert call(capsys, "--version")[:2] == (0, f"linattn {__version__}\n")
    code, out, err = call(capsys, "--help")
    assert (code, err) == (0, "")
    for name in COMMANDS:
        assert f" {name} " in out


def test_without_a_command_it_shows_help_and_says_wrong_usage(capsys):
    for words in ((), ("task",)):
        code, out, _ = call(capsys, *words)
        assert code == 2
        assert "Usage: linattn" in out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "task"] + ["task show"])
def test_every_command_has_the_shared_options_and_help_for_each(command):
    done = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 0
    for option in ("--format", "--json", "--quiet", "--debug"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trian",), "No such command 'trian'"),
        (("list", "--jsn"), "No such option"),
        (("list", "modles"), "there is no list of 'modles' (did you mean 'models'?)"),
        (("list", "models", "extra"), "extra"),
        (("list", "--format", "cvs"), "got 'cvs' (did you mean 'csv'?)"),
        (("task", "show"), "Missing argument"),
        (("task", "show", "mqra"), "there is no task 'mqra' (did you mean 'mqar'?)"),
        (("task", "show", "mqar", "--n-pairs", "x"), "--n-pairs"),
        (("task", "show", "mqar", "--n-pairs", "0"), "--n-pairs"),
        (("task", "show", "mqar", "--seq-len", "1q"), "--seq-len: '1q' is not a whole number"),
        (("task", "show", "mqar", "--seq-len", "5"), "3*n_pairs + 2*updates + 1 = 25, got 5"),
        (("task", "show", "mqar", "--protocol", "zoo"), "protocol"),
        (("task", "show", "copy", "--n-pairs", "3"), "task.n_pairs is not a key of task copy"),
        (("task", "show", "mqar", "--stream", "tets"), "(did you mean 'test'?)"),
        (("task", "show", "mqar", "--set", "task.n_piars=3"), "(did you mean 'n_pairs'?)"),
        (("train", "--model", "vlaa"), "there is no model 'vlaa' (did you mean 'vla'?)"),
        (("train", "--recipe", "no-such"), "there is no recipe 'no-such'"),
        (("train", "--set", "model.d_heda=3"), "(did you mean 'd_head'?)"),
        (("train", "--n-pairs", "8", "--seq-len", "20"), "= 25, got 20"),
        (("eval", "no-such-folder"), "no-such-folder"),
        (("doctor", "--device", "gpu"), "the device must be auto, cpu, cuda or cuda:N; got 'gpu'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_one_line_and_exit_2(capsys, words, said):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    first, *rest = err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert all(line.startswith("hint: ") for line in rest)
    assert len(rest) <= 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("train", "vla"), "name it with --model vla"),
        (("train", "copy"), "name it with --task copy"),
        (("latency", "--models", "vla,", "hla2"), "name it in --models: a list has commas and no spaces"),
        (("capacity-sweep", "--models", "vla,", "hla2"), "name it in --models: a list has commas and no spaces"),
        (("verify-scan", "delta_scan"), "name it in --models: a list has commas and no spaces"),
        (("probe-norm", "vla"), "name it in --models: a list has commas and no spaces"),
        (("train", "runs"), "linattn train --help shows what it takes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_name_where_no_argument_belongs_is_told_its_option(capsys, words, hint):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"hint: {hint}"


def test_a_misspelt_and_a_duplicate_recipe_key_at_the_command_line(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("train:\n  lrr: 1e-3\n")
    assert call(capsys, "train", "--recipe", str(path))[2].startswith(
        f"error: {path}, line 2: train.lrr is not a key of train (did you mean 'lr'?)\n"
    )
    path.write_text("train:\n  lr: 1e-3\n  lr: 1e-4\n")
    code, _, err = call(capsys, "train", "--recipe", str(path))
    assert code == 2
    assert err.startswith(f"error: {path}, line 3: duplicate key train.lr, first given on line 2\n")


@pytest.mark.parametrize("words", [("trian", "--json"), ("list", "nothing", "--format", "json"), ("eval", "--json")])
def test_wrong_usage_is_a_document_too_when_json_was_asked_for(capsys, words):
    code, out, err = call(capsys, *words)
    assert code == 2
    document = json.loads(out)
    assert document["status"] == "error"
    assert document["error"]["message"] == err.splitlines()[0].removeprefix("error: ")


def test_a_device_that_is_not_there_is_exit_3(capsys):
    code, _, err = call(capsys, "doctor", "--device", "cuda:99")
    assert code == 3
    assert "hint: use --device" in err


def test_list_knows_everything(capsys):
    _, out, _ = call(capsys, "list", "--json")
    rows = json.loads(out)["results"]
    assert [row["name"] for row in rows if row["kind"] == "model"] == list(MIXERS)
    assert [row["name"] for row in rows if row["kind"] == "task"] == list(TASKS)
    assert [row["name"] for row in rows if row["kind"] == "recipe"] == recipe_names()


@pytest.mark.parametrize("kind", ["models", "tasks"])
def test_list_in_every_format(capsys, kind):
    _, table, _ = call(capsys, "list", kind)
    _, text, _ = call(capsys, "list", kind, "--format", "csv")
    _, markdown, _ = call(capsys, "list", kind, "--format", "markdown")
    names = [row["name"] for row in csv.DictReader(io.StringIO(text))]
    assert names == list(MIXERS if kind == "models" else TASKS)
    for name in names:
        assert name in table
        assert f"| {name} " in markdown


def test_task_show_prints_examples_with_their_labels(capsys):
    code, out, _ = call(capsys, "task", "show", "mqar", "--n-pairs", "4", "--count", "3")
    assert code == 0
    assert out.count("4 pairs, 0 updates, T = 13") == 3
    assert "chance_pairs 0.25" in out


@pytest.mark.parametrize("protocol", ["vla", "zoology"])
def test_the_rows_of_task_show_are_the_batch(capsys, protocol):
    words = ("task", "show", "mqar", "--protocol", protocol, "--updates", "2", "--seed", "5", "--count", "2")
    _, out, _ = call(capsys, *words, "--json")
    document = json.loads(out)
    task = TASKS["mqar"].make({"protocol": protocol, "updates": 2})
    batch = task.batch(2, seed=5, stream="test", index=0)
    for example in range(2):
        rows = [row for row in document["results"] if row["example"] == example]
        assert [row["token"] for row in rows] == batch.inputs[example].tolist()
        assert [-100 if row["label"] is None else row["label"] for row in rows] == batch.labels[example].tolist()
    assert document["summary"]["fingerprint"] == task.fingerprint(5)
    _, text, _ = call(capsys, *words, "--format", "csv")
    assert len(list(csv.DictReader(io.StringIO(text)))) == len(document["results"])


def test_doctor_checks_every_operator(capsys):
    code, out, err = call(capsys, "doctor", "--device", "cpu", "--json")
    assert code == 0
    document = json.loads(out)
    assert {row["operator"] for row in document["results"]} == set(PRIMITIVES)
    for row in document["results"]:
        assert row["passed"] is True
        assert row["max_error"] <= row["budget"]
        assert row["why_not_triton"]
    assert err.startswith(f"linattn {__version__}, torch ")
    assert "device cpu (" in err.splitlines()[0]
    assert {"torch", "triton", "device", "dtype", "impl", "commit"} <= set(document["env"])


def test_doctor_notices_a_wrong_kernel(capsys):
    from linattn_cli.kernels import dispatch

    right = dispatch.load("linear_scan", "chunk")

    def wrong(*tensors, **options):
        o, state = right(*tensors, **options)
        return o * (1 + 1e-4), state

    def broken(*tensors, **options):
        raise RuntimeError("no such instruction")

    with dispatch.override("linear_scan", "chunk", wrong):
        code, out, err = call(capsys, "doctor", "--device", "cpu")
    assert code == 1
    assert "linear_scan (chunk, cpu)" in err
    with dispatch.override("delta_scan", "chunk", broken):
        code, out, err = call(capsys, "doctor", "--device", "cpu", "--json")
    assert code == 1
    (row,) = [row for row in json.loads(out)["results"] if row["operator"] == "delta_scan"]
    assert row["problem"] == "RuntimeError: no such instruction"


def test_a_fault_of_our_own_never_shows_a_traceback(tmp_path):
    code = (
        "from unittest import mock\nfrom linattn_cli.app import main\n"
        "with mock.patch('linattn_cli.recipe.recipe_names', side_effect=RuntimeError('broken')):\n"
        "    main(['list', 'recipes'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 70
    assert done.stderr.startswith("error: internal fault: RuntimeError: broken\nhint: the traceback is saved in ")
    assert len(done.stderr.splitlines()) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_closed_pipe_at_the_command_line():
    command = f"{sys.executable} -m linattn_cli task show mqar --count 1000 --format csv | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "example,position,token,role,label,distance\n", "")


def test_module_and_ascii_only_terminals_work():
    done = fresh("list", "models", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0
    assert "vla" in done.stdout


def test_lists_of_options():
    assert parse_ints("4,8, 1k,128K") == [4, 8, 1024, 131072]
    assert parse_int("2m") == 2 * 1024 * 1024
    assert parse_floats("1e-3,.5") == [1e-3, 0.5]
    assert parse_names("all", MIXERS) == list(MIXERS)
    for wrong in ("", "4,", "4,,8", "4.5", "-1", "k", "1kk", "4,4", "²"):
        with pytest.raises(CliError, match="--n-pairs: "):
            parse_ints(wrong, "--n-pairs")
    for wrong in ("nan", "inf", "x", "1e-3,0.001"):
        with pytest.raises(CliError):
            parse_floats(wrong, "--lrs")
    with pytest.raises(CliError, match="did you mean 'vla'"):
        parse_names("vlaa", MIXERS, "--models")
