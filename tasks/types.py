"""What every task provides, and what a batch of one looks like. numpy only: no model, no global RNG."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

IGNORE = -100
"""Label of a position that is not scored (the `ignore_index` of torch's cross entropy)."""

STREAMS: dict[str, int] = {"train": 0, "validation": 1, "test": 2}
"""Disjoint seed streams; an example of one is never drawn from another's generator."""

FINGERPRINT_EXAMPLES = 256


@dataclass(frozen=True)
class TaskBatch:
    """Examples of a task, position by position.

    inputs     tokens read by the model, int64 [B, T]
    labels     token to predict *at* that position, int64 [B, T], `IGNORE` where nothing is scored
    distances  tokens between a scored position and what it must recall, int64 [B, T], -1 elsewhere
    meta       arrays the task drew on the way (keys, values, ...), for tests and probes
    """

    inputs: np.ndarray
    labels: np.ndarray
    distances: np.ndarray
    meta: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A generator of labelled sequences whose data depend on (its config, seed, stream, index) alone."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def input_len(self) -> int:
        """Tokens of every example as the model reads it."""

    def batch(self, n: int, *, seed: int, stream: str | int, index: int) -> TaskBatch:
        """`n` examples; asking for fewer gives the first ones of the same batch."""

    def chance(self) -> dict[str, float | None]:
        """Accuracy of guessing: `chance_vocab` over the vocabulary, `chance_pairs` among what was shown."""

    def config(self) -> dict[str, Any]:
        """The resolved settings, enough to build the task again."""

    def fingerprint(self, seed: int) -> str:
        """16 hex digits that change when any datum of any stream does."""

    def explain(self, batch: TaskBatch, row: int) -> list[dict[str, Any]]:
        """One example as records `position, token, role, label, distance` (None where not scored)."""

    def show(self, batch: TaskBatch, row: int = 0) -> str:
        """One example in a form people read."""


def stream_id(stream: str | int) -> int:
    """The number of a stream given by name or number.

    >>> stream_id("validation"), stream_id(2)
    (1, 2)
    """
    if isinstance(stream, str):
        if stream not in STREAMS:
            raise ValueError(f"stream must be one of {', '.join(STREAMS)}; got {stream!r}")
        return STREAMS[stream]
    if stream not in STREAMS.values():
        raise ValueError(f"stream must be one of {sorted(STREAMS.values())}; got {stream!r}")
    return int(stream)


def fingerprint(task: Task, seed: int) -> str:
    """sha256 over the first 256 examples of each stream, cut to 16 hex digits.

    Bytes are hashed as little-endian int64, so a fingerprint means the same on every machine.
    """
    digest = hashlib.sha256()
    for stream in STREAMS.values():
        batch = task.batch(FINGERPRINT_EXAMPLES, seed=seed, stream=stream, index=0)
        for array in (batch.inputs, batch.labels):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


def require_int(task: str, settings: Mapping[str, Any], **minimum: int) -> None:
    """Raise unless each named setting is an int of at least its minimum."""
    for key, least in minimum.items():
        value = settings[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{task}.{key} must be an int, got {value!r}")
        if not least <= value <= sys.maxsize:
            raise ValueError(f"{task}.{key} must be >= {least}, got {value}")
