"""What every mixer layer does alike: projections, short convolution, rotary positions, output norm, state.

A mixer is `Mixer` with one method, `mix`, that calls its form. Everything a comparison should hold equal
between mixers lives here, so that it cannot differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from linattn_cli.kernels.types import FormOutput
from linattn_cli.kernels.validate import check_device, check_groups, check_head_dims, check_shape
from linattn_cli.layers.conv import ShortConv
from linattn_cli.layers.rotary import rotate


class MixerState(NamedTuple):
    """What a layer carries between calls.

    form    the state of the form
    conv    the last inputs of the short convolution, `[B, W - 1, channels]`; None without one
    tokens  real tokens seen so far, `[B]` int64
    """

    form: Any
    conv: Tensor | None
    tokens: Tensor


class Backbone(TypedDict, total=False):
    """The keywords that every layer takes beside its own; `Mixer` says what they mean."""

    kv_heads: int | None
    output_norm: bool
    short_conv: int
    rotary: bool
    impl: str
    chunk_size: int | None


class Mixer(nn.Module):
    """Base of every mixer: a drop-in causal attention layer `[B, T, D] -> [B, T, D]`.

    d_model      width of the model
    heads        query heads
    d_head       key and value dimension of a head; None is `d_model / heads`
    kv_heads     key/value heads, a divisor of `heads`; None is `heads`
    output_norm  LayerNorm over the concatenated heads before the output projection
    short_conv   width of a causal depthwise convolution over q, k and v; 0 is none
    rotary       rotary positions on q and k, before any feature map
    impl         implementation of the form: auto, reference, scan, chunk or triton
    chunk_size   tokens a chunk; None chooses it

    Raises `ValueError` for sizes that do not fit together.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        kv_heads: int | None = None,
        output_norm: bool = True,
        short_conv: int = 0,
        rotary: bool = False,
        impl: str = "auto",
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        if d_head is None:
            if d_model % heads:
                raise ValueError(f"d_model = {d_model} is no multiple of heads = {heads}; give d_head as well")
            d_head = d_model // heads
        self.heads, self.kv_heads, self.d_head = heads, kv_heads or heads, d_head
        check_groups("heads", heads, self.kv_heads)
        check_head_dims(d_head=d_head)
        if rotary and d_head % 2:
            raise ValueError(
                f"rotary positions need an even d_head, got {d_head}; use {d_head + 1}, or other positions"
            )
        self.rotary, self.impl, self.chunk_size = rotary, impl, chunk_size
        self.widths = (heads * d_head, self.kv_heads * d_head, self.kv_heads * d_head)
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.conv = ShortConv(sum(self.widths), short_conv) if short_conv else None
        self.norm: nn.Module = nn.LayerNorm(heads * d_head) if output_norm else nn.Identity()
        self.out = nn.Linear(heads * d_head, d_model, bias=False)
        self.clamped: Tensor | None = None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        """The mixer's form on q `[B, T, Q, d]`, k and v `[B, T, H, d]`; x `[B, T, D]` is for gates."""
        raise NotImplementedError(f"{type(self).__name__} must define mix")

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """log_decay, a, p of the recurrence's Jacobian `J_t = exp(log_decay_t) I - a_t p_t^T` on these inputs.

        log_decay `[B, T, H]` or None (no decay), a and p `[B, T, H, K]` or None (no such term). None where
        there is no state of fixed size.
        """
        return None

    def forward(
        self,
        x_BTD: Tensor,
        state: MixerState | None = None,
        return_state: bool = False,
        padding_mask: Tensor | None = None,
    ) -> Any:
        """Mix tokens `[B, T, D]`; with `return_state`, also the state that continues the sequence.

        padding_mask `[B, T]`, bool, true at real tokens. Padded tokens change neither the state nor the
        output of real tokens; their own output means nothing.
        """
        if padding_mask is not None:
            check_shape("padding_mask", padding_mask, "BT", tuple(x_BTD.shape[:2]))
            check_device("padding_mask", padding_mask, "x", x_BTD)
            padding_mask = padding_mask.bool()
        q, k, v, conv, tokens = self.project(x_BTD, state, padding_mask)
        output = self.mix(q, k, v, x_BTD, mask=padding_mask, initial_state=None if state is None else state.form)
        self.clamped = output.clamped
        y = self.out(self.norm(output.o.flatten(2)))
        return (y, MixerState(output.state, conv, tokens)) if return_state else y

    def project(
        self, x: Tensor, state: MixerState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """q, k, v after convolution and rotation, the convolution's cache, and the tokens seen."""
        qkv, cache = self.qkv(x), None
        if self.conv is not None:
            qkv, cache = self.conv(qkv, None if state is None else state.conv, mask)
        q, k, v = (part.unflatten(-1, (-1, self.d_head)) for part in qkv.split(self.widths, dim=-1))
        seen = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) if state is None else state.tokens
        positions = token_positions(seen, x.shape[1], mask)
        if self.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        count = x.shape[1] if mask is None else mask.sum(1)
        return q, k, v, cache, seen + count


def token_positions(seen: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
    """Position of every token among the real tokens of its sequence, `[B, T]`; padded ones get a valid one.

    >>> token_positions(torch.tensor([2]), 3, torch.tensor([[False, True, True]]))
    tensor([[2, 2, 3]])
    """
    if mask is None:
        return seen.unsqueeze(1) + torch.arange(tokens, device=seen.device)
    return seen.unsqueeze(1) + (mask.cumsum(1) - 1).clamp_min(0)
