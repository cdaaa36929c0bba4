"""Linear attention on a GPU as one operator, from q, k and v to the quotient `S^T phi(q) / max(phi(q).z, floor)`.

Forward: S and z of every super-chunk, two scans over their edges, and the walk that reads out and divides. Backward:
the gradients of numerator and denominator, the same edges in reverse time, and one walk for each of dq, dk and dv,
in which the denominator is one more value column (MATH.md section 7). Saved beside the inputs: quotients,
denominators, and S and z at the edges.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from linattn_cli.kernels.edges_triton import carry_kernel
from linattn_cli.kernels.launch import launch
from linattn_cli.kernels.linear.triton import plan
from linattn_cli.kernels.linear_ratio_kernels import ratio_gradient_kernel, ratio_output_kernel, ratio_sum_kernel
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.ratio_triton import quotient_gradient
from linattn_cli.kernels.tiles import Blocks, ceil_div, padded


def _carry(sums: Tensor, initial: Tensor | None, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """The states `[B, H, N, ...]` that enter the super-chunks of these sums, and the one that leaves the last."""
    B, H, supers = sums.shape[:3]
    starts, final = torch.empty_like(sums), sums.new_empty(B, H, *sums.shape[3:])
    size = final.numel() // (B * H)
    block = min(512, padded(size))
    launch(
        carry_kernel, (B * H, ceil_div(size, block)),
        sums, sums, sums if initial is None else initial.contiguous(), starts, final, supers,
        SIZE=size, BLOCK=block, DECAY=False, INITIAL=initial is not None, REVERSE=reverse, END=False, num_warps=4,
    )  # fmt: skip
    return starts, final


def _edges(x, y, weight, S, z, heads: int, blocks: Blocks, split, feature_map: str, *, reverse: bool):
    """S and z at the edges, `[B, H, N, K, V]` and `[B, H, N, K]`, and after the last."""
    (B, T, Q, K), V = x.shape, y.shape[3]
    chunks, length, supers = split
    sums = torch.empty(B, heads, supers, K, V, dtype=torch.float32, device=x.device)
    z_sums = torch.empty(B, heads, supers, K, dtype=torch.float32, device=x.device)
    launch(
        ratio_sum_kernel, (supers * B * heads, ceil_div(V, blocks.BV)),
        x, y, sums if weight is None else weight, sums, z_sums, T, chunks, length, B, heads,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, C=blocks.C, J=Q // heads, MAP=feature_map, WEIGHTED=weight is not None,
        **_products(blocks, blocks.num_stages),
    )  # fmt: skip
    return *_carry(sums, S, reverse=reverse), *_carry(z_sums, z, reverse=reverse)


def _products(blocks: Blocks, num_stages: int) -> dict[str, Any]:
    return {
        "DOT": blocks.dot, "PRECISION": blocks.precision, "num_warps": blocks.num_warps, "num_stages": num_stages,
    }  # fmt: skip


def _stages(blocks: Blocks) -> int:
    """As in the linear scan's walk."""
    return 3 if blocks.dot is tl.bfloat16 and blocks.BK <= 64 else 2


def _forward(q, k, v, S, z, feature_map, floor, chunk):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, T, H, K), Q, V = k.shape, q.shape[2], v.shape[3]
    blocks, split = plan(K, V, k, H, chunk)
    chunks, length, supers = split
    starts, final, z_starts, z_final = _edges(k, v, None, S, z, H, blocks, split, feature_map, reverse=False)
    y = torch.empty(B, T, Q, V, dtype=v.dtype, device=v.device)
    den = torch.empty(B, T, Q, dtype=torch.float32, device=v.device)
    launch(
        ratio_output_kernel, (supers * B * Q, ceil_div(V, blocks.BV)),
        q, k, v, starts, z_starts, y, den, T, chunks, length, B, H, floor,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, C=blocks.C, G=Q // H, J=1, MAP=feature_map, RATIO=True, REVERSE=False,
        **_products(blocks, _stages(blocks)),
    )  # fmt: skip
    return y, den, final, z_final, starts, z_starts


_linear_ratio = torch.library.custom_op(
    "linattn::linear_ratio",
    _forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? S, Tensor? z, str feature_map, float floor, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_linear_ratio.register_fake
def _(q, k, v, S, z, feature_map, floor, chunk):
    (B, T, Q, K), H, V = q.shape, k.shape[2], v.shape[3]
    supers = plan(K, V, k, H, chunk)[1][2]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    y, den = torch.empty(B, T, Q, V, dtype=v.dtype, device=q.device), torch.empty(B, T, Q, **wide)
    states = [torch.empty(B, H, *shape, **wide) for shape in ((K, V), (K,), (supers, K, V), (supers, K))]
    return y, den, *states


def _backward(d_y, d_final, d_z, q, k, v, y, den, starts, z_starts, feature_map, floor, chunk):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, T, H, K), Q, V = k.shape, q.shape[2], v.shape[3]
    d_y = torch.zeros_like(y) if d_y is None else d_y.contiguous()
    d_o, d_den = quotient_gradient(y, den, d_y, floor)
    blocks, split = plan(K, V, k, H, chunk)
    chunks, length, supers = split
    d_starts, d_S, dz_starts, d_z0 = _edges(q, d_o, d_den, d_final, d_z, H, blocks, split, feature_map, reverse=True)
    shape = (T, chunks, length, B, H)
    d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
    launch(
        ratio_output_kernel, (supers * B * H, ceil_div(V, blocks.BV)),
        k, q, d_o, d_starts, dz_starts, d_v, d_den, *shape, floor,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, C=blocks.C, G=1, J=Q // H, MAP=feature_map, RATIO=False, REVERSE=True,
        **_products(blocks, _stages(blocks)),
    )  # fmt: skip
    across, _ = plan(V, K, k, H, chunk)  # here the columns are those of K
    sizes = {"K": K, "V": V, "BK": across.BV, "BV": across.BK, "C": across.C, "MAP": feature_map}
    for x, a, b, other, edges, z_edges, d_x, reverse in (
        (q, d_o, v, k, starts, z_starts, d_q, False),
        (k, v, d_o, q, d_starts, dz_starts, d_k, True),
    ):
        groups = {"G": 1, "J": Q // H} if reverse else {"G": Q // H, "J": 1}
        launch(
            ratio_gradient_kernel, (supers * B * x.shape[2], ceil_div(K, across.BV)),
            x, a, b, other, d_den, edges, z_edges, d_x, *shape,
            **sizes, **groups, REVERSE=reverse, **_products(across, _stages(across)),
        )  # fmt: skip
    return d_q, d_k, d_v, d_S, d_z0


_linear_ratio_backward = torch.library.custom_op(
    "linattn::linear_ratio_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor? d_y, Tensor? d_final, Tensor? d_z, Tensor q, Tensor k, Tensor v, Tensor y, Tensor den, "
    "Tensor starts, Tensor z_starts, str feature_map, float floor, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_linear_ratio_backward.register_fake
def _(d_y, d_final, d_z, q, k, v, y, den, starts, z_starts, *_):
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return *grads, torch.empty_like(starts[:, :, 0]), torch.empty_like(z_starts[:, :, 0])


def _setup(ctx: Any, inputs, output) -> None:
    q, k, v, S, z, *ctx.options = inputs
    y, den, _, _, starts, z_starts = output
    ctx.set_materialize_grads(False)
    ctx.has = (S is not None, z is not None)
    ctx.save_for_backward(q, k, v, y, den, starts, z_starts)
    ctx.mark_non_differentiable(den, starts, z_starts)


def _gradients(gradient, ctx: Any, d_y, _d_den, d_final, d_z, *_):
    d_q, d_k, d_v, *d_states = gradient(d_y, d_final, d_z, *ctx.saved_tensors, *ctx.options)
    d_S, d_z0 = (d if has else None for d, has in zip(d_states, ctx.has, strict=True))
    return d_q, d_k, d_v, d_S, d_z0, None, None, None


_operator = Operator(_forward, _linear_ratio, _setup, _gradients, _backward, _linear_ratio_backward)


def linear_ratio_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    floor: float,
    S: Tensor | None,
    z: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linear_attention` with the ratio read-out and without padding: quotients, denominators `[B, T, Q]` (not
    differentiable), S and z after the last token; q, k before their feature map."""
    y, den, final, z_final, *_ = _operator(q, k, v, S, z, feature_map, floor, chunk_size or 0)
    return y, den, final, z_final
