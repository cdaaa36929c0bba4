"""VLA on a GPU as one operator, from q, k, v and u to the quotient, with the kernels fused where they meet.

Forward: unit keys with their norms, the penalty gain over its norm, the delta scan, and a walk that maps the
queries, reads out and divides. Backward: the adjoints of the same, each kernel of the scan and of the gain as it
is, and one kernel each that sums up the gradient of q and of k. What is saved is as small as what the parts save:
phi(q), phi(k) and the gain itself are made again.

One operator instead of seven also spares the host, which below 8k tokens is what a caller waits for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels.delta import triton as delta
from linattn_cli.kernels.launch import launch
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.penalty import triton as penalty
from linattn_cli.kernels.ratio_triton import edge_sums, quotient_gradient
from linattn_cli.kernels.rows_triton import features_triton, gate_gradient, unit_features
from linattn_cli.kernels.tiles import Blocks, ceil_div
from linattn_cli.kernels.types import PenaltyState
from linattn_cli.kernels.vla_triton_kernels import key_gradient_kernel, query_gradient_kernel, vla_output_kernel


class Saved(NamedTuple):
    """What the backward takes from the forward.

    y, den          [B, T, Q, V], [B, T, Q]  the quotients and their denominators
    final, inverse  the state S and the inverse A after the last token
    key, key_norm   [B, T, H, K], [B, T, H]  phi(k) / |phi(k)| and |phi(k)|
    a, gain_norm    [B, T, H, K], [B, T, H]  the gain over its norm, and its norm
    masses, inverses, w, added               of `penalty_forward`
    residual, chunk_inverse, starts, transition  of the delta scan
    z_starts        [B, H, N, K]             z at the edges of the scan's super-chunks
    """

    y: Tensor
    den: Tensor
    final: Tensor
    inverse: Tensor
    key: Tensor
    key_norm: Tensor
    a: Tensor
    gain_norm: Tensor
    masses: Tensor
    inverses: Tensor
    w: Tensor
    added: Tensor
    residual: Tensor
    chunk_inverse: Tensor
    starts: Tensor
    transition: Tensor
    z_starts: Tensor


def _vla_forward(q, k, v, u, S, mass, inverse, z, feature_map, lambda0, floor, chunk, save):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, H, K = k.shape
    Q, V = q.shape[2], v.shape[3]
    blocks, split = delta.plan(k, V, chunk)
    chunks, length, supers = split
    key, key_norm = unit_features(k, feature_map)
    gain_norm = torch.empty_like(key_norm)
    a, final_mass, final_inverse, masses, inverses, w, added = penalty.penalty_forward(
        key if u is None else u, key, mass, inverse, lambda0, chunk, gain_norm
    )
    S = None if S is None else S.contiguous()
    scan = delta.prepare_scan(key, a, v, None, S, reverse=False, chunk=chunk, save=save)
    z_starts, z_final = edge_sums(key, key_norm, z, H, blocks, split, reverse=False)
    o, residual, final = delta.unfilled_outputs(q, key, v, save)
    den = torch.empty(B, T, Q, dtype=torch.float32, device=q.device)
    launch(
        vla_output_kernel, (supers * B * H, ceil_div(V, blocks.BV)),
        q, key, key_norm, a, scan.w, scan.u, scan.starts, z_starts, o, den, residual, final,
        T, chunks, length, B, H, floor,
        K=K, V=V, BK=blocks.BK, BV=blocks.BV, C=blocks.C, G=Q // H, MAP=feature_map, KEEP=save,
        DOT=blocks.dot, PRECISION=blocks.precision, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    saved = (key, key_norm, a, gain_norm, masses, inverses, w, added, residual)
    return (
        o,
        den,
        final,
        final_inverse,
        *saved,
        scan.inverse,
        scan.starts,
        scan.transition,
        z_starts,
        final_mass,
        z_final,
    )


_vla = torch.library.custom_op(
    "linattn::vla",
    _vla_forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? u, Tensor? S, Tensor? mass, Tensor? inverse, Tensor? z, "
    "str feature_map, float lambda0, float floor, int chunk, bool save) -> ("
    + ", ".join(["Tensor"] * (len(Saved._fields) + 2))
    + ")",
)


@_vla.register_fake
def _(q, k, v, u, S, mass, inverse, z, feature_map, lambda0, floor, chunk, save):
    B, T, H, K = k.shape
    wide = {"dtype": torch.float32, "device": k.device}
    o, residual, final = delta.unfilled_outputs(q, k, v, save)
    a, final_mass, final_inverse, *rest = penalty.unfilled_results(k, k, chunk, inverse is not None)
    chunk_inverse, starts, transition = delta.unfilled_saved(k, v.shape[3], chunk, save)
    norms = [torch.empty(B, T, heads, **wide) for heads in (q.shape[2], H, H)]
    z_starts, z_final = torch.empty(*starts.shape[:3], K, **wide), torch.empty(B, H, K, **wide)
    key = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    saved = (key, norms[1], a, norms[2], *rest, residual, chunk_inverse, starts, transition, z_starts)
    return o, norms[0], final, final_inverse, *saved, final_mass, z_final


def _vla_backward(
    d_o, d_final, d_mass, d_inverse, d_z, q, k, v, u, saved, feature_map, lambda0, floor, chunk, given
):  # fmt: skip
    s = Saved(*saved)
    q, k = q.contiguous(), k.contiguous()
    B, T, H, K = k.shape
    Q, V = q.shape[2], v.shape[3]
    blocks, split = delta.plan(k, V, chunk)
    d_o = torch.zeros_like(s.y) if d_o is None else d_o.contiguous()
    d_out, d_den = quotient_gradient(s.y, s.den, d_o, floor)
    phi_q = features_triton(q, feature_map) if feature_map != "identity" else q
    d_phi, d_read, d_a, d_v, _, d_S = delta.delta_backward(
        d_out, d_final, None, phi_q, s.key, s.a, None,
        s.final, s.residual, s.chunk_inverse, s.starts, s.transition, False, chunk,
    )  # fmt: skip
    x, d_x = gate_gradient(s.a, s.gain_norm, d_a)
    d_u, d_gain, d_first = penalty.penalty_backward(
        d_x, d_mass, d_inverse, s.key if u is None else u, x, s.inverse, s.masses, s.inverses, s.w, s.added,
        lambda0, chunk, given,
    )  # fmt: skip
    d_edges, d_z0 = edge_sums(phi_q, d_den, d_z, H, blocks, split, reverse=True)
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    shared = _row_sizes(K, blocks, Q // H, feature_map)
    chunks, length, supers = split
    launch(
        query_gradient_kernel, (supers * B * Q,),
        q, s.key, s.key_norm, d_den, s.z_starts, d_phi, d_q, T, chunks, length, B, H, **shared,
    )  # fmt: skip
    launch(
        key_gradient_kernel, (supers * B * H,),
        k, s.key, s.key_norm, phi_q, d_den, d_edges, d_read, d_gain, d_u, d_k, T, chunks, length, B, H,
        OWN=u is not None, **shared,
    )  # fmt: skip
    return d_q, d_k, d_v, d_u if u is not None else q.new_empty(0), d_S, d_first, d_z0


def _row_sizes(K: int, blocks: Blocks, groups: int, feature_map: str) -> dict[str, Any]:
    return {
        "K": K, "BK": blocks.BK, "C": blocks.C, "G": groups, "MAP": feature_map,
        "DOT": blocks.dot, "PRECISION": blocks.precision, "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


_vla_gradient = torch.library.custom_op(
    "linattn::vla_backward",
    _vla_backward,
    mutates_args=(),
    schema="(Tensor? d_o, Tensor? d_final, Tensor? d_mass, Tensor? d_inverse, Tensor? d_z, Tensor q, Tensor k, "
    "Tensor v, Tensor? u, Tensor[] saved, str feature_map, float lambda0, float floor, int chunk, bool given) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_vla_gradient.register_fake
def _(d_o, d_final, d_mass, d_inverse, d_z, q, k, v, u, saved, *_):
    s = Saved(*saved)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    d_u = q.new_empty(0) if u is None else torch.empty(u.shape, dtype=u.dtype, device=u.device)
    d_z0 = torch.empty(*s.final.shape[:3], dtype=torch.float32, device=q.device)
    return *grads, d_u, torch.empty_like(s.final), torch.empty_like(s.inverse), d_z0


def _setup(ctx: Any, inputs, output) -> None:
    q, k, v, u, S, mass, inverse, z, *ctx.options, _ = inputs
    *saved, _, _ = output
    ctx.set_materialize_grads(False)
    ctx.given, ctx.has = inverse is not None, (S is not None, mass is not None, z is not None)
    ctx.save_for_backward(q, k, v, u, *saved)
    ctx.mark_non_differentiable(saved[1], *saved[4:])


def _backward(gradient, ctx: Any, d_o, _d_den, d_final, d_inverse, *others):
    q, k, v, u, *saved = ctx.saved_tensors
    d_mass, d_z = others[-2:]
    d_q, d_k, d_v, d_u, *d_states = gradient(
        d_o, d_final, d_mass, d_inverse, d_z, q, k, v, u, saved, *ctx.options, ctx.given
    )
    d_S, d_first, d_z0 = (d if has else None for d, has in zip(d_states, ctx.has, strict=True))
    return d_q, d_k, d_v, None if u is None else d_u, d_S, d_first, None, d_z0, *[None] * 5


_operator = Operator(_vla_forward, _vla, _setup, _backward, _vla_backward, _vla_gradient)


def vla_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    *,
    feature_map: str,
    lambda0: float,
    floor: float,
    S: Tensor | None,
    state: PenaltyState | None,
    z: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, PenaltyState, Tensor]:
    """The default form of `vla`, K at most 128: quotients, denominators `[B, T, Q]` (not differentiable), S, the
    penalty and z after the last token. q, k before their feature map; u None is the unit key."""
    mass, inverse, age = penalty.carried(state, k, lambda0)
    inputs = (q, k, v, u, S, mass, z)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    arguments = (q, k, v, u, S, mass, inverse, z, feature_map, float(lambda0), floor, chunk_size or 0, save)
    o, den, final, inverse, *_, mass, z = _operator(*arguments)
    return o, den, final, PenaltyState(mass, inverse, age), z
