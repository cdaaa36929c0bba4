"""Types shared by every operator.

Legend of the dimension letters used in names and shapes, here and everywhere:

    B  batch                    T  tokens                   D  model width
    H  key/value heads          G  query heads per key head Q  query heads, Q = G * H
    K  key dimension            V  value dimension
    N  chunks                   C  tokens a chunk

Tensors are laid out `[B, T, H, D]`, time before heads; a state is `[B, H, K, V]` so that `o = S^T q`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Impl(str, Enum):
    """How an operator is computed; `auto` is triton on a supported GPU, else chunk."""

    AUTO = "auto"
    REFERENCE = "reference"
    SCAN = "scan"
    CHUNK = "chunk"
    TRITON = "triton"

    @classmethod
    def parse(cls, value: str | Impl) -> Impl:
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise ValueError(f"impl must be one of {names}; got {value!r}") from None


@dataclass(frozen=True)
class ScanOutput:
    """What a primitive returns.

    o            [B, T, Q, V], dtype of the values (for `penalty_gain` the gains x, [B, T, Q, K])
    final_state  state after the last token (after the first one when `reverse`), float32 or float64
    residual     [B, T, H, V], what `delta_scan` really wrote; None unless asked for
    impl         the implementation that ran
    """

    o: Tensor
    final_state: Any
    residual: Tensor | None = None
    impl: str = ""


class PenaltyState(NamedTuple):
    """State of `penalty_gain`.

    mass     P = sum_s u_s u_s^T, [B, H, K, K], without lambda0 I
    inverse  A = (lambda0 I + P)^-1, [B, H, K, K]
    age      tokens since A was last inverted from P; it is inverted again once this reaches 64
    """

    mass: Tensor
    inverse: Tensor
    age: int = 0


@dataclass(frozen=True)
class FormOutput:
    """What a form (a mixer as a function of its tensors) returns.

    o        [B, T, Q, V], dtype of the values
    state    a NamedTuple of tensors, enough to continue token by token
    clamped  number of read-outs whose denominator was clamped (0-dim int64; after a decoding step on a GPU one flag
             a read-out, `[B, Q]`, as counting them would be a second launch), None where there is none
    impl     the implementation that ran
    """

    o: Tensor
    state: Any
    clamped: Tensor | None = None
    impl: str = ""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and inverses are float64 for float64 inputs, float32 for every other input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_tensors(state: Any) -> list[Tensor]:
    """Every tensor of a state, whatever its nesting, in a fixed order.

    >>> state_tensors((torch.zeros(2), None, [torch.ones(1)], 3))
    [tensor([0., 0.]), tensor([1.])]
    """
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, (tuple, list)):
        return [tensor for part in state for tensor in state_tensors(part)]
    return []


def state_bytes(state: Any) -> int:
    """Bytes held by a state, measured from its tensors.

    >>> state_bytes(PenaltyState(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)))
    32
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))
