"""Mixers of a user's own, and sizes at which they train in a moment."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_mixers.py"
RETENTION, AVERAGE = f"{EXAMPLE}:Retention", f"{EXAMPLE}:MovingAverage"

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--d-head", "8", "--set", "model.ffn=16"),
    *("--n-pairs", "2", "--batch-size", "4", "--set", "task.vocab_size=16", "--device", "cpu"),
    *("--set", "train.log_every=1", "--set", "train.eval_examples=16", "--steps", "3"),
]

PLAIN = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, d_model, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)
        self.scale = scale

    def forward(self, x{arguments}):
        {body}
"""
WHOLE = "return self.scale * self.linear(x).cumsum(1)"
