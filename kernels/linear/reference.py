"""The serial linear scan, written to be read beside the recurrence; the oracle."""

from __future__ import annotations

from torch import Tensor

from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.types import state_dtype


def linear_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    exclusive: bool,
    reverse: bool,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One token at a time; see `linear_scan` for the recurrence."""
    batch, tokens, heads, key_dim = k.shape
    S = initial_state
    if S is None:
        S = k.new_zeros(batch, heads, key_dim, v.shape[3], dtype=state_dtype(k.dtype))
    qs, ks, vs = queries_time_first(q, heads), time_first(k), time_first(v)
    gs = None if log_decay is None else time_first(log_decay.to(S.dtype).exp().unsqueeze(-1).unsqueeze(-1))
    outputs: list[Tensor] = [qs[0]] * tokens
    for t in reversed(range(tokens)) if reverse else range(tokens):
        write = ks[t].unsqueeze(-1) * vs[t].unsqueeze(-2)
        before = S  # decayed by token t only where the direction says so
        if reverse:
            R = S + write
            outputs[t] = qs[t] @ (before if exclusive else R)
            S = R if gs is None else (gs[t] * S + write if exclusive else gs[t] * R)
        else:
            S = write + (S if gs is None else gs[t] * S)
            outputs[t] = qs[t] @ (before if exclusive else S)
    return stack_tokens(outputs, v.dtype), S
