"""The learned forget gate of the literature, as a log-decay per token and head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

A_RANGE = (1.0, 16.0)
STEP_RANGE = (1e-3, 1e-1)


class SelectiveDecay(nn.Module):
    """`log_decay_t = -exp(A_log) softplus(W x_t + dt_bias)`, `[B, T, heads]`, the gate of Mamba-2 and Gated DeltaNet.

    A starts uniform in [1, 16] and the step softplus(dt_bias) log-uniform in [0.001, 0.1], so that heads start with
    memories of about one token to a thousand. Computed in float32 at least: a decay close to 1 keeps its digits.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(d_model, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*A_RANGE).log())
        step = torch.empty(heads).uniform_(*map(math.log, STEP_RANGE)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, x_BTD: Tensor) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits = self.project(x_BTD.to(self.project.weight.dtype))
            logits = logits.float() if logits.dtype.itemsize < 4 else logits
            step = nn.functional.softplus(logits + self.dt_bias.to(logits.dtype))
            return -self.A_log.to(logits.dtype).exp() * step
