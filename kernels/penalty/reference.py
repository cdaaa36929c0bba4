"""The serial penalty gain by Sherman-Morrison updates; the oracle."""

from __future__ import annotations

from torch import Tensor

from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.penalty.inverse import REFRESH, inverse, start
from linattn_cli.kernels.types import PenaltyState


def penalty_gain_reference(
    u: Tensor,
    k: Tensor,
    *,
    lambda0: float,
    initial_state: PenaltyState | None,
    chunk_size: int | None = None,
) -> tuple[Tensor, PenaltyState]:
    """One token at a time; see `penalty_gain` for the recurrence.

    A is inverted anew from P every 64 tokens, so that rank-one updates cannot drift.
    """
    us, ks = time_first(u), queries_time_first(k, u.shape[2])
    P, A, age = start(u, lambda0, initial_state)
    outputs: list[Tensor] = []
    for u_t, k_t in zip(us, ks, strict=True):
        if age >= REFRESH:
            A, age = inverse(P, lambda0), 0
        column = u_t.unsqueeze(-1)
        z = A @ column
        A = A - z @ (z.mT / (1 + column.mT @ z))
        P = P + column @ column.mT
        age += 1
        outputs.append(k_t @ A)
    return stack_tokens(outputs, k.dtype), PenaltyState(P, A, age)
