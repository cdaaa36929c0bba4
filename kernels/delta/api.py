"""Public entry of the delta scan: validates, then picks the implementation."""

from __future__ import annotations

from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.types import Impl, ScanOutput
from linattn_cli.kernels.validate import check_delta


@dispatch.runs_kernels
def delta_scan(
    q: Tensor,
    p: Tensor,
    a: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_residual: bool = False,
    reverse: bool = False,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> ScanOutput:
    """The generalised delta rule: read along `p`, write the prediction error along `a`.

    Recurrence, `g_t = exp(log_decay_t)`::

        r_t = v_t - S_{t-1}^T p_t             (the residual, what is really written)
        S_t = g_t S_{t-1} + a_t r_t^T
        o_t = S_t^T q_t

    With `reverse` it runs from the last token; `D` enters from the right as `initial_state` and leaves on
    the left as `final_state`::

        r_t = v_t - D_{t+1}^T p_t;  R_t = D_{t+1} + a_t r_t^T;  o_t = R_t^T q_t;  D_t = g_t R_t

    Shapes: q `[B, T, Q, K]`, p and a `[B, T, H, K]`, v `[B, T, H, V]` with Q a multiple of H; log_decay
    `[B, T, H]`, natural log, <= 0; initial_state `[B, H, K, V]`.

    The read of `S_{t-1}` is not decayed: the gated delta rule of the literature passes `g_t k_t` as `p`.

    Dtypes: float64, float32, bfloat16, float16; the state is float64 for float64 inputs, else float32; `o`
    has the dtype of `v`, the residual that of the state.

    `chunk_size` is the longest chunk; where the state is float32 the `chunk` implementation takes at most 16 to
    32 tokens, since longer ones round worse than the recurrence itself (README.md).

    Raises `ValueError` for any shape, dtype, device or option that does not fit.

    Source: Schlag et al. 2021; Yang et al. 2024 (arXiv 2406.06484); with p != a, VLA (arXiv 2605.11196).

    >>> import torch
    >>> one = torch.ones(1, 2, 1, 1)
    >>> out = delta_scan(one, one, one, torch.tensor([3.0, 5.0]).view(1, 2, 1, 1), return_residual=True)
    >>> out.o.flatten().tolist(), out.residual.flatten().tolist()
    ([3.0, 5.0], [3.0, 2.0])
    """
    check_delta(q, p, a, v, log_decay, initial_state, chunk_size)
    resolved = dispatch.resolve("delta_scan", impl, v)
    o, final_state, residual = dispatch.run(
        "delta_scan",
        resolved,
        q,
        p,
        a,
        v,
        log_decay=log_decay,
        initial_state=initial_state,
        return_residual=return_residual,
        reverse=reverse,
        chunk_size=chunk_size,
    )
    return ScanOutput(o, final_state, residual, impl=resolved)
