"""Copying: read tokens, then a separator, then predict the same tokens in the same order."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from linattn_cli.tasks.sampling import integers, uniforms
from linattn_cli.tasks.types import IGNORE, TaskBatch, fingerprint, require_int, stream_id


@dataclass(frozen=True)
class Copy:
    """Copy N = `seq_len` tokens, drawn with replacement below SEP = `vocab_size` - 1.

    Layout, 2N tokens as the model reads them; the label of a position is the next token::

        inputs   x1 ... xN  SEP x1 ... xN-1
        labels    .       .  x1 x2 ... xN

    Every scored position lies N tokens after the one it must recall.

    >>> task = Copy(seq_len=3, vocab_size=8)
    >>> batch = task.batch(1, seed=0, stream="test", index=0)
    >>> batch.inputs.tolist(), batch.labels.tolist()
    ([[0, 2, 4, 7, 0, 2]], [[-100, -100, -100, 0, 2, 4]])
    """

    seq_len: int = 32
    vocab_size: int = 32

    def __post_init__(self) -> None:
        require_int("copy", asdict(self), seq_len=1, vocab_size=3)

    @property
    def name(self) -> str:
        return "copy"

    @property
    def input_len(self) -> int:
        return 2 * self.seq_len

    def config(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    def chance(self) -> dict[str, float | None]:
        return {"chance_vocab": 1 / self.vocab_size, "chance_pairs": None}

    def fingerprint(self, seed: int) -> str:
        return fingerprint(self, seed)

    def batch(self, n: int, *, seed: int, stream: str | int, index: int) -> TaskBatch:
        separator = self.vocab_size - 1
        u = uniforms(n, self.seq_len, seed=seed, stream=stream_id(stream), index=index)
        tokens = integers(u, separator)
        inputs = np.concatenate([tokens, np.full((n, 1), separator), tokens[:, :-1]], axis=1)
        labels = np.concatenate([np.full_like(tokens, IGNORE), tokens], axis=1)
        distances = np.where(labels == IGNORE, -1, self.seq_len)
        return TaskBatch(inputs, labels, distances, {"tokens": tokens})

    def explain(self, batch: TaskBatch, row: int) -> list[dict[str, Any]]:
        records = []
        for position in range(self.input_len):
            label = int(batch.labels[row, position])
            role = "source" if position < self.seq_len else "separator" if position == self.seq_len else "copy"
            records.append(
                {
                    "position": position,
                    "token": int(batch.inputs[row, position]),
                    "role": role,
                    "label": None if label == IGNORE else label,
                    "distance": None if label == IGNORE else int(batch.distances[row, position]),
                }
            )
        return records

    def show(self, batch: TaskBatch, row: int = 0) -> str:
        records = self.explain(batch, row)
        inputs = " ".join("SEP" if r["role"] == "separator" else str(r["token"]) for r in records)
        labels = " ".join("." if r["label"] is None else str(r["label"]) for r in records)
        return (
            f"copy: {self.seq_len} tokens, T = {self.input_len}, vocabulary {self.vocab_size}, "
            f"SEP = {self.vocab_size - 1}\ninputs  {inputs}\nlabels  {labels}"
        )
