"""Whatever the text files of a run folder hold: every command that reads them says so in one line, or copes."""

from __future__ import annotations

import contextlib
import io
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linattn_cli.app import main
from tests.fuzz import examples

TINY = [
    *("--set", "model.d_model=4", "--set", "model.heads=1", "--set", "model.layers=1", "--set", "model.ffn=4"),
    *("--d-head", "4", "--set", "task.vocab_size=8", "--n-pairs", "1", "--batch-size", "1", "--device", "cpu"),
    *("--set", "train.eval_examples=2", "--set", "model.max_positions=4", "--steps", "2", "--set", "train.log_every=1"),
]
READERS = (["compare", "{run}", "{other}"], ["report", "{run}", "-o", "{run}.html"], ["eval", "{run}"])

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("folders") / "run"
    assert left("train", *TINY, "--out", path, "--quiet")[0] == 0
    return path


def left(*words):
    out, err = io.StringIO(), io.StringIO()
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code or 0
    return code, out.getvalue(), err.getvalue()


def places(data, path=()):
    """Every place in nested data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def replaced(data, path, value):
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


@st.composite
def changed(draw, text):
    """The text of a JSON file, or of a file of JSON lines, with one thing in it replaced or cut."""
    lines = text.splitlines() if text.count("\n{") else [text]
    at = draw(st.integers(0, len(lines) - 1))
    data = json.loads(lines[at])
    match draw(st.sampled_from(["replace", "replace", "replace", "cut", "noise"])):
        case "replace":
            lines[at] = json.dumps(replaced(data, draw(st.sampled_from(list(places(data)))), draw(anything)))
        case "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        case "noise":
            lines[at] = draw(st.text(max_size=20) | st.just("[" * 100_000))
    return "\n".join(lines)


@examples(20)
@given(data=st.data())
def test_any_result_and_any_metrics(run, data):
    copy = run.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    name = data.draw(st.sampled_from(["result.json", "metrics.jsonl"]))
    text = data.draw(changed((run / name).read_text()))
    (copy / name).write_bytes(text.encode(errors="surrogatepass"))
    for reader in READERS:
        code, _, err = left(*(word.format(run=copy, other=run) for word in reader), "--quiet")
        assert code in (0, 1, 2), (reader, err)
        assert "Traceback" not in err
    # The run itself goes on, whatever these two hold: neither is what it goes on from.
    code, _, err = left("train", "--resume", "--out", copy, "--quiet")
    assert code == 0, err
