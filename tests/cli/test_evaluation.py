"""Evaluation against answers that are known: an oracle, a model that is wrong where we say, and sizes."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from linattn_cli.config import load_run_config
from linattn_cli.evaluation import evaluate, score_tensors
from linattn_cli.heldout import grid
from linattn_cli.model import build_model
from linattn_cli.output import CliError
from linattn_cli.settings import RunConfig
from linattn_cli.tasks import make_task

CPU = torch.device("cpu")


class CopyOracle(nn.Module):
    """Repeats what stood `delay` tokens earlier; with `wrong_after`, one class off from that position on."""

    def __init__(self, task, wrong_after=None):
        super().__init__()
        self.task = task
        self.wrong_after = wrong_after
        self.modes = []
        self.rows = []

    def forward(self, tokens):
        self.modes.append(self.training)
        self.rows.append(len(tokens))
        n = self.task.seq_len
        answer = torch.zeros_like(tokens)
        answer[:, n:] = tokens[:, : tokens.shape[1] - n]
        if self.wrong_after is not None:
            answer[0, self.wrong_after :] = (answer[0, self.wrong_after :] + 1) % (self.task.vocab_size - 1)
        return 100.0 * nn.functional.one_hot(answer, self.task.vocab_size)


TASK = make_task("copy", {"seq_len": 4, "vocab_size": 8})


def run(model, task=TASK, examples=10, **options):
    return evaluate(model, task, examples=examples, seed=0, stream="test", device=CPU, **options)


def test_an_oracle_is_perfect_and_keeps_its_mode():
    model = CopyOracle(TASK).train()
    figures = run(model).figures()
    assert figures == {
        "accuracy": 1.0,
        "loss": pytest.approx(0.0, abs=1e-6),
        "exact_sequence_accuracy": 1.0,
        "answers": 40,
        "sequences": 10,
    }
    assert model.modes == [False]
    assert model.training


def test_one_wrong_sequence_is_counted_once():
    figures = run(CopyOracle(TASK, wrong_after=6)).figures()
    assert figures["accuracy"] == pytest.approx(38 / 40)
    assert figures["exact_sequence_accuracy"] == pytest.approx(9 / 10)
    assert figures["loss"] == pytest.approx(2 / 40 * 100, rel=1e-3)


def test_it_draws_the_number_of_examples_asked_for_and_reports_progress():
    model, heard = CopyOracle(TASK), []
    assert run(model, examples=150, on_progress=heard.append).figures()["sequences"] == 150
    assert heard == [64, 64, 22]


def test_long_sequences_are_run_in_passes_that_change_nothing(monkeypatch):
    whole = run(CopyOracle(TASK, wrong_after=6), examples=70)
    monkeypatch.setattr("linattn_cli.evaluation.TOKENS_A_PASS", 3 * TASK.input_len)
    model = CopyOracle(TASK)
    parts = run(model, examples=70)
    assert max(model.rows) == 3
    assert sum(model.rows) == 70
    np.testing.assert_array_equal(whole.distance, parts.distance)
    np.testing.assert_array_equal(whole.example, parts.example)
    assert parts.example.tolist() == sorted(parts.example)
    assert set(parts.example) == set(range(70))


def test_chance_is_what_a_constant_answer_gets():
    class Constant(nn.Module):
        def forward(self, tokens):
            return torch.zeros(*tokens.shape, 8)

    figures = run(Constant(), examples=512).figures()
    assert figures["loss"] == pytest.approx(math.log(8))
    assert figures["accuracy"] == pytest.approx(1 / 7, abs=0.03)


def test_distances_are_binned_by_octave_and_add_up():
    task = make_task("mqar", {"n_pairs": 5, "vocab_size": 16})

    class Random(nn.Module):
        def forward(self, tokens):
            return torch.randn(*tokens.shape, 16, generator=torch.Generator().manual_seed(1))

    found = run(Random(), task, examples=200)
    rows = found.by_distance()
    assert [row["distance"] for row in rows] == ["2-3", "4-7", "8-15"]
    assert sum(row["answers"] for row in rows) == found.figures()["answers"] == 200 * 5
    weighted = sum(row["accuracy"] * row["answers"] for row in rows)
    assert weighted == pytest.approx(found.figures()["accuracy"] * 1000)
    near = found.distance <= 3
    assert rows[0]["accuracy"] == pytest.approx(found.correct[near].mean())


def test_no_examples_is_refused():
    with pytest.raises(ValueError, match="examples must be >= 1"):
        run(CopyOracle(TASK), examples=0)


def test_the_grid_keeps_the_trained_length_for_the_trained_size_only():
    config = load_run_config(sets=["task.n_pairs=8", "task.seq_len=40"])
    assert [task.input_len for task in grid(config)] == [40]
    assert [task.input_len for task in grid(config, n_pairs=[4, 8, 16])] == [13, 40, 49]
    assert [task.input_len for task in grid(config, updates=2)] == [29]
    assert [task.input_len for task in grid(config, n_pairs=[4, 8], seq_lens=[64, 50])] == [64, 50, 64, 50]


def test_the_grid_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="needs seq_len >="):
        grid(RunConfig(), n_pairs=[16], seq_lens=[20])
    copy = load_run_config(sets=["task.name=copy"])
    with pytest.raises(CliError, match="belong to mqar; this run was trained on copy"):
        grid(copy, n_pairs=[4])


def test_a_language_model_computes_the_logits_that_are_asked_for_and_no_others():
    config = load_run_config("demo").model
    model = build_model(config, vocab_size=16, seq_len=8)
    tokens = torch.arange(16).view(2, 8)
    at = torch.tensor([3, 9, 15])
    torch.testing.assert_close(model(tokens, at=at), model(tokens).flatten(0, 1)[at])
    scored = score_tensors(model, tokens, at, at, dtype="float32")
    assert scored.logits.shape == (3, 16)
