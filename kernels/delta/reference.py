"""The serial delta scan, written to be read beside the recurrence; the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.types import state_dtype


def delta_scan_reference(
    q: Tensor,
    p: Tensor,
    a: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    return_residual: bool,
    reverse: bool,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One token at a time; see `delta_scan` for the recurrence."""
    batch, tokens, heads, key_dim = p.shape
    S = initial_state
    if S is None:
        S = p.new_zeros(batch, heads, key_dim, v.shape[3], dtype=state_dtype(p.dtype))
    qs = queries_time_first(q, heads)
    ps, as_, vs = time_first(p), time_first(a), time_first(v)
    gs = None if log_decay is None else time_first(log_decay.to(S.dtype).exp().unsqueeze(-1).unsqueeze(-1))
    outputs: list[Tensor] = [qs[0]] * tokens
    residuals: list[Tensor] = [vs[0]] * tokens
    for t in reversed(range(tokens)) if reverse else range(tokens):
        r = vs[t] - (ps[t].unsqueeze(-2) @ S).squeeze(-2)
        write = as_[t].unsqueeze(-1) * r.unsqueeze(-2)
        if reverse:
            R = S + write
            outputs[t] = qs[t] @ R
            S = R if gs is None else gs[t] * R
        else:
            S = write + (S if gs is None else gs[t] * S)
            outputs[t] = qs[t] @ S
        residuals[t] = r
    return stack_tokens(outputs, v.dtype), S, torch.stack(residuals, dim=1) if return_residual else None
