"""How well a model answers: accuracy, loss and exact sequences, over a task and by distance.

Letters: N scored positions, V vocabulary; the others as in `kernels/types.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_cli.model import LanguageModel
from linattn_cli.tasks.types import IGNORE, Task, TaskBatch

EXAMPLES_A_DRAW = 64
TOKENS_A_PASS = 32_768


@dataclass(frozen=True)
class Scored:
    """The scored positions of a batch.

    logits  [N, V] float32 or float64
    labels  [N] int64
    """

    logits: Tensor
    labels: Tensor

    def loss(self) -> Tensor:
        """Mean cross entropy, natural log."""
        return F.cross_entropy(self.logits, self.labels)

    def accuracy(self) -> Tensor:
        """Share of positions whose largest logit is the label."""
        return (self.logits.argmax(-1) == self.labels).double().mean()


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. Every array has one entry a scored position.

    correct   bool; was the largest logit the label
    loss      cross entropy, natural log
    distance  tokens back to what had to be recalled
    example   number of the sequence the position belongs to
    """

    correct: np.ndarray
    loss: np.ndarray
    distance: np.ndarray
    example: np.ndarray

    def figures(self, mask: np.ndarray | None = None) -> dict[str, Any]:
        """Accuracy, loss and exact-sequence accuracy, over all positions or those of `mask`.

        A sequence is exact when every scored position of it (within the mask) is right.
        """
        correct, loss, example = self.correct, self.loss, self.example
        if mask is not None:
            correct, loss, example = correct[mask], loss[mask], example[mask]
        wrong = np.unique(example[~correct]).size
        sequences = np.unique(example).size
        return {
            "accuracy": float(correct.mean()),
            "loss": float(loss.mean()),
            "exact_sequence_accuracy": (sequences - wrong) / sequences,
            "answers": int(correct.size),
            "sequences": sequences,
        }

    def by_distance(self) -> list[dict[str, Any]]:
        """The same figures for distances 1, 2-3, 4-7, 8-15, ...: one row for each range that occurs."""
        octaves = np.floor(np.log2(np.maximum(self.distance, 1))).astype(np.int64)
        rows = []
        for octave in np.unique(octaves):
            low, high = 2 ** int(octave), 2 ** (int(octave) + 1) - 1
            name = f"{low}-{high}" if high > low else f"{low}"
            rows.append({"distance": name, **self.figures(octaves == octave)})
        return rows


@contextlib.contextmanager
def precision(device: torch.device, dtype: str) -> Iterator[None]:
    """Autocast to bfloat16 where the run asks for it; float32 and float64 weights need nothing."""
    if dtype == "bfloat16":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
    else:
        yield


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A numpy array as a tensor; to a GPU without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def scored_positions(batch: TaskBatch) -> tuple[np.ndarray, np.ndarray]:
    """Where a batch is scored, as indices into `[B * T]`, and the labels there.

    They are picked on the host, where the labels come from: a GPU need not be waited for, and the softmax
    over the vocabulary is spared for all other positions.
    """
    flat = batch.labels.reshape(-1)
    index = np.flatnonzero(flat != IGNORE)
    return index, flat[index]


def score(model: nn.Module, batch: TaskBatch, *, device: torch.device, dtype: str) -> Scored:
    """Run the model on a batch and keep the scored positions."""
    index, labels = scored_positions(batch)
    tensors = (to_device(array, device) for array in (batch.inputs, index, labels))
    return score_tensors(model, *tensors, dtype=dtype)


def score_tensors(model: nn.Module, inputs: Tensor, index: Tensor, labels: Tensor, *, dtype: str) -> Scored:
    """`score` of tensors that are on the device: inputs `[B, T]`, index and labels `[N]`.

    model  maps tokens to logits of every position; a `LanguageModel` computes those of the scored ones alone
    """
    with precision(inputs.device, dtype):
        if isinstance(model, LanguageModel):
            picked = model(inputs, at=index)
        else:
            picked = model(inputs).flatten(0, 1).index_select(0, index)
    # The loss is never taken in half precision.
    return Scored(picked if picked.dtype == torch.float64 else picked.float(), labels)


def evaluate(
    model: nn.Module,
    task: Task,
    *,
    examples: int,
    seed: int,
    stream: str,
    device: torch.device,
    dtype: str = "float32",
    on_progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Answer `examples` sequences of a stream of `task`; `on_progress` hears how many more are done.

    The data depend on (task config, seed, stream) alone. Raises `ValueError` if `examples` < 1.
    """
    if examples < 1:
        raise ValueError(f"examples must be >= 1, got {examples}")
    was_training = model.training
    model.eval()
    parts: list[tuple[np.ndarray, ...]] = []
    rows_a_pass = max(1, TOKENS_A_PASS // task.input_len)
    try:
        with torch.no_grad():
            for done in range(0, examples, EXAMPLES_A_DRAW):
                count = min(EXAMPLES_A_DRAW, examples - done)
                batch = task.batch(count, seed=seed, stream=stream, index=done // EXAMPLES_A_DRAW)
                for start in range(0, count, rows_a_pass):
                    part = _rows(batch, slice(start, start + rows_a_pass))
                    parts.append(_judge(model, part, done + start, device, dtype))
                if on_progress is not None:
                    on_progress(count)
    finally:
        model.train(was_training)
    return Evaluation(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _rows(batch: TaskBatch, rows: slice) -> TaskBatch:
    return TaskBatch(batch.inputs[rows], batch.labels[rows], batch.distances[rows])


def _judge(
    model: nn.Module, batch: TaskBatch, first_example: int, device: torch.device, dtype: str
) -> tuple[np.ndarray, ...]:
    scored = score(model, batch, device=device, dtype=dtype)
    loss = F.cross_entropy(scored.logits, scored.labels, reduction="none").double()
    correct = scored.logits.argmax(-1) == scored.labels
    at = batch.labels != IGNORE
    return correct.cpu().numpy(), loss.cpu().numpy(), batch.distances[at], first_example + np.nonzero(at)[0]
