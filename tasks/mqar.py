"""Multi-query associative recall: read key-value pairs, then answer keys with their latest value.

Two protocols. `vla` is the layout of the VLA paper (arXiv 2605.11196), `zoology` that of Arora et al. 2023
(arXiv 2312.04927); both score the position of the query itself, where the value must be predicted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from linattn_cli.tasks.sampling import distinct, integers, uniforms, weighted_distinct
from linattn_cli.tasks.types import IGNORE, TaskBatch, fingerprint, require_int, stream_id

PROTOCOLS = ("vla", "zoology")


@dataclass(frozen=True)
class Mqar:
    """MQAR with n = `n_pairs` pairs and m = `updates` keys assigned a second time.

    Layouts, T = `seq_len` tokens, V = `vocab_size`::

        vla      k1 v1 ... kn vn [k v]*m SEP q ... q           SEP = V - 1, T >= 3n + 2m + 1
        zoology  k1 v1 ... kn vn [k v]*m . q . . q ... .       T even, T >= 4n + 2m

    vla: keys are distinct tokens below SEP, values any tokens below SEP; every position after SEP asks one of
    the n keys, with replacement. zoology: keys are distinct in 1..V/2-1, values distinct in V/2..V-1; each
    key is asked once, at an even offset 2 * gap after the pairs with gaps drawn without replacement from
    p_i ~ i^(power_a - 1); the other positions hold random tokens, or 0 if not `random_non_queries`.

    An update gives one of the n keys another value; the latest one is the label, and distances are counted
    from it: query position minus position of the key's latest assignment.

    `seq_len=None` is the shortest legal length. Raises `ValueError` for impossible settings, with the
    arithmetic.

    >>> task = Mqar(n_pairs=2, vocab_size=16)
    >>> batch = task.batch(1, seed=0, stream="test", index=0)
    >>> batch.inputs.shape, int(batch.inputs[0, 4])
    ((1, 7), 15)
    >>> print(task.show(batch))
    mqar (vla protocol): 2 pairs, 0 updates, T = 7, vocabulary 16
    pairs    1:9  6:2
    queries  at 5: 1 -> 9 (distance 5)  at 6: 1 -> 9 (distance 6)
    """

    protocol: str = "vla"
    n_pairs: int = 8
    seq_len: int | None = None
    vocab_size: int = 128
    updates: int = 0
    power_a: float = 0.01
    random_non_queries: bool = True

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"mqar.protocol must be one of {', '.join(PROTOCOLS)}; got {self.protocol!r}")
        require_int("mqar", asdict(self), n_pairs=1, vocab_size=4, updates=0)
        if not isinstance(self.random_non_queries, bool):
            raise ValueError(f"mqar.random_non_queries must be true or false, got {self.random_non_queries!r}")
        if isinstance(self.power_a, bool) or not isinstance(self.power_a, (int, float)):
            raise ValueError(f"mqar.power_a must be a number, got {self.power_a!r}")
        if not (math.isfinite(self.power_a) and self.power_a > 0):
            raise ValueError(f"mqar.power_a must be finite and > 0, got {self.power_a}; zoology uses 0.01")
        self._check_vocabulary()
        self._check_length()

    def _check_vocabulary(self) -> None:
        title, n = f"mqar ({self.protocol} protocol)", self.n_pairs
        if self.protocol == "vla":
            keys, arithmetic = self.vocab_size - 1, "vocab_size - 1"
        else:
            keys, arithmetic = self.vocab_size // 2 - 1, "vocab_size // 2 - 1"
        if n > keys:
            raise ValueError(
                f"{title} needs n_pairs <= {arithmetic} = {keys} distinct keys, got {n}; "
                "raise vocab_size or lower n_pairs"
            )
        if self.updates > n:
            raise ValueError(
                f"{title} needs updates <= n_pairs = {n}, got {self.updates}: each key is assigned again "
                "at most once; raise n_pairs or lower updates"
            )

    def _check_length(self) -> None:
        n, m = self.n_pairs, self.updates
        if self.protocol == "vla":
            shortest, arithmetic = 3 * n + 2 * m + 1, "3*n_pairs + 2*updates + 1"
        else:
            shortest, arithmetic = 4 * n + 2 * m, "4*n_pairs + 2*updates"
        if self.seq_len is None:
            object.__setattr__(self, "seq_len", shortest)
            return
        require_int("mqar", asdict(self), seq_len=1)
        if self.seq_len < shortest:
            raise ValueError(
                f"mqar ({self.protocol} protocol) needs seq_len >= {arithmetic} = {shortest}, "
                f"got {self.seq_len}; raise seq_len or lower n_pairs"
            )
        if self.protocol == "zoology" and self.seq_len % 2:
            raise ValueError(
                f"mqar (zoology protocol) needs an even seq_len, because queries sit at even offsets, "
                f"got {self.seq_len}; use {self.seq_len + 1}"
            )

    @property
    def name(self) -> str:
        return "mqar"

    @property
    def input_len(self) -> int:
        assert self.seq_len is not None  # resolved in __post_init__
        return self.seq_len

    @property
    def context_len(self) -> int:
        """Tokens of the pairs and updates, before the separator or the query region."""
        return 2 * (self.n_pairs + self.updates)

    def config(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    def chance(self) -> dict[str, float | None]:
        return {"chance_vocab": 1 / self.vocab_size, "chance_pairs": 1 / self.n_pairs}

    def fingerprint(self, seed: int) -> str:
        return fingerprint(self, seed)

    def batch(self, n: int, *, seed: int, stream: str | int, index: int) -> TaskBatch:
        draw = _draw_vla if self.protocol == "vla" else _draw_zoology
        return draw(self, n, seed=seed, stream=stream_id(stream), index=index)

    def explain(self, batch: TaskBatch, row: int) -> list[dict[str, Any]]:
        records = []
        for position in range(self.input_len):
            label = int(batch.labels[row, position])
            scored = label != IGNORE
            if position < self.context_len:
                role = "value" if position % 2 else "key"
            elif self.protocol == "vla" and position == self.context_len:
                role = "separator"
            else:
                role = "query" if scored else "filler"
            records.append(
                {
                    "position": position,
                    "token": int(batch.inputs[row, position]),
                    "role": role,
                    "label": label if scored else None,
                    "distance": int(batch.distances[row, position]) if scored else None,
                }
            )
        return records

    def show(self, batch: TaskBatch, row: int = 0) -> str:
        records = self.explain(batch, row)
        pairs = [f"{records[i]['token']}:{records[i + 1]['token']}" for i in range(0, self.context_len, 2)]
        queries = [
            f"at {r['position']}: {r['token']} -> {r['label']} (distance {r['distance']})"
            for r in records
            if r["role"] == "query"
        ]
        lines = [
            f"mqar ({self.protocol} protocol): {self.n_pairs} pairs, {self.updates} updates, "
            f"T = {self.input_len}, vocabulary {self.vocab_size}",
            "pairs    " + "  ".join(pairs[: self.n_pairs]),
        ]
        if self.updates:
            lines.append("updates  " + "  ".join(pairs[self.n_pairs :]))
        return "\n".join([*lines, "queries  " + "  ".join(queries)])


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a batch after its updates: `context` is what is read, the rest what must be answered."""

    context: np.ndarray
    keys: np.ndarray
    first_values: np.ndarray
    values: np.ndarray
    positions: np.ndarray

    def meta(self, **more: np.ndarray) -> dict[str, np.ndarray]:
        return {"keys": self.keys, "first_values": self.first_values, "values": self.values, **more}


def _assign(task: Mqar, keys: np.ndarray, values: np.ndarray, low: int, high: int, u: np.ndarray) -> _Pairs:
    """Lay out the pairs and `u.shape[1] // 2` updates, whose values are others in low..high-1."""
    n, m = task.n_pairs, task.updates
    rows = np.arange(len(keys))[:, None]
    updated = distinct(u[:, :m], n)
    latest, positions = values.copy(), np.tile(2 * np.arange(n), (len(keys), 1))
    # An update that drew the value its key already has would change nothing: step 1..high-low-1 away from it.
    step = 1 + integers(u[:, m:], high - low - 1)
    latest[rows, updated] = low + (values[rows, updated] - low + step) % (high - low)
    positions[rows, updated] = 2 * (n + np.arange(m))
    context = np.empty((len(keys), task.context_len), dtype=np.int64)
    context[:, 0::2] = np.concatenate([keys, keys[rows, updated]], axis=1)
    context[:, 1::2] = np.concatenate([values, latest[rows, updated]], axis=1)
    return _Pairs(context, keys, values, latest, positions)


def _answer(task: Mqar, inputs: np.ndarray, pairs: _Pairs, which: np.ndarray, where: np.ndarray) -> TaskBatch:
    """Ask key number `which` at position `where` and score it there, both int64 [B, queries]."""
    labels, distances = np.full_like(inputs, IGNORE), np.full_like(inputs, -1)
    np.put_along_axis(inputs, where, np.take_along_axis(pairs.keys, which, 1), 1)
    np.put_along_axis(labels, where, np.take_along_axis(pairs.values, which, 1), 1)
    np.put_along_axis(distances, where, where - np.take_along_axis(pairs.positions, which, 1), 1)
    return TaskBatch(inputs, labels, distances, pairs.meta(query_pairs=which, query_positions=where))


def _draw_vla(task: Mqar, n: int, *, seed: int, stream: int, index: int) -> TaskBatch:
    pairs_, updates, tokens = task.n_pairs, task.updates, task.vocab_size - 1
    queries = task.input_len - task.context_len - 1
    u = uniforms(n, 2 * pairs_ + 2 * updates + queries, seed=seed, stream=stream, index=index)
    u_keys, u_values, u_updates, u_queries = np.split(u, np.cumsum([pairs_, pairs_, 2 * updates]), axis=1)
    pairs = _assign(task, distinct(u_keys, tokens), integers(u_values, tokens), 0, tokens, u_updates)
    inputs = np.empty((n, task.input_len), dtype=np.int64)
    inputs[:, : task.context_len] = pairs.context
    inputs[:, task.context_len] = tokens
    where = np.tile(task.context_len + 1 + np.arange(queries), (n, 1))
    return _answer(task, inputs, pairs, integers(u_queries, pairs_), where)


def _draw_zoology(task: Mqar, n: int, *, seed: int, stream: int, index: int) -> TaskBatch:
    pairs_, updates, half = task.n_pairs, task.updates, task.vocab_size // 2
    region = task.input_len - task.context_len
    slots = region // 2
    u = uniforms(n, 2 * pairs_ + 2 * updates + slots + region, seed=seed, stream=stream, index=index)
    u_keys, u_values, u_updates, u_gaps, u_filler = np.split(u, np.cumsum([pairs_, pairs_, 2 * updates, slots]), axis=1)
    keys = 1 + distinct(u_keys, half - 1)
    values = half + distinct(u_values, task.vocab_size - half)
    pairs = _assign(task, keys, values, half, task.vocab_size, u_updates)
    gaps = weighted_distinct(u_gaps, np.arange(1, slots + 1, dtype=np.float64) ** (task.power_a - 1), pairs_)
    inputs = np.zeros((n, task.input_len), dtype=np.int64)
    inputs[:, : task.context_len] = pairs.context
    if task.random_non_queries:
        inputs[:, task.context_len :] = integers(u_filler, task.vocab_size)
    which = np.tile(np.arange(pairs_), (n, 1))
    return _answer(task, inputs, pairs, which, task.context_len + 2 * gaps)
