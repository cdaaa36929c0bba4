"""The copy task: layout, law, determinism and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_cli.tasks import make_task
from linattn_cli.tasks.copy import Copy
from linattn_cli.tasks.types import IGNORE


@pytest.mark.parametrize("seq_len", [1, 2, 32])
def test_labels_repeat_the_source(seq_len):
    task = Copy(seq_len=seq_len, vocab_size=5)
    batch = task.batch(50, seed=0, stream="train", index=0)
    assert batch.inputs.shape == (50, 2 * seq_len) == (50, task.input_len)
    source = batch.inputs[:, :seq_len]
    assert source.max() < 4
    assert (batch.inputs[:, seq_len] == 4).all()
    assert (batch.inputs[:, seq_len + 1 :] == source[:, :-1]).all()
    assert (batch.labels[:, :seq_len] == IGNORE).all()
    assert (batch.labels[:, seq_len:] == source).all()
    recalled = np.arange(seq_len, 2 * seq_len) - batch.distances[:, seq_len:]
    assert (np.take_along_axis(batch.inputs, recalled, 1) == batch.labels[:, seq_len:]).all()
    assert (batch.distances[:, :seq_len] == -1).all()


def test_tokens_are_uniform_below_the_separator():
    batch = Copy(seq_len=32, vocab_size=9).batch(500, seed=0, stream="test", index=0)
    counts = np.bincount(batch.meta["tokens"].ravel(), minlength=8)
    assert len(counts) == 8
    assert abs(counts - 2000).max() < 5 * np.sqrt(2000)


def test_streams_and_indices_are_disjoint_and_repeatable():
    task = Copy()
    draws = {
        (stream, index): task.batch(64, seed=1, stream=stream, index=index).inputs
        for stream in ("train", "validation", "test")
        for index in (0, 1)
    }
    rows = {row.tobytes() for batch in draws.values() for row in batch}
    assert len(rows) == 6 * 64
    assert (task.batch(64, seed=1, stream="train", index=1).inputs == draws["train", 1]).all()


def test_fingerprint_is_frozen():
    assert Copy().fingerprint(0) == "315ac4944623e4e5"
    assert Copy().fingerprint(1) != "315ac4944623e4e5"


def test_chance_and_config_round_trip():
    task = make_task("copy", {"seq_len": 7, "vocab_size": 10})
    assert task.chance() == {"chance_vocab": 0.1, "chance_pairs": None}
    assert make_task("copy", task.config()) == task


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seq_len": 0}, "copy.seq_len must be >= 1, got 0"),
        ({"vocab_size": 2}, "copy.vocab_size must be >= 3, got 2"),
        ({"seq_len": True}, "copy.seq_len must be an int, got True"),
    ],
)
def test_impossible_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_task("copy", config)


def test_show_and_explain():
    task = Copy(seq_len=3, vocab_size=8)
    batch = task.batch(1, seed=0, stream="test", index=0)
    records = task.explain(batch, 0)
    assert [r["role"] for r in records] == ["source"] * 3 + ["separator"] + ["copy"] * 2
    assert [r["label"] for r in records] == [None, None, None, *batch.inputs[0, :3].tolist()]
    assert "SEP" in task.show(batch)
