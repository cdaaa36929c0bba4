"""Any command line: an exit code that is documented, one line that says why, and never a traceback.

Commands that compute are sent to a GPU that is not there, so that everything before the computation is tried in
milliseconds; `train` and `eval` also run for real, in sizes that take no longer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from unittest import mock

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from linattn_cli.app import app, main
from tests.fuzz import examples

GROUP = typer.main.get_command(app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}
QUICK = ("list", "schema", "completion")
"""Commands that take no device because they compute nothing."""

TINY = [
    *("--set", "model.d_model=4", "--set", "model.heads=1", "--set", "model.layers=1", "--set", "model.ffn=4"),
    *("--d-head", "4", "--set", "task.vocab_size=8", "--n-pairs", "1", "--batch-size", "1", "--device", "cpu"),
    *("--set", "train.eval_examples=2", "--set", "model.max_positions=4", "--steps", "1"),
]

NUMBERS = ["0", "1", "2", "3", "-1", "4,8", "1,1", "1k", "999999m", "256..1k", "2..1", "1e-3", "nan", "inf", "1e400"]
ODD = [
    "9" * 30,
    "9" * 5000,
    "",
    " ",
    ",",
    "a,,b",
    "=",
    "\0",
    "\x1b[31m",
    "\ud800",
    "é",
    "日本",
    "--",
    "-",
    "-h",
    "--help",
]
NAMES = ["vla", "vlaa", "linear,vla:penalty=none", "vla:penalty=[", "vla:x", "all", "mqar", "copy", "zoology", "demo"]
PLACES = ["cpu", "cuda", "cuda:99", "float32", "float16", "chunk", "triton", "json", "csv", "table", "xml", "bash"]
PATHS = [
    "nowhere.yaml",
    "./run",
    "no/such/run",
    "/dev/null",
    ".",
    "..",
    "x" * 300,
    "plot.png",
    "p.txt",
    "mine.py:X",
    "a.py",
]
PAIRS = [
    "accuracy>=0.5",
    "accuracy",
    ">=1",
    "x>=1",
    "model.d_head=8",
    "seed=1",
    "model=",
    "=1",
    "a.b.c=2",
    "train",
    "task",
]
words = st.one_of(*map(st.sampled_from, (NUMBERS, ODD, NAMES, PLACES, PATHS, PAIRS)), st.text(max_size=6))


def options_of(command):
    names = [name for parameter in command.params for name in getattr(parameter, "opts", []) if name.startswith("-")]
    return [*names, "--help"]


def is_flag(command, option):
    flags = (parameter.opts for parameter in command.params if getattr(parameter, "is_flag", False))
    return option == "--help" or any(option in names for names in flags)


@st.composite
def command_lines(draw, names):
    name = draw(st.sampled_from(names))
    command = COMMANDS[name]
    line = [name]
    if hasattr(command, "list_commands"):
        line.append(draw(st.sampled_from(command.list_commands(None)) | words))
        command = command.get_command(None, line[-1]) or command
    if draw(st.booleans()):
        line.append(draw(words))
    for _ in range(draw(st.integers(0, 4))):
        option = draw(st.sampled_from(options_of(command)))
        line.append(option)
        if not is_flag(command, option) or draw(st.integers(0, 19)) == 0:
            line.append(draw(words))
    if "--device" in options_of(command):
        line += ["--device", "cuda:99"]
    if "--json" in options_of(command) and draw(st.booleans()):
        line.append("--json")
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a run in it."""
    path = tmp_path_factory.mktemp("lines")
    before = os.getcwd()
    os.chdir(path)
    try:
        assert left(["train", *TINY, "--out", "run", "--quiet"])[0] == 0
        yield path
    finally:
        os.chdir(before)


def left(line):
    """Exit code, stdout and stderr of a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = None
    # verify-scan --interpret decides for the whole process, of which there is one a command only in real life.
    restored = mock.patch.dict(os.environ)
    with restored, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line)
        except SystemExit as left:
            code = left.code or 0
    return code, out.getvalue(), err.getvalue()


def check(line, codes):
    code, out, err = left(line)
    assert code in codes, (code, err)
    assert "--debug" in line or "Traceback" not in err
    errors = [text for text in err.splitlines() if text.startswith(("error: ", "failed: "))]
    bare = code == 2 and not errors and "Usage: linattn" in out  # a group without a command shows its help
    assert bare or len(errors) == (1 if code else 0), err
    assert all(text.isprintable() for text in errors)
    if code and line[-1:] == ["--json"] and not bare and not {"--", "--format"} & set(line):
        document = json.loads(out)
        assert document["error"]["message"] in err


@examples(150)
@given(line=command_lines([name for name in COMMANDS if name not in ("doctor",)]))
def test_any_command_line(folder, line):
    check(line, (0, 2, 3))


@examples(100)
@given(line=st.lists(st.sampled_from([*COMMANDS, "--version", "--help", "--json", "--format"]) | words, max_size=4))
def test_any_words(folder, line):
    named = [word for word in line if word in COMMANDS]
    if named and named[0] not in QUICK:
        line = [*line, "--device", "cuda:99"]
    check(line, (0, 2, 3))


RIGHT = {
    "--model": ["linear", "deltanet", "hla2", "softmax"],
    "--seq-len": ["4"],
    "--lr": ["1e-3", "1e30"],
    "--seed": ["7"],
    "--dtype": ["bfloat16", "float64"],
    "--impl": ["reference", "scan", "chunk"],
    "--require": ["loss<1e9", "accuracy>=2"],
    "--target-accuracy": ["0.5"],
    "--format": ["csv", "json"],
}


@examples(25)
@given(chosen=st.lists(st.sampled_from(list(RIGHT)), unique=True, max_size=3), data=st.data())
def test_any_tiny_training(folder, chosen, data):
    line = ["train", *TINY]
    for option in chosen:
        line += [option, data.draw(st.sampled_from(RIGHT[option]) | words)]
    check(line, (0, 1, 2, 3, 4))


OF_EVAL = ["--n-pairs", "--seq-lens", "--updates", "--step", "--seed", "--impl", "--dtype"]


@examples(40)
@given(chosen=st.lists(st.sampled_from(OF_EVAL), unique=True, max_size=3), data=st.data())
def test_any_evaluation_of_a_run(folder, chosen, data):
    line = ["eval", "run", "--examples", "2"]
    for option in chosen:
        line += [option, data.draw(st.sampled_from(["1", "2", "4", "1,2", "float64", "scan"]) | words)]
    check(line, (0, 1, 2, 3, 4))
