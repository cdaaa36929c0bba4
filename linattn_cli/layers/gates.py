"""Gates computed from the input of a layer."""

from __future__ import annotations

from torch import Tensor, nn


def log_sigmoid_decay(logits: Tensor) -> Tensor:
    """`log sigmoid(logits)`, at least in float32: a decay close to 1 keeps its digits."""
    return nn.functional.logsigmoid(logits.float() if logits.dtype.itemsize < 4 else logits)


def zero_decay(x_BTD: Tensor, heads: int) -> Tensor:
    """The log-decay of a recurrence that forgets nothing, `[B, T, H]`."""
    return x_BTD.new_zeros(*x_BTD.shape[:2], heads)
