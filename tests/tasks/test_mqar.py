"""Properties of the MQAR generator: layout, labels, distances, laws, determinism and refusals."""

from __future__ import annotations

import time

import numpy as np
import pytest

from linattn_cli.tasks import make_task
from linattn_cli.tasks.mqar import Mqar
from linattn_cli.tasks.types import IGNORE

CONFIGS = [
    {"n_pairs": 1},
    {"n_pairs": 4, "seq_len": 20, "vocab_size": 16},
    {"n_pairs": 15, "vocab_size": 16},
    {"n_pairs": 8, "updates": 3},
    {"n_pairs": 8, "updates": 8, "seq_len": 60},
    {"protocol": "zoology", "n_pairs": 1, "vocab_size": 4},
    {"protocol": "zoology", "n_pairs": 7, "vocab_size": 16},
    {"protocol": "zoology", "n_pairs": 7, "vocab_size": 17, "seq_len": 64},
    {"protocol": "zoology", "n_pairs": 8, "updates": 5},
    {"protocol": "zoology", "n_pairs": 8, "updates": 8, "seq_len": 96, "random_non_queries": False},
]
ids = [",".join(f"{k}={v}" for k, v in c.items()) for c in CONFIGS]


def draw(task: Mqar, n: int = 32, **where):
    return task.batch(n, **{"seed": 3, "stream": "train", "index": 0, **where})


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_an_example_can_be_answered_by_reading_it(config):
    """Labels and distances follow from the tokens alone: the last assignment before the query decides."""
    task = Mqar(**config)
    batch = draw(task)
    pairs, context = task.n_pairs + task.updates, task.context_len
    assert batch.inputs.shape == batch.labels.shape == batch.distances.shape == (32, task.input_len)
    assert batch.inputs.dtype == batch.labels.dtype == batch.distances.dtype == np.int64
    assert batch.inputs.min() >= 0
    assert batch.inputs.max() < task.vocab_size
    for tokens, labels, distances in zip(batch.inputs, batch.labels, batch.distances, strict=True):
        value, assigned = {}, {}
        for pair in range(pairs):
            value[tokens[2 * pair]], assigned[tokens[2 * pair]] = tokens[2 * pair + 1], 2 * pair
        assert len(value) == task.n_pairs, "keys must be distinct"
        scored = np.flatnonzero(labels != IGNORE)
        assert scored.min() >= context
        for position in scored:
            assert labels[position] == value[tokens[position]]
            assert distances[position] == position - assigned[tokens[position]]
        assert (np.delete(distances, scored) == -1).all()


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.get("protocol") != "zoology"])
def test_vla_layout(config):
    task = Mqar(**config)
    batch = draw(task)
    separator = task.vocab_size - 1
    assert (batch.inputs[:, task.context_len] == separator).all()
    assert (np.delete(batch.inputs, task.context_len, axis=1) < separator).all()
    assert (batch.labels[:, : task.context_len + 1] == IGNORE).all()
    assert (batch.labels[:, task.context_len + 1 :] != IGNORE).all()


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.get("protocol") == "zoology"])
def test_zoology_layout(config):
    task = Mqar(**config)
    batch = draw(task)
    half, n, context = task.vocab_size // 2, task.n_pairs, task.context_len
    keys, values = batch.inputs[:, 0 : 2 * n : 2], batch.inputs[:, 1 : 2 * n : 2]
    assert keys.min() >= 1
    assert keys.max() < half
    assert values.min() >= half
    assert all(len(set(row)) == n for row in values.tolist())
    scored = batch.labels != IGNORE
    assert (scored.sum(1) == n).all()
    positions = np.nonzero(scored)[1].reshape(-1, n)
    assert (positions >= context).all()
    assert ((positions - context) % 2 == 0).all()
    asked = np.take_along_axis(batch.inputs, positions, 1)
    assert (np.sort(asked, 1) == np.sort(keys, 1)).all(), "each key is asked exactly once"
    if not task.random_non_queries:
        assert (batch.inputs[:, context:][~scored[:, context:]] == 0).all()


@pytest.mark.parametrize("protocol", ["vla", "zoology"])
def test_an_update_changes_the_value_and_the_label(protocol):
    task = Mqar(protocol=protocol, n_pairs=6, updates=6, vocab_size=14, seq_len=48)
    batch = draw(task, 256)
    first, latest = batch.meta["first_values"], batch.meta["values"]
    assert (first != latest).all()
    low = 0 if protocol == "vla" else 7
    assert latest.min() >= low
    assert latest.max() < (13 if protocol == "vla" else 14)
    updated = batch.inputs[:, 12:24:2]
    assert (np.sort(updated, 1) == np.sort(batch.meta["keys"], 1)).all()
    partial = Mqar(protocol=protocol, n_pairs=6, updates=2, vocab_size=14, seq_len=48)
    changed = draw(partial, 256)
    assert ((changed.meta["first_values"] != changed.meta["values"]).sum(1) == 2).all()


def test_data_depend_on_config_seed_stream_and_index_alone():
    task = Mqar(n_pairs=4, seq_len=32)
    again = Mqar(n_pairs=4, seq_len=32)
    np.random.seed(1)
    one = draw(task).inputs
    np.random.seed(2)
    np.random.random(7)
    assert (draw(again).inputs == one).all()
    assert (task.batch(5, seed=3, stream="train", index=0).inputs == one[:5]).all(), "a smaller batch is a prefix"
    assert (task.batch(32, seed=3, stream=0, index=0).inputs == one).all()
    for other in ({"seed": 4}, {"stream": "validation"}, {"stream": "test"}, {"index": 1}):
        assert (draw(task, **other).inputs != one).any(1).all()


def test_streams_are_disjoint():
    """With 24 pairs of 127 tokens two equal examples mean a shared generator, never chance."""
    task = Mqar(n_pairs=24)
    seen = [
        {row.tobytes() for index in range(8) for row in draw(task, 64, stream=stream, index=index).inputs}
        for stream in ("train", "validation", "test")
    ]
    assert [len(rows) for rows in seen] == [512, 512, 512]
    assert len(set.union(*seen)) == 3 * 512


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_pairs": 24}, "07cf54ae9e2f6393"),
        ({"protocol": "zoology", "n_pairs": 8, "updates": 2, "seq_len": 64}, "8634c0374c896aa7"),
    ],
)
def test_fingerprints_are_frozen(config, expected):
    """A changed fingerprint changes every published number: it needs a line in CHANGELOG.md."""
    assert Mqar(**config).fingerprint(0) == expected


def test_fingerprint_sees_seed_and_every_setting():
    base = {"n_pairs": 4, "seq_len": 40, "updates": 1}
    variants = [
        {},
        {"n_pairs": 5},
        {"seq_len": 42},
        {"vocab_size": 64},
        {"updates": 2},
        {"protocol": "zoology"},
        {"protocol": "zoology", "power_a": 1.0},
        {"protocol": "zoology", "random_non_queries": False},
    ]
    prints = [Mqar(**{**base, **variant}).fingerprint(0) for variant in variants]
    prints.append(Mqar(**base).fingerprint(1))
    assert len(set(prints)) == len(prints)


def test_laws_of_keys_values_and_queries():
    """Frequencies within five standard deviations of the law, over 4,000 examples."""
    task = Mqar(n_pairs=4, vocab_size=17, seq_len=21)
    batch = draw(task, 4000)
    for tokens, choices in (
        (batch.inputs[:, 0:8:2], 16),
        (batch.inputs[:, 1:8:2], 16),
        (batch.meta["query_pairs"], 4),
    ):
        counts = np.bincount(tokens.ravel(), minlength=choices)
        mean = tokens.size / choices
        assert len(counts) == choices
        assert abs(counts - mean).max() < 5 * np.sqrt(mean)
    repeated = np.array([len(set(row)) < 4 for row in batch.inputs[:, 1:8:2].tolist()])
    wanted = 1 - (15 / 16) * (14 / 16) * (13 / 16)
    assert abs(repeated.mean() - wanted) < 5 * np.sqrt(wanted / 4000)


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_law_of_zoology_gaps(power_a):
    """The first key's gap follows p_i ~ i^(a-1), the second's the same law among the slots left."""
    task = Mqar(protocol="zoology", n_pairs=2, seq_len=24, power_a=power_a)
    batch = draw(task, 20000)
    gaps = (batch.meta["query_positions"] - task.context_len) // 2
    p = np.arange(1, 11) ** (power_a - 1)
    p /= p.sum()
    second = sum(p[i] * np.where(np.arange(10) == i, 0, p) / (1 - p[i]) for i in range(10))
    for column, law in ((0, p), (1, second)):
        observed = np.bincount(gaps[:, column], minlength=10) / 20000
        assert (abs(observed - law) < 5 * np.sqrt(law / 20000)).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"n_pairs": 8, "seq_len": 20},
            r"mqar \(vla protocol\) needs seq_len >= 3\*n_pairs \+ 2\*updates \+ 1 = 25, got 20; "
            "raise seq_len or lower n_pairs",
        ),
        (
            {"protocol": "zoology", "n_pairs": 8, "updates": 1, "seq_len": 32},
            r"mqar \(zoology protocol\) needs seq_len >= 4\*n_pairs \+ 2\*updates = 34, got 32; raise",
        ),
        ({"protocol": "zoology", "n_pairs": 8, "seq_len": 33}, "needs an even seq_len.*got 33; use 34"),
        ({"n_pairs": 128}, "needs n_pairs <= vocab_size - 1 = 127 distinct keys, got 128; raise vocab_size"),
        (
            {"protocol": "zoology", "n_pairs": 64},
            r"needs n_pairs <= vocab_size // 2 - 1 = 63 distinct keys, got 64; raise vocab_size",
        ),
        ({"n_pairs": 3, "updates": 4}, "needs updates <= n_pairs = 3, got 4.*lower updates"),
        ({"n_pairs": 0}, "mqar.n_pairs must be >= 1, got 0"),
        ({"updates": -1}, "mqar.updates must be >= 0, got -1"),
        ({"vocab_size": 3}, "mqar.vocab_size must be >= 4, got 3"),
        ({"n_pairs": 2.0}, "mqar.n_pairs must be an int, got 2.0"),
        ({"seq_len": "64"}, "mqar.seq_len must be an int, got '64'"),
        ({"protocol": "vlaa"}, "mqar.protocol must be one of vla, zoology; got 'vlaa'"),
        ({"power_a": 0.0}, "mqar.power_a must be finite and > 0, got 0.0"),
        ({"power_a": "x"}, "mqar.power_a must be a number, got 'x'"),
        ({"random_non_queries": 1}, "mqar.random_non_queries must be true or false, got 1"),
    ],
)
def test_impossible_settings_are_refused_with_the_arithmetic(config, message):
    with pytest.raises(ValueError, match=message):
        make_task("mqar", config)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"stream": "tests"}, "stream must be one of train, validation, test; got 'tests'"),
        ({"stream": 3}, r"stream must be one of \[0, 1, 2\]; got 3"),
        ({"seed": -1}, "seed must be an int >= 0, got -1"),
        ({"index": 0.5}, "index must be an int >= 0, got 0.5"),
    ],
)
def test_bad_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        draw(Mqar(), **call)


def test_explain_and_show_tell_the_whole_example():
    task = Mqar(protocol="zoology", n_pairs=3, updates=1, seq_len=20, vocab_size=32)
    batch = draw(task, 2)
    records = task.explain(batch, 1)
    assert [r["token"] for r in records] == batch.inputs[1].tolist()
    assert [r["role"] for r in records[:8]] == ["key", "value"] * 4
    assert [r["label"] for r in records if r["role"] == "query"] == [x for x in batch.labels[1] if x != IGNORE]
    assert {r["role"] for r in records[8:]} == {"query", "filler"}
    text = task.show(batch, 1)
    assert f"{records[0]['token']}:{records[1]['token']}" in text
    assert "updates" in text
    query = next(r for r in records if r["role"] == "query")
    assert f"{query['token']} -> {query['label']} (distance {query['distance']})" in text


def test_a_training_batch_takes_well_under_two_milliseconds():
    """The best of 20 draws: a loaded machine slows some of them, a Python loop per example slows all."""
    task = Mqar(n_pairs=24)
    times = []
    for index in range(20):
        start = time.perf_counter()
        task.batch(64, seed=0, stream=0, index=index)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3
