"""The mesa layer on a GPU as one operator, from q, k and v to `S_t^T A_t q^_t`.

Forward: unit features in float32, the penalty gain of the queries, and the linear scan that reads them out. The
values stay in the dtype they came in, and so does the output; a gain rounded to half precision would not be the
inverse's any more, so keys, queries and gains do not. Backward: that of the scan, of the gain, and of the features.

One operator instead of four spares the host, and nothing is widened by a pass of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.edges_triton import edge_states
from linattn_cli.kernels.linear import triton as linear
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.penalty import triton as penalty
from linattn_cli.kernels.rows_triton import features_backward, features_forward
from linattn_cli.kernels.tiles import four_warps
from linattn_cli.kernels.types import PenaltyState


class Saved(NamedTuple):
    """What the backward takes from the forward.

    final, inverse  the state S and the inverse A after the last token
    key, x          [B, T, H, K], [B, T, Q, K]  unit keys and the gains of unit queries, float32
    masses, inverses, w, added  of `penalty_forward`
    starts          [B, H, N, K, V]  S at the edges of the scan's super-chunks
    """

    final: Tensor
    inverse: Tensor
    key: Tensor
    x: Tensor
    masses: Tensor
    inverses: Tensor
    w: Tensor
    added: Tensor
    starts: Tensor


def _mesa_forward(q, k, v, S, mass, inverse, feature_map, lambda0, chunk):
    v = v.contiguous()
    key, query = (features_forward(x, feature_map, True, True) for x in (k, q))
    x, final_mass, final_inverse, masses, inverses, w, added = penalty.penalty_forward(
        key, query, mass, inverse, lambda0, chunk, correct=q.dtype == torch.float32
    )
    blocks, split = linear.plan(k.shape[3], v.shape[3], key, k.shape[2], chunk)
    S = None if S is None else S.contiguous()
    if v.dtype != torch.float32:
        blocks = four_warps(blocks)
    starts, final = edge_states(key, v, None, S, k.shape[2], blocks, split)
    o, _ = linear.walk(
        x, key, v, None, starts,
        exclusive=False, reverse=False, transposed=False, chunk=chunk, like=key, dtype=v.dtype,
    )  # fmt: skip
    return o, final, final_inverse, key, x, masses, inverses, w, added, starts, final_mass


_mesa = torch.library.custom_op(
    "linattn::mesa",
    _mesa_forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? S, Tensor? mass, Tensor? inverse, str feature_map, float lambda0, "
    "int chunk) -> (" + ", ".join(["Tensor"] * (len(Saved._fields) + 2)) + ")",
)


@_mesa.register_fake
def _(q, k, v, S, mass, inverse, feature_map, lambda0, chunk):
    wide: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    (B, _, H, K), V = k.shape, v.shape[3]
    key = torch.empty(k.shape, **wide)
    x, final_mass, final_inverse, *rest = penalty.unfilled_results(
        key, torch.empty(q.shape, **wide), chunk, inverse is not None
    )
    _, (_, _, supers) = linear.plan(K, V, key, H, chunk)
    o = torch.empty(*q.shape[:3], V, dtype=v.dtype, device=v.device)
    final, starts = torch.empty(B, H, K, V, **wide), torch.empty(B, H, supers, K, V, **wide)
    return o, final, final_inverse, key, x, *rest, starts, final_mass


def _mesa_backward(d_o, d_final, d_mass, d_inverse, q, k, v, saved, feature_map, lambda0, chunk, given):
    s = Saved(*saved)
    d_o = v.new_zeros(*q.shape[:3], v.shape[3]) if d_o is None else d_o
    d_x, d_key, d_v, _, d_S = linear.linear_backward(
        d_o, d_final, s.x, s.key, v, None, s.starts, s.final, False, False, chunk
    )
    d_u, d_query, d_first = penalty.penalty_backward(
        d_x, d_mass, d_inverse, s.key, s.x, s.inverse, s.masses, s.inverses, s.w, s.added, lambda0, chunk, given,
        correct=q.dtype == torch.float32,
    )  # fmt: skip
    d_q = features_backward(q, d_query, feature_map, True)
    d_k = features_backward(k, d_key.add_(d_u), feature_map, True)
    return d_q, d_k, d_v, d_S, d_first


_mesa_gradient = torch.library.custom_op(
    "linattn::mesa_backward",
    _mesa_backward,
    mutates_args=(),
    schema="(Tensor? d_o, Tensor? d_final, Tensor? d_mass, Tensor? d_inverse, Tensor q, Tensor k, Tensor v, "
    "Tensor[] saved, str feature_map, float lambda0, int chunk, bool given) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_mesa_gradient.register_fake
def _(d_o, d_final, d_mass, d_inverse, q, k, v, saved, *_):
    s = Saved(*saved)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return *grads, torch.empty_like(s.final), torch.empty_like(s.inverse)


def _setup(ctx: Any, inputs, output) -> None:
    q, k, v, S, mass, inverse, *ctx.options = inputs
    _, *saved, _ = output
    ctx.set_materialize_grads(False)
    ctx.given, ctx.has = inverse is not None, (S is not None, mass is not None)
    ctx.save_for_backward(q, k, v, *saved)
    ctx.mark_non_differentiable(*saved[2:])


def _backward(gradient, ctx: Any, d_o, d_final, d_inverse, *others):
    q, k, v, *saved = ctx.saved_tensors
    d_q, d_k, d_v, *d_states = gradient(d_o, d_final, others[-1], d_inverse, q, k, v, saved, *ctx.options, ctx.given)
    d_S, d_first = (d if has else None for d, has in zip(d_states, ctx.has, strict=True))
    return d_q, d_k, d_v, d_S, d_first, None, None, None, None


_operator = Operator(_mesa_forward, _mesa, _setup, _backward, _mesa_backward, _mesa_gradient)


def mesa_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    lambda0: float,
    S: Tensor | None,
    state: PenaltyState | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, PenaltyState]:
    """`mesa` without padding: outputs, S and the penalty after the last token; q, k before their feature map."""
    mass, inverse, age = penalty.carried(state, k, lambda0)
    o, final, inverse, *_, mass = _operator(q, k, v, S, mass, inverse, feature_map, float(lambda0), chunk_size or 0)
    return o, final, PenaltyState(mass, inverse, age)
