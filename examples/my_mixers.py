"""Two mixers of one's own, as `--model examples/my_mixers.py:CLASS` takes them: start from a copy of this file.

`Retention` is a `Mixer` with a form, so that everything is done for it: it trains, decodes, is proved against
its own serial recurrence and timed as a function of its tensors. `MovingAverage` is any other nn.Module.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers import Mixer


class RetentionState(NamedTuple):
    """S `[B, H, K, V]`."""

    S: Tensor


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slowest: int = 8,
    mask: Tensor | None = None,
    initial_state: RetentionState | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> FormOutput:
    """`S_t = g_h S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t / sqrt(K)`, with `g_h = 1 - 2^-n`, n from 2 to `slowest`."""
    keep = torch.ones_like(k[..., 0]) if mask is None else mask.unsqueeze(-1).expand(k.shape[:3]).to(k.dtype)
    log_decay = forgetting(k, slowest) * keep
    S = None if initial_state is None else initial_state.S
    q, k = q * k.shape[3] ** -0.5, k * keep.unsqueeze(-1)
    if impl == "reference":
        return retention_serial(q, k, v, log_decay, S)
    scan = linear_scan(q, k, v, log_decay=log_decay, initial_state=S, chunk_size=chunk_size, impl=impl)
    return FormOutput(scan.o, RetentionState(scan.final_state), impl=scan.impl)


def forgetting(k: Tensor, slowest: int) -> Tensor:
    """`log g_h` for every token, `[B, T, H]`, in float32 at least."""
    rates = torch.linspace(2, slowest, k.shape[2], device=k.device, dtype=torch.float64)
    wide = torch.promote_types(k.dtype, torch.float32)
    return torch.log1p(-torch.exp2(-rates)).to(wide).expand(k.shape[:3])


def retention_serial(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor | None) -> FormOutput:
    """The recurrence, one token at a time: what every other way to compute it is held to."""
    wide = torch.promote_types(k.dtype, torch.float32)
    groups = q.shape[2] // k.shape[2]
    if S is None:
        S = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=wide)
    outputs = []
    for t in range(k.shape[1]):
        write = k[:, t].to(wide).unsqueeze(-1) * v[:, t].to(wide).unsqueeze(-2)
        S = log_decay[:, t].exp()[..., None, None] * S + write
        read = q[:, t].to(wide).unflatten(1, (-1, groups)) @ S
        outputs.append(read.flatten(1, 2).to(v.dtype))
    return FormOutput(torch.stack(outputs, 1), RetentionState(S), impl="reference")


class Retention(Mixer):
    """Linear attention that forgets at a fixed rate a head, after RetNet (arXiv 2307.08621)."""

    form = staticmethod(retention)
    impls = ("reference", "chunk", "triton")

    def __init__(self, d_model: int, heads: int, d_head: int, *, slowest: int = 8, **backbone: Any) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.slowest = slowest

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return retention(
            q,
            k,
            v,
            slowest=self.slowest,
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
        )

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What probe-norm and train measure: the step `S_t = g_t S_{t-1} + ...` has the Jacobian g_t I."""
        return forgetting(self.project(x_BTD)[1], self.slowest), None, None


class MovingAverage(nn.Module):
    """An exponential moving average of the tokens, gated; no heads, no keys: a lower bound for recall."""

    def __init__(self, d_model: int, *, fastest: float = 0.5) -> None:
        super().__init__()
        self.mix_in = nn.Linear(d_model, 2 * d_model)
        self.mix_out = nn.Linear(d_model, d_model)
        rates = torch.logspace(math.log10(fastest), -3, d_model)
        self.logit = nn.Parameter(torch.log(rates / (1 - rates)))

    def forward(self, x: Tensor, state: Tensor | None = None, return_state: bool = False) -> Any:
        value, gate = self.mix_in(x).chunk(2, dim=-1)
        rate = self.logit.sigmoid()
        average = torch.zeros_like(value[:, 0]) if state is None else state
        averages = []
        for t in range(value.shape[1]):
            average = average + rate * (value[:, t] - average)
            averages.append(average)
        y = self.mix_out(torch.stack(averages, 1) * gate.sigmoid())
        return (y, average) if return_state else y
