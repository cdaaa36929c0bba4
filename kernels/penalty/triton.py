"""The penalty gain on a GPU: the launches of its forward and backward, as two custom operators.

Forward: masses at the edges of the super-chunks, their inverses, the downdates, and the walk that applies them.
One token from a given inverse is one launch. Backward, with y = gain(u, dx): `dk = y`, and du from a scan of
`y x^T + x y^T` in reverse time. Saved: x, the downdates w, and one mass and inverse a super-chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels.edges_triton import edge_states
from linattn_cli.kernels.launch import launch
from linattn_cli.kernels.operator_triton import Operator
from linattn_cli.kernels.penalty.inverse import REFRESH
from linattn_cli.kernels.penalty.inverse import inverse as library_inverse
from linattn_cli.kernels.penalty.library import WIDE_CHUNK, wide_apply, wide_gain
from linattn_cli.kernels.penalty.triton_kernels import (
    apply_kernel,
    correct_kernel,
    downdate_kernel,
    inverse_kernel,
    mass_gradient_kernel,
    step_kernel,
)
from linattn_cli.kernels.tiles import (
    Blocks,
    ceil_div,
    choose_blocks,
    four_warps,
    multiprocessors,
    padded,
    short_chunks,
    split_time,
)
from linattn_cli.kernels.types import PenaltyState

STEP = 16  # tokens eliminated at once: elimination is serial, and 32 or 64 were slower (GPU.md)
HEAVY = 2.0  # a chunk that may shrink A more than 1 + this in some direction has its gains corrected
SHARE = 16  # chunks that one program looks at for such a correction
WIDEST = 128  # above it A no longer fits the registers, and the factorisations of the library serve


def _plan(u: Tensor, chunk: int, given: bool) -> tuple[Blocks, tuple[int, int, int]]:
    B, T, H, K = u.shape
    blocks = choose_blocks(K, K, u.dtype, WIDE_CHUNK if K > WIDEST else chunk or None)
    blocks = four_warps(blocks)  # 8 took a seventh longer in float32
    chunks = -(-T // blocks.C)
    if given:
        return blocks, (chunks, chunks, 1)
    if K > WIDEST:
        return blocks, (chunks, WIDE_CHUNK // blocks.C, -(-T // WIDE_CHUNK))
    return blocks, split_time(T, blocks.C, B * H, u.device, per_unit=8 // _warps(blocks.BK))


def _warps(BK: int) -> int:
    """Warps that walk one super-chunk: one, as long as A fits its registers."""
    return 1 if BK <= 64 else 8


def penalty_forward(u, k, mass, inverse, lambda0, chunk, norm=None, correct=True):
    """x, the final mass and inverse, and what the backward needs: masses and inverses at the edges, w, mass added.

    With a `norm` `[B, T, Q]` to fill, x is divided by it. A given inverse belongs to the mass given. Gains are
    corrected by their residual where they are float32 and the caller does not say that they need not be.
    """
    u, k = u.contiguous(), k.contiguous()
    mass = None if mass is None else mass.contiguous()
    B, T, H, K = u.shape
    given = inverse is not None
    blocks, split = _plan(u, chunk, given)
    _, length, supers = split
    x, final_inverse, inverses, w, added = _outputs(u, k, chunk, given)
    if given and T == 1:
        return _step(u, k, mass, inverse, norm, (x, final_inverse, inverses, w, added))
    masses, final_mass = edge_states(u, u, None, mass, H, blocks, split, end=True)
    if K > WIDEST:
        assert norm is None
        x, w, inverses = wide_gain(u, k, masses, lambda0)
        return x, final_mass, inverses[:, :, -1].clone(), masses, inverses, w, added
    if given:
        inverses.copy_(inverse.unsqueeze(2))
    else:
        _invert(masses, inverses, final_inverse, lambda0)
    warps = _warps(blocks.BK)
    launch(
        downdate_kernel, (supers * B * H,),
        u, inverses, w, added, final_inverse, T, length * blocks.C, supers, inverses.shape[2], B, H,
        K=K, BK=blocks.BK, C=STEP, COPIES=warps, FINAL=given, num_warps=warps, num_stages=2,
    )  # fmt: skip
    ends = final_inverse if given else inverses[:, :, 1:]
    _apply(k, x, norm, u, masses, ends, w, added, lambda0, blocks, split, correct)
    return x, final_mass, final_inverse, masses, inverses, w, added


def _step(u, k, mass, inverse, norm, outputs):
    """`penalty_forward` of one token from a given inverse, in one launch."""
    x, final_inverse, inverses, w, added = outputs
    B, _, H, K = u.shape
    masses, final_mass = inverse.new_empty(B, H, 2, K, K), torch.empty_like(final_inverse)
    BK = padded(K)
    launch(
        step_kernel, (B * H,),
        u, k, mass, inverse.contiguous(), x, added if norm is None else norm, w, added, inverses, final_inverse, masses,
        final_mass, K=K, BK=BK, G=k.shape[2] // H, UNIT=norm is not None, num_warps=4 if BK <= 64 else 8,
    )  # fmt: skip
    return x, final_mass, final_inverse, masses, inverses, w, added


_penalty_gain = torch.library.custom_op(
    "linattn::penalty_gain",
    lambda u, k, mass, inverse, lambda0, chunk: penalty_forward(u, k, mass, inverse, lambda0, chunk),
    mutates_args=(),
    schema="(Tensor u, Tensor k, Tensor? mass, Tensor? inverse, float lambda0, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _invert(masses: Tensor, inverses: Tensor, last: Tensor, lambda0: float) -> None:
    """Fill `inverses` with `(lambda0 I + P)^-1` of masses `[..., N, K, K]`, and `last` with those of the N-th."""
    edges, K = masses.shape[-3:-1]
    BK = padded(K)
    launch(
        inverse_kernel, (masses.numel() // (K * K),),
        masses, inverses, last, lambda0, edges, K=K, BK=BK, num_warps=4 if BK <= 64 else 8,
    )  # fmt: skip


@torch.library.custom_op("linattn::penalty_inverse", mutates_args=(), schema="(Tensor mass, float lambda0) -> Tensor")
def penalty_inverse(mass, lambda0):
    """`(lambda0 I + P)^-1` of masses `[..., K, K]` in float32; has no gradient."""
    if mass.shape[-1] > WIDEST:
        return library_inverse(mass, lambda0)
    inverse = torch.empty(mass.shape, dtype=torch.float32, device=mass.device)
    _invert(mass.contiguous().unsqueeze(-3), inverse, inverse, lambda0)
    return inverse


@penalty_inverse.register_fake
def _(mass, lambda0):
    return torch.empty(mass.shape, dtype=torch.float32, device=mass.device)


def _apply(k, x, norm, u, masses, ends, w, added, lambda0: float, blocks: Blocks, split, correct: bool) -> None:
    """Fill x, and norm where it is wanted, with the gains of k, from w and the inverses at the ends of super-chunks.

    A gain of half precision has no digits that the correction could mend.
    """
    B, T, H, K = w.shape
    chunks, length, supers = split
    sizes = {"K": K, "BK": blocks.BK, "C": blocks.C, "G": k.shape[2] // H, "UNIT": norm is not None}
    norm = added if norm is None else norm
    shape = (T, length * blocks.C, supers, ends.stride(1) // (K * K), B, H)
    launch(
        apply_kernel, (supers * B * H,),
        k, ends, w, x, norm, *shape, **sizes, num_warps=blocks.num_warps, num_stages=1,
    )  # fmt: skip
    if not correct or x.dtype != torch.float32:
        return
    programs = max(ceil_div(chunks * B * H, SHARE), min(chunks * B * H, multiprocessors(u.device)))
    launch(
        correct_kernel, (programs,),
        k, u, ends, w, masses, added, x, norm, lambda0, *shape, **sizes,
        STEP=STEP, HEAVY=HEAVY, SHARE=SHARE, num_warps=8, num_stages=1,
    )  # fmt: skip


def _outputs(u: Tensor, k: Tensor, chunk: int, given: bool) -> tuple[Tensor, ...]:
    """Unfilled outputs: x, final inverse, the inverse at every edge, the downdates, and the mass added a step.

    The last edge is the end; a given inverse is downdated to it instead.
    """
    B, T, H, K = u.shape
    _, (_, _, supers) = _plan(u, chunk, given)
    options: dict[str, Any] = {"dtype": torch.float32, "device": u.device}
    return (
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
        torch.empty(B, H, K, K, **options),
        torch.empty(B, H, supers + (not given), K, K, **options),
        torch.empty(B, T, H, K, **options),
        torch.empty(B, H, ceil_div(T, STEP) if K <= WIDEST else 0, **options),
    )


def unfilled_results(u, k, chunk, given):
    """Tensors like the results of `penalty_forward`."""
    B, _, H, K = u.shape
    x, final_inverse, inverses, w, added = _outputs(u, k, chunk, given)
    _, (_, _, supers) = _plan(u, chunk, given)
    masses = torch.empty(B, H, supers + 1, K, K, dtype=torch.float32, device=u.device)
    return x, torch.empty_like(final_inverse), final_inverse, masses, inverses, w, added


@_penalty_gain.register_fake
def _(u, k, mass, inverse, lambda0, chunk):
    return unfilled_results(u, k, chunk, inverse is not None)


def penalty_backward(
    d_x, d_mass, d_inverse, u, x, final_inverse, masses, inverses, w, added, lambda0, chunk, given, correct=True
):  # fmt: skip
    """Gradients of u, k and the initial mass; x are the gains themselves, not over their norms."""
    u = u.contiguous()
    d_x = torch.zeros_like(x) if d_x is None else d_x.contiguous()
    B, T, H, K = u.shape
    Q = x.shape[2]
    blocks, split = _plan(u, chunk, given)
    _, length, supers = split
    tokens = length * blocks.C
    if K > WIDEST:
        y = wide_apply(d_x, inverses, w)
    else:
        y = torch.empty_like(d_x)
        ends = final_inverse if given else inverses[:, :, 1:]
        _apply(d_x, y, None, u, masses, ends, w, added, lambda0, blocks, split, correct)
    d_final = None if d_mass is None else -d_mass
    if d_inverse is not None:  # dM = -A dA A
        through_inverse = final_inverse @ d_inverse @ final_inverse
        d_final = through_inverse if d_final is None else d_final + through_inverse
    edges, total = edge_states(y, x, None, d_final, H, blocks, split, reverse=True)
    d_u = torch.empty_like(u)
    warps = choose_blocks(K, K, u.dtype, None).num_warps
    launch(
        mass_gradient_kernel, (supers * B * H, ceil_div(K, blocks.BV)),
        u, x, y, edges, d_u, T, tokens, supers, B, H,
        K=K, BK=blocks.BK, BV=blocks.BV, C=short_chunks(blocks).C, G=Q // H,
        DOT=blocks.dot, PRECISION=blocks.precision, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return d_u, y, (total + total.mT) / -2


_penalty_gain_backward = torch.library.custom_op(
    "linattn::penalty_gain_backward",
    lambda *inputs: penalty_backward(*inputs),
    mutates_args=(),
    schema="(Tensor? d_x, Tensor? d_mass, Tensor? d_inverse, Tensor u, Tensor x, Tensor final_inverse, Tensor masses, "
    "Tensor inverses, Tensor w, Tensor added, float lambda0, int chunk, bool given) -> (Tensor, Tensor, Tensor)",
)


@_penalty_gain_backward.register_fake
def _(d_x, d_mass, d_inverse, u, x, final_inverse, masses, inverses, w, added, lambda0, chunk, given):
    d_u = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    return d_u, torch.empty_like(x), torch.empty_like(final_inverse)


def _setup(ctx: Any, inputs, output) -> None:
    u, _, mass, inverse, ctx.lambda0, ctx.chunk = inputs
    x, _, final_inverse, *saved = output
    ctx.set_materialize_grads(False)
    ctx.has_mass, ctx.given = mass is not None, inverse is not None
    ctx.save_for_backward(u, x, final_inverse, *saved)


def _backward(gradient, ctx: Any, d_x, d_mass, d_inverse, *_):
    options = (ctx.lambda0, ctx.chunk, ctx.given)
    d_u, d_k, d_initial = gradient(d_x, d_mass, d_inverse, *ctx.saved_tensors, *options)
    return d_u, d_k, d_initial if ctx.has_mass else None, None, None, None


_operator = Operator(penalty_forward, _penalty_gain, _setup, _backward, penalty_backward, _penalty_gain_backward)


def penalty_gain_triton(
    u: Tensor,
    k: Tensor,
    *,
    lambda0: float,
    initial_state: PenaltyState | None,
    chunk_size: int | None,
) -> tuple[Tensor, PenaltyState]:
    """`penalty_gain` on a GPU; see its docstring for the recurrence and shapes.

    The gradient of a carried state flows through its mass: the inverse beside it is a function of the mass. A
    short call starts from that inverse; any other takes it anew, and returns one just taken.
    """
    mass, inverse, age = carried(initial_state, u, lambda0)
    x, mass, inverse, *_ = _operator(u, k, mass, inverse, float(lambda0), chunk_size or 0)
    return x, PenaltyState(mass, inverse, age)


def carried(state: PenaltyState | None, u: Tensor, lambda0: float) -> tuple[Tensor | None, Tensor | None, int]:
    """The mass and inverse a call starts from, and the age of the inverse after it; no inverse: it is taken anew.

    A single first token starts from `I / lambda0`, which is exact; the inverse of what it makes of M is not.
    """
    B, T, H, K = u.shape
    if state is None and T == 1 and K <= WIDEST:
        mass = torch.zeros(B, H, K, K, dtype=torch.float32, device=u.device)
        return mass, (torch.eye(K, dtype=torch.float32, device=u.device) / lambda0).expand_as(mass).contiguous(), 1
    if state is None:
        return None, None, 0
    age = state.age + T
    if K > WIDEST or age > REFRESH:
        return state.mass, None, 0
    return state.mass, state.inverse.detach(), age
