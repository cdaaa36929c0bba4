"""The primitives as forms call them: `impl="scan"` runs their associative operator, anything else the primitive."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn_cli.kernels import delta, linear, penalty
from linattn_cli.kernels.forms.higher_order import as_segment, grouped, ungrouped
from linattn_cli.kernels.monoids import affine as affine_maps
from linattn_cli.kernels.monoids import linear as linear_segments
from linattn_cli.kernels.monoids import penalty as penalty_segments
from linattn_cli.kernels.monoids.base import apply
from linattn_cli.kernels.monoids.stream import scan_tokens
from linattn_cli.kernels.penalty.inverse import inverse, regularised
from linattn_cli.kernels.types import Impl, PenaltyState, ScanOutput, state_dtype
from linattn_cli.kernels.validate import check_delta, check_linear, check_penalty


def linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> ScanOutput:
    """`linear_scan`, by the operator `(r, S)` when `impl="scan"`."""
    if Impl.parse(impl) is not Impl.SCAN:
        return linear.linear_scan(
            q, k, v, log_decay=log_decay, initial_state=initial_state, chunk_size=chunk_size, impl=impl
        )
    check_linear(q, k, v, log_decay, initial_state, chunk_size)
    heads, dtype = k.shape[2], state_dtype(k.dtype)
    with torch.autocast(q.device.type, enabled=False):
        inputs = [None if x is None else grouped(x.to(dtype), heads) for x in (q, k, v, log_decay)]

        def token(_, k, v, log):
            return linear_segments.token(k, v, log)

        initial = None
        if initial_state is not None:
            first = token(*(None if x is None else x[:, :1] for x in inputs))
            initial = linear_segments.identity(first)._replace(S=as_segment(initial_state, heads))
        o, total = scan_tokens(
            linear_segments.LINEAR,
            inputs,
            token=token,
            read=lambda x, q, *_: apply(x.S, q),
            initial=initial,
            chunk_size=chunk_size,
        )
    return ScanOutput(o.flatten(2, 3).to(v.dtype), ungrouped(total.S), impl="scan")


def delta_scan(
    q: Tensor,
    p: Tensor,
    a: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> ScanOutput:
    """`delta_scan`, by the affine maps `(F, Y)` when `impl="scan"`."""
    if Impl.parse(impl) is not Impl.SCAN:
        return delta.delta_scan(
            q, p, a, v, log_decay=log_decay, initial_state=initial_state, chunk_size=chunk_size, impl=impl
        )
    check_delta(q, p, a, v, log_decay, initial_state, chunk_size)
    heads, dtype = p.shape[2], state_dtype(p.dtype)
    with torch.autocast(q.device.type, enabled=False):
        inputs = [None if x is None else grouped(x.to(dtype), heads) for x in (q, p, a, v, log_decay)]

        def token(_, p, a, v, log):
            return affine_maps.token(p, a, v, log)

        initial = None
        if initial_state is not None:  # the constant map to the carried state
            Y = as_segment(initial_state, heads)
            nothing = Y.new_zeros(*Y.shape[:-2], p.shape[3], p.shape[3])
            initial = affine_maps.AffineSegment(nothing[..., 0, 0], nothing, Y)
        o, total = scan_tokens(
            affine_maps.AFFINE,
            inputs,
            token=token,
            read=lambda x, q, *_: affine_maps.read(x, q),
            initial=initial,
            chunk_size=chunk_size,
        )
    return ScanOutput(o.flatten(2, 3).to(v.dtype), ungrouped(total.Y), impl="scan")


def penalty_gain(
    u: Tensor,
    k: Tensor,
    *,
    lambda0: float,
    initial_state: PenaltyState | None = None,
    chunk_size: int | None = None,
    impl: str | Impl = "auto",
) -> ScanOutput:
    """`penalty_gain`, by the additive mass and one Cholesky solve a token when `impl="scan"`."""
    if Impl.parse(impl) is not Impl.SCAN:
        return penalty.penalty_gain(
            u, k, lambda0=lambda0, initial_state=initial_state, chunk_size=chunk_size, impl=impl
        )
    check_penalty(u, k, lambda0, initial_state, chunk_size)
    heads, dtype = u.shape[2], state_dtype(u.dtype)

    def read(x, _, k):
        factor = torch.linalg.cholesky(regularised(x.P, lambda0).squeeze(3))
        return torch.cholesky_solve(k.mT, factor).mT

    with torch.autocast(u.device.type, enabled=False):
        initial = None
        if initial_state is not None:
            initial = penalty_segments.PenaltySegment(as_segment(initial_state.mass, heads))
        x, total = scan_tokens(
            penalty_segments.PENALTY,
            [grouped(u.to(dtype), heads), grouped(k.to(dtype), heads)],
            token=lambda u, _: penalty_segments.token(u),
            read=read,
            initial=initial,
            chunk_size=chunk_size,
        )
        mass = ungrouped(total.P)
        return ScanOutput(x.flatten(2, 3).to(k.dtype), PenaltyState(mass, inverse(mass, lambda0), 0), impl="scan")
