"""Public entry of the penalty gain: validates, then picks the implementation."""

from __future__ import annotations

from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.types import Impl, PenaltyState, ScanOutput
from linattn_cli.kernels.validate import check_penalty


@dispatch.runs_kernels
def penalty_gain(
    u: Tensor,
    k: Tensor,
    *,
    lambda0: float,
    initial_state: PenaltyState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> ScanOutput:
    """Gains through the running inverse of a penalty matrix, exact, with no conjugate gradient.

    Recurrence::

        P_t = P_{t-1} + u_t u_t^T
        A_t = (lambda0 I + P_t)^-1            (Sherman-Morrison: A_t = A_{t-1} - z z^T / (1 + u.z), z = A_{t-1} u)
        x_t = A_t k_t

    Shapes: u `[B, T, H, K]`, k `[B, T, Q, K]` with Q a multiple of H. The output `o` holds x `[B, T, Q, K]`;
    the final state is a `PenaltyState(mass P, inverse A, age)`, and A is inverted anew from P after
    a chunkwise call of several tokens, and wherever 64 tokens have been added to it by rank-one updates.

    Dtypes: float64, float32, bfloat16, float16; P and A are float64 for float64 inputs, else float32; x has
    the dtype of `k`. The condition number of A grows with T: judge float32 by the residual `|M x - k|`.

    Raises `ValueError` for any shape, dtype, device or option that does not fit.

    Source: VLA (arXiv 2605.11196), eq. for A_t; the chunk form is this project's (README beside this file).

    >>> import torch
    >>> u = k = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    >>> penalty_gain(u, k, lambda0=1.0).o.flatten()
    tensor([0.5000, 0.3333], dtype=torch.float64)
    """
    check_penalty(u, k, lambda0, initial_state, chunk_size)
    resolved = dispatch.resolve("penalty_gain", impl, k)
    x, final_state = dispatch.run(
        "penalty_gain",
        resolved,
        u,
        k,
        lambda0=float(lambda0),
        initial_state=initial_state,
        chunk_size=chunk_size,
    )
    return ScanOutput(x, final_state, impl=resolved)
