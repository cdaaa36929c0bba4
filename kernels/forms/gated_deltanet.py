"""The gated delta rule: DeltaNet with a scalar forget gate a head."""

from __future__ import annotations

from torch import Tensor

from linattn_cli.kernels.dispatch import runs_kernels
from linattn_cli.kernels.forms.decode import decodes, matrix_step
from linattn_cli.kernels.forms.deltanet import DeltaState
from linattn_cli.kernels.forms.features import check_mask, feature_map, keep, unit
from linattn_cli.kernels.forms.scan import delta_scan
from linattn_cli.kernels.forms.serial import pick, start_state, token_masks
from linattn_cli.kernels.layout import queries_time_first, stack_tokens, time_first
from linattn_cli.kernels.types import FormOutput, Impl, state_dtype
from linattn_cli.kernels.validate import check_form, check_linear, check_log_decay

_silu = feature_map("silu")


@runs_kernels
def gated_deltanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    mask: Tensor | None = None,
    initial_state: DeltaState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> FormOutput:
    """The delta rule on a state that is decayed first, on unit SiLU features::

        q^ = silu(q) / |silu(q)|;   k^ = silu(k) / |silu(k)|;   g_t = exp(log_decay_t)
        S_t = g_t S_{t-1} + beta_t k^_t (v_t - g_t S_{t-1}^T k^_t)^T;   o_t = S_t^T q^_t

    Shapes: q `[B, T, Q, K]`, k `[B, T, H, K]`, v `[B, T, H, V]`, beta `[B, T, H]` in (0, 1), log_decay `[B, T, H]`,
    natural log, <= 0; mask `[B, T]`, true at real tokens. Dtypes: float64, float32, bfloat16, float16; the state is
    float64 for float64 inputs, else float32.

    Raises `ValueError` for shapes, dtypes or options that do not fit.

    Source: Yang et al. 2024 (Gated Delta Networks, arXiv 2412.06464).

    >>> import torch
    >>> q = k = v = torch.ones(1, 2, 1, 1)
    >>> half = torch.full((1, 2, 1), 0.5)
    >>> gated_deltanet(q, k, v, half, half.log()).o.flatten().tolist()
    [0.5, 0.625]
    """
    if Impl.parse(impl) is Impl.REFERENCE:
        return gated_deltanet_serial(q, k, v, beta, log_decay, mask=mask, initial_state=initial_state)
    _check(q, k, v, beta, log_decay, mask)
    if initial_state is not None and decodes(impl, ("delta_scan",), (v, q, k, beta, log_decay), mask, initial_state):
        check_linear(q, k, v, None, initial_state.S, chunk_size)
        step = matrix_step(
            "gated_deltanet", q, k, v, initial_state.S, beta=beta, log_decay=log_decay, feature_map="silu"
        )
        return FormOutput(step.o, DeltaState(step.S), impl="triton")
    unit_silu = feature_map("silu", normalise=True, impl=impl)
    log_decay = keep(log_decay, mask)
    key = keep(unit_silu(k), mask)
    out = delta_scan(
        unit_silu(q),
        (key * log_decay.exp().unsqueeze(-1)).to(key.dtype),
        (key * beta.unsqueeze(-1)).to(key.dtype),
        v,
        log_decay=log_decay,
        initial_state=None if initial_state is None else initial_state.S,
        chunk_size=chunk_size,
        impl=impl,
    )
    return FormOutput(out.o, DeltaState(out.final_state), impl=out.impl)


def gated_deltanet_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    mask: Tensor | None = None,
    initial_state: DeltaState | None = None,
) -> FormOutput:
    """`gated_deltanet` one token at a time; the oracle."""
    _check(q, k, v, beta, log_decay, mask)
    S = start_state(None if initial_state is None else initial_state.S, k, v.shape[3])
    masks, dtype = token_masks(mask, k.shape[1]), state_dtype(k.dtype)
    betas, gates = beta.to(dtype).unbind(1), log_decay.to(dtype).exp().unbind(1)

    def rounded(x: Tensor) -> Tensor:
        return x.to(k.dtype).to(dtype)  # directions have the dtype of the inputs, in every implementation

    outputs = []
    for q_t, k_t, v_t, beta_t, g_t, real in zip(
        queries_time_first(q, k.shape[2]), time_first(k), time_first(v), betas, gates, masks, strict=True
    ):
        key = rounded(unit(_silu(k_t)))
        read, write = rounded(g_t.unsqueeze(-1) * key), rounded(beta_t.unsqueeze(-1) * key)
        error = v_t - (read.unsqueeze(-2) @ S).squeeze(-2)
        S = pick(real, g_t[..., None, None] * S + write.unsqueeze(-1) * error.unsqueeze(-2), S)
        outputs.append(rounded(unit(_silu(q_t))) @ S)
    return FormOutput(stack_tokens(outputs, v.dtype), DeltaState(S), impl="reference")


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor | None) -> None:
    check_linear(q, k, v, None, None, None)
    check_mask(mask, k)
    check_form(q, k, v, beta=beta)
    check_log_decay(log_decay, k, k.shape[2])
