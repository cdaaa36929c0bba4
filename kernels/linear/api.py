"""Public entry of the linear scan: validates, then picks the implementation."""

from __future__ import annotations

from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.types import Impl, ScanOutput
from linattn_cli.kernels.validate import check_linear


@dispatch.runs_kernels
def linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    exclusive: bool = False,
    reverse: bool = False,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> ScanOutput:
    """Causal linear attention with an optional scalar decay per token and head.

    Recurrence, `g_t = exp(log_decay_t)`::

        S_t = g_t S_{t-1} + k_t v_t^T
        o_t = S_t^T q_t                       (exclusive: o_t = S_{t-1}^T q_t)

    With `reverse` it is the exact adjoint, run from the last token; `D` enters from the right as
    `initial_state` and leaves on the left as `final_state`::

        R_t = D_{t+1} + k_t v_t^T;  o_t = R_t^T q_t;  D_t = g_t R_t
        (exclusive: o_t = D_{t+1}^T q_t;  D_t = g_t D_{t+1} + k_t v_t^T)

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]` with Q a multiple of H (query head j reads
    key/value head `j // (Q // H)`); log_decay `[B, T, H]`, natural log, <= 0; initial_state `[B, H, K, V]`.

    Dtypes: float64, float32, bfloat16, float16; the state is float64 for float64 inputs, else float32, and
    `o` has the dtype of `v`.

    Raises `ValueError` for any shape, dtype, device or option that does not fit.

    Source: MATH of Katharopoulos et al. 2020; with decay, Yang et al. 2023 (GLA, scalar gate).

    >>> import torch
    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> linear_scan(q, k, v).o.flatten().tolist()
    [1.0, 2.0, 3.0]
    >>> linear_scan(q, k, v, exclusive=True).o.flatten().tolist()
    [0.0, 1.0, 2.0]
    """
    check_linear(q, k, v, log_decay, initial_state, chunk_size)
    resolved = dispatch.resolve("linear_scan", impl, v)
    o, final_state = dispatch.run(
        "linear_scan",
        resolved,
        q,
        k,
        v,
        log_decay=log_decay,
        initial_state=initial_state,
        exclusive=exclusive,
        reverse=reverse,
        chunk_size=chunk_size,
    )
    return ScanOutput(o, final_state, impl=resolved)
