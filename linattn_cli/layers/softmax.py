"""Softmax attention, the baseline layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linattn_cli.kernels.forms.softmax import softmax
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Mixer


class Softmax(Mixer):
    """Causal softmax attention through torch's fused SDPA; its state is the key/value cache."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return softmax(q, k, v, mask=mask, initial_state=initial_state, chunk_size=self.chunk_size, impl=self.impl)
