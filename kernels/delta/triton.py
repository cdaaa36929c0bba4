"""The delta scan on a GPU: the launches of its forward and backward, as two custom operators.

Forward: chunk inverses (`prepare`), affine maps of the super-chunks (`map`), their chain (`chain`), outputs
(`output`). Backward: the same four steps transposed, then dQ and dP from the states of the forward. The two
middle steps are left out where one super-chunk is enough. Saved: the residuals, the chunk inverses, one state
and one K x K transition a super-chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.delta.triton_backward import (
    adjoint_kernel,
    adjoint_offset_kernel,
    prepare_adjoint_kernel,
    read_gradient_kernel,
)
from linattn_cli.kernels.delta.triton_forward import chain_kernel, map_kernel, output_kernel, prepare_kernel
from linattn_cli.kernels.edges_triton import edge_products, leaving_states, segment_cumsum
from linattn_cli.kernels.launch import launch
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.tiles import (
    LONG,
    Blocks,
    ceil_div,
    choose_blocks,
    padded,
    short_chunks,
    split_time,
)


def plan(p: Tensor, V: int, chunk: int, decays: bool = False) -> tuple[Blocks, tuple[int, int, int]]:
    """Block sizes, and chunks, chunks a super-chunk and super-chunks, of a scan with reads p and V values."""
    B, T, H, K = p.shape
    blocks = choose_blocks(K, V, p.dtype, chunk or None, widest=128 if p.dtype == torch.bfloat16 else 64)
    blocks = short_chunks(blocks)
    short = decays and p.dtype == torch.float32 and T > LONG
    return blocks, split_time(T, blocks.C, B * H * ceil_div(V, blocks.BV), p.device, short=short)


def _sizes(K: int, V: int, blocks: Blocks) -> dict[str, Any]:
    return {
        "K": K, "V": V, "BK": blocks.BK, "BV": blocks.BV, "C": blocks.C,
        "DOT": blocks.dot, "PRECISION": blocks.precision,
        "num_warps": blocks.num_warps, "num_stages": blocks.num_stages,
    }  # fmt: skip


def _edges(transition, offset, initial, *, reverse: bool, transposed: bool) -> Tensor:
    """States entering every super-chunk, from the affine maps of all of them."""
    B, H, supers, K, V = offset.shape
    starts = torch.empty_like(offset)
    BK = padded(K)
    BV = 16 if BK <= 128 else 32
    launch(
        chain_kernel, (B * H, ceil_div(V, BV)),
        transition, offset, starts if initial is None else initial, starts, supers,
        K=K, V=V, BK=BK, BV=BV, INITIAL=initial is not None, REVERSE=reverse, TRANSPOSED=transposed,
        num_warps=4 if BK <= 64 else 8,
    )  # fmt: skip
    return starts


def _only_edge(like: Tensor, V: int, initial: Tensor | None) -> Tensor:
    """The one entering state where time is not split; a copy, as an operator may not return its input."""
    B, _, H, K = like.shape
    if initial is None:
        return torch.zeros(B, H, 1, K, V, dtype=torch.float32, device=like.device)
    return initial.unsqueeze(2).clone()


class Prepared(NamedTuple):
    """What the walk that writes the outputs needs; w and u give the residual, `R = U - W S`.

    w           [B, T, H, K]     (I + N)^-1 P'
    u           [B, T, H, V]     (I + N)^-1 V
    inverse     [B, T, H, C]     (I + N)^-1 of every chunk, empty unless saved
    starts      [B, H, N, K, V]  the state that enters every super-chunk
    transition  [B, H, N, K, K]  F of every super-chunk, empty where there is one
    """

    w: Tensor
    u: Tensor
    inverse: Tensor
    starts: Tensor
    transition: Tensor


def prepare_scan(p, a, v, log_decay, initial_state, *, reverse: bool, chunk: int, save: bool) -> Prepared:
    """Chunk inverses, the affine maps of the super-chunks, and their chain; every tensor is contiguous."""
    B, T, H, K = p.shape
    V = v.shape[3]
    blocks, (chunks, length, supers) = plan(p, V, chunk, log_decay is not None)
    decay = p if log_decay is None else log_decay
    store = torch.bfloat16 if p.dtype == torch.bfloat16 else torch.float32
    w = torch.empty(B, T, H, K, dtype=store, device=p.device)
    u = torch.empty(B, T, H, V, dtype=store, device=p.device)
    inverse, starts, transition = unfilled_saved(p, V, chunk, save, log_decay is not None)
    shared = _sizes(K, V, blocks) | {"DECAY": log_decay is not None, "REVERSE": reverse}
    launch(
        prepare_kernel, (chunks * B * H,),
        p, a, v, decay, w, u, inverse, T, chunks, B, H,
        LEVELS=blocks.C.bit_length() - 1, SAVE=save, **shared,
    )  # fmt: skip
    if supers > 1:
        offset = torch.empty_like(starts)
        launch(
            map_kernel, (supers * B * H, ceil_div(V, blocks.BV) + ceil_div(K, blocks.BV)),
            a, w, u, decay, transition, offset, T, chunks, length, B, H,
            **shared,
        )  # fmt: skip
        starts = _edges(transition, offset, initial_state, reverse=reverse, transposed=False)
    else:
        starts = _only_edge(p, V, initial_state)
    return Prepared(w, u, inverse, starts, transition)


def _delta_forward(q, p, a, v, log_decay, initial_state, reverse, chunk, save, keep_residual):
    q, p, a, v = q.contiguous(), p.contiguous(), a.contiguous(), v.contiguous()
    B, T, H, K = p.shape
    Q, V = q.shape[2], v.shape[3]
    blocks, (chunks, length, supers) = plan(p, V, chunk, log_decay is not None)
    log_decay = None if log_decay is None else log_decay.contiguous()
    initial = None if initial_state is None else initial_state.contiguous()
    w, u, inverse, starts, transition = prepare_scan(
        p, a, v, log_decay, initial, reverse=reverse, chunk=chunk, save=save
    )
    o, residual, final = unfilled_outputs(q, p, v, keep_residual)
    launch(
        output_kernel, (supers * B * H, ceil_div(V, blocks.BV)),
        q, a, w, u, p if log_decay is None else log_decay, starts, o, residual, final, T, chunks, length, B, H,
        G=Q // H, KEEP=keep_residual, DECAY=log_decay is not None, REVERSE=reverse, **_sizes(K, V, blocks),
    )  # fmt: skip
    return o, final, residual, inverse, starts, transition


_delta_scan = torch.library.custom_op(
    "linattn::delta_scan",
    _delta_forward,
    mutates_args=(),
    schema="(Tensor q, Tensor p, Tensor a, Tensor v, Tensor? log_decay, Tensor? initial_state, bool reverse, "
    "int chunk, bool save, bool keep_residual) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def unfilled_outputs(q, p, v, keep_residual):
    """Unfilled outputs: o, residual, final state."""
    B, T, H, K = p.shape
    V = v.shape[3]
    options = {"dtype": torch.float32, "device": p.device}
    return (
        torch.empty(B, T, q.shape[2], V, dtype=v.dtype, device=p.device),
        torch.empty(B, T if keep_residual else 0, H, V, **options),
        torch.empty(B, H, K, V, **options),
    )


def unfilled_saved(p, V, chunk, save, decays=False):
    """Unfilled: chunk inverses, edge states, transitions."""
    B, T, H, K = p.shape
    blocks, (_, _, supers) = plan(p, V, chunk, decays)
    store = torch.bfloat16 if p.dtype == torch.bfloat16 else torch.float32
    options = {"dtype": torch.float32, "device": p.device}
    return (
        torch.empty(B, T, H, blocks.C if save else 0, dtype=store, device=p.device),
        torch.empty(B, H, supers, K, V, **options),
        torch.empty(B, H, supers if supers > 1 else 0, K, K, **options),
    )


@_delta_scan.register_fake
def _(q, p, a, v, log_decay, initial_state, reverse, chunk, save, keep_residual):
    o, residual, final = unfilled_outputs(q, p, v, keep_residual)
    return o, final, residual, *unfilled_saved(p, v.shape[3], chunk, save, log_decay is not None)


def delta_backward(
    d_o, d_final, d_residual, q, p, a, log_decay, final, residual, inverse, starts, transition, reverse, chunk
):
    """Gradients of q, p, a, v, log_decay (empty without one) and the initial state."""
    q, p, a = q.contiguous(), p.contiguous(), a.contiguous()
    B, T, H, K = p.shape
    Q, V = q.shape[2], final.shape[3]
    d_o = torch.zeros(B, T, Q, V, dtype=q.dtype, device=q.device) if d_o is None else d_o.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    blocks, (chunks, length, supers) = plan(p, V, chunk, log_decay is not None)
    if p.dtype == torch.float16:  # float32 with one stage races on tiles of 16 and 32 (triton 3.6.0)
        blocks = replace(blocks, num_stages=1)
    deep = 3 if p.dtype == torch.bfloat16 and blocks.BK <= 64 else blocks.num_stages
    decays = log_decay is not None
    decay = log_decay.contiguous() if decays else p
    shared = _sizes(K, V, blocks) | {"DECAY": decays, "REVERSE": reverse, "G": Q // H}
    columns = ceil_div(V, blocks.BV)
    w = torch.empty(B, T, H, K, dtype=inverse.dtype, device=p.device)
    u = torch.empty(B, T, H, V, dtype=inverse.dtype, device=p.device)
    launch(
        prepare_adjoint_kernel, (chunks * B * H, columns),
        q, a, decay, inverse, d_o, p if d_residual is None else d_residual.contiguous(), w, u, T, chunks, B, H,
        RESIDUAL=d_residual is not None, **shared,
    )  # fmt: skip
    if supers > 1:
        offset = torch.empty_like(starts)
        launch(
            adjoint_offset_kernel, (supers * B * H, columns),
            q, p, decay, d_o, w, u, offset, T, chunks, length, B, H,
            **(shared | {"num_stages": deep}),
        )  # fmt: skip
        d_starts = _edges(transition, offset, d_final, reverse=not reverse, transposed=True)
    else:
        d_starts = _only_edge(p, V, d_final)
    partial = {"dtype": p.dtype if columns == 1 else torch.float32, "device": p.device}
    d_q = torch.empty(columns, B, T, Q, K, **partial)
    d_p, d_a = torch.empty(columns, B, T, H, K, **partial), torch.empty(columns, B, T, H, K, **partial)
    d_v, d_initial = torch.empty(B, T, H, V, dtype=p.dtype, device=p.device), torch.empty_like(final)
    dots = [torch.empty(columns, B, T, n if decays else 0, dtype=torch.float32, device=p.device) for n in (Q, H, H)]
    launch(
        adjoint_kernel, (supers * B * H, columns),
        q, p, a, decay, d_o, residual, w, u, d_starts, d_v, d_a, dots[2], d_initial,
        T, chunks, length, B, H, **shared,
    )  # fmt: skip
    launch(
        read_gradient_kernel, (supers * B * H, columns),
        q, p, a, decay, d_o, residual, d_v, starts, d_q, d_p, dots[0], dots[1], T, chunks, length, B, H,
        **shared,
    )  # fmt: skip
    d_q, d_p, d_a = (x[0] if columns == 1 else x.sum(0).to(p.dtype) for x in (d_q, d_p, d_a))
    if not decays:
        return d_q, d_p, d_a, d_v, q.new_empty(0), d_initial
    q_dots, p_dots, a_dots = (x.sum(0) for x in dots)
    q_dots = q_dots.unflatten(2, (H, -1)).sum(3)
    run: dict[str, Any] = {"tokens": length * blocks.C, "reverse": not reverse}
    if reverse:
        crossing = segment_cumsum(q_dots + p_dots - a_dots, strict=True, **run)
    else:
        crossing = segment_cumsum(q_dots - a_dots, strict=False, **run) + segment_cumsum(p_dots, strict=True, **run)
    edges = edge_products(d_starts, leaving_states(starts, final, reverse=reverse), run["tokens"], T)
    return d_q, d_p, d_a, d_v, (crossing + edges).to(log_decay.dtype), d_initial


_delta_scan_backward = torch.library.custom_op(
    "linattn::delta_scan_backward",
    delta_backward,
    mutates_args=(),
    schema="(Tensor? d_o, Tensor? d_final, Tensor? d_residual, Tensor q, Tensor p, Tensor a, Tensor? log_decay, "
    "Tensor final, Tensor residual, Tensor inverse, Tensor starts, Tensor transition, bool reverse, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_delta_scan_backward.register_fake
def _(d_o, d_final, d_residual, q, p, a, log_decay, final, residual, inverse, starts, transition, reverse, chunk):
    grads = [torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, p, a, residual)]
    d_decay = q.new_empty(0) if log_decay is None else torch.empty_like(log_decay).contiguous()
    return *grads, d_decay, torch.empty_like(final)


def _setup(ctx: Any, inputs, output) -> None:
    q, p, a, _, log_decay, initial_state, ctx.reverse, ctx.chunk, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.has_initial = initial_state is not None
    ctx.save_for_backward(q, p, a, log_decay, *output[1:])


def _backward(gradient, ctx: Any, d_o, d_final, d_residual, *_):
    q, p, a, log_decay, *saved = ctx.saved_tensors
    *grads, d_decay, d_initial = gradient(d_o, d_final, d_residual, q, p, a, log_decay, *saved, ctx.reverse, ctx.chunk)
    d_decay = None if log_decay is None else d_decay
    return *grads, d_decay, d_initial if ctx.has_initial else None, None, None, None, None


_operator = Operator(_delta_forward, _delta_scan, _setup, _backward, delta_backward, _delta_scan_backward)


def delta_scan_triton(
    q: Tensor,
    p: Tensor,
    a: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    return_residual: bool,
    reverse: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`delta_scan` on a GPU; see its docstring for the recurrence and shapes."""
    inputs = (q, p, a, v, log_decay, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    o, final, residual, *_ = _operator(*inputs, reverse, chunk_size or 0, save, save or return_residual)
    return o, final, residual if return_residual else None
