"""`--require` on train and eval: what is refused before anything runs, and what is missed at the end."""

from __future__ import annotations

import json
import math

import pytest

from linattn_cli.output import CliError, Document
from linattn_cli.require import Requirement, check, parse

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--d-head", "8", "--set", "model.ffn=16"),
    *("--n-pairs", "2", "--batch-size", "4", "--set", "task.vocab_size=16", "--device", "cpu"),
    *("--set", "train.eval_examples=16", "--steps", "2", "--quiet"),
]


@pytest.mark.parametrize(
    ("sign", "holds"),
    [
        (">=", (False, True, True)),
        (">", (False, False, True)),
        ("<=", (True, True, False)),
        ("<", (True, False, False)),
        ("==", (False, True, False)),
    ],
)
def test_the_signs(sign, holds):
    (requirement,) = parse([f"loss {sign} 0.5"], "train")
    assert tuple(requirement.holds(value) for value in (0.4, 0.5, 0.6)) == holds
    assert not requirement.holds(math.nan)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acuracy>=0.9", "train has no quantity 'acuracy' (did you mean 'accuracy'?)"),
        ("run>=1", "train has no quantity 'run'"),
        ("accuracy=0.9", "'accuracy=0.9' is not a condition"),
        ("accuracy=>0.9", "is not a condition"),
        ("accuracy", "is not a condition"),
        ("", "is not a condition"),
        ("accuracy>=nan", "'nan' in 'accuracy>=nan' is not a finite number"),
        ("accuracy>=99%", "'99%'"),
        ("0.9<=accuracy", "is not a condition"),
    ],
)
def test_what_cannot_be_required(linattn, text, said, tmp_path):
    code, out, err = linattn("train", *TINY, "--out", tmp_path / "run", "--require", text)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[0]
    assert err.splitlines()[1].startswith("hint: ")
    assert not (tmp_path / "run").exists()  # found before anything began


def test_missed_and_met(linattn, tmp_path):
    run = tmp_path / "run"
    words = ("--require", "accuracy>=0", "--require", "steps==2", "--json")
    assert linattn("train", *TINY, "--out", tmp_path / "met", *words)[0] == 0
    code, out, err = linattn("train", *TINY, "--out", run, *words, "--require", "loss<1e-9")
    document = json.loads(out)
    assert code == 1
    assert document["status"] == "failed"
    assert document["summary"]["steps"] == 2
    assert document["error"]["type"] == "require"
    assert document["error"]["message"].startswith("loss<1e-09 was required, loss is ")
    assert err.splitlines()[-1] == f"failed: {document['error']['message']}"
    # the run is whole, and its own record says the same
    assert json.loads((run / "result.json").read_text()) == document

    code, out, err = linattn("eval", run, "-q", "--format", "csv", "--require", "accuracy_min<=1")
    assert (code, err) == (0, "")
    code, out, err = linattn("eval", run, "-q", "--format", "csv", "--require", "accuracy>1", "--require", "step>2")
    assert code == 1
    assert len(out.splitlines()) > 1
    assert err.count(" was required") == 2


def test_a_norm_that_this_model_does_not_have(linattn, tmp_path):
    code, out, err = linattn("train", *TINY, "--out", tmp_path / "run", "--require", "state_norm_max_B<5")
    assert code == 2
    assert "this train has no quantity 'state_norm_max_B' (did you mean 'state_norm_max_S'?)" in err
    assert "accuracy" in out


def test_a_value_that_is_not_there_meets_nothing():
    doc = Document("train", summary={"jacobian_norm_max": None, "loss": math.nan})
    check([Requirement("jacobian_norm_max", "<", 9.0), Requirement("loss", "<", 9.0)], doc)
    assert doc.exit_code == 1
    assert "jacobian_norm_max has no value here; loss<9 was required, loss is nan" in doc.error["message"]


def test_a_near_miss_does_not_read_like_a_hit():
    doc = Document("eval", summary={"accuracy": 0.9899999})
    check(parse(["accuracy>=0.99"], "eval"), doc)
    assert doc.error["message"] == "accuracy>=0.99 was required, accuracy is 0.9899999"


def test_the_quantities_are_those_of_the_command():
    assert parse(["accuracy_min>0"], "eval")
    with pytest.raises(CliError, match="train has no quantity 'accuracy_min'"):
        parse(["accuracy_min>0"], "train")
