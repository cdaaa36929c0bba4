"""One pre-norm Transformer backbone for every mixer: what a comparison holds equal is built here once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn_cli.kernels.registry import MIXERS
from linattn_cli.kernels.types import Impl, state_bytes
from linattn_cli.layers.base import Mixer, MixerState, token_positions
from linattn_cli.own_mixer import is_own

if TYPE_CHECKING:
    from linattn_cli.settings import ModelConfig


class ModelState(NamedTuple):
    """One state a layer, and the real tokens seen so far, `[B]`."""

    layers: list[MixerState]
    tokens: Tensor


def build_mixer(config: ModelConfig) -> Mixer:
    """A freshly initialised mixer layer; one of the user's own need not be a `Mixer` but is called like one."""
    if is_own(config.name):
        from linattn_cli.layers.own import build_own

        return build_own(config)  # type: ignore[return-value]
    module, name = MIXERS[config.name].layer.split(":")
    layer = getattr(importlib.import_module(module), name)
    return layer(
        config.d_model,
        config.heads,
        config.d_head,
        kv_heads=config.kv_heads,
        output_norm=config.output_norm,
        short_conv=config.short_conv,
        rotary=config.positions == "rotary",
        impl=config.impl,
        chunk_size=config.chunk_size,
        **config.options,
    )


def build_model(config: ModelConfig, *, vocab_size: int, seq_len: int) -> LanguageModel:
    """A freshly initialised model for sequences of up to `seq_len` tokens, or `max_positions` if that is more."""
    return LanguageModel(config, vocab_size=vocab_size, max_positions=max(seq_len, config.max_positions))


class Block(nn.Module):
    """`x + mixer(norm(x))`, then `x + ffn(norm(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.mixer = build_mixer(config)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn = nn.Sequential(
            nn.Linear(config.d_model, config.ffn), nn.GELU(), nn.Linear(config.ffn, config.d_model)
        )

    def forward(
        self, x: Tensor, state: MixerState | None, return_state: bool, padding_mask: Tensor | None
    ) -> tuple[Tensor, MixerState | None]:
        mixed = self.mixer(self.mixer_norm(x), state, return_state, padding_mask)
        y, state = mixed if return_state else (mixed, None)
        x = x + y
        return x + self.ffn(self.ffn_norm(x)), state


class LanguageModel(nn.Module):
    """Token embedding, learned positions where asked for, blocks, a final norm and a head."""

    def __init__(self, config: ModelConfig, *, vocab_size: int, max_positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(max_positions, config.d_model)
            nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        state: ModelState | None = None,
        return_state: bool = False,
        padding_mask: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Any:
        """Logits `[B, T, vocabulary]`; with `return_state`, also the state that continues the sequences.

        padding_mask `[B, T]`, bool, true at real tokens. at `[N]`, indices into `B * T`: logits `[N, vocabulary]` of
        those positions only, which spares the head all others. Raises `ValueError` past the last learned position.
        """
        seen = state.tokens if state is not None else tokens_BT.new_zeros(tokens_BT.shape[0])
        x = self.embedding(tokens_BT)
        if self.positions is not None:
            x = x + self.positions(self._positions(seen, tokens_BT.shape[1], padding_mask))
        states = []
        for index, block in enumerate(self.blocks):
            before = None if state is None else state.layers[index]
            x, after = block(x, before, return_state, padding_mask)
            states.append(after)
        if at is not None:
            x = x.flatten(0, 1).index_select(0, at)
        logits = self.head(self.norm(x))
        if not return_state:
            return logits
        count = tokens_BT.shape[1] if padding_mask is None else padding_mask.sum(1)
        return logits, ModelState(states, seen + count)

    def _positions(self, seen: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
        assert self.positions is not None
        limit = self.positions.num_embeddings
        positions = token_positions(seen, tokens, mask)
        on_cpu = seen.device.type == "cpu" and not torch.compiler.is_compiling()  # looking costs a GPU a wait
        if tokens > limit or (on_cpu and int(positions.max()) >= limit):
            raise ValueError(
                f"the model has {limit} learned positions, got a sequence of {int(positions.max()) + 1} tokens; "
                "train with a larger model.max_positions, or positions rotary or none"
            )
        return positions

    def set_impl(self, impl: str) -> None:
        """Run every mixer through another implementation."""
        Impl.parse(impl)
        for module in self.modules():
            if isinstance(module, Mixer):
                module.impl = impl

    @property
    def carries_state(self) -> bool:
        """Whether every mixer can go on token by token; one of the user's own need not."""
        return all(getattr(block.mixer, "carries_state", True) for block in self.blocks)

    def parameter_count(self) -> int:
        """Trainable parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def state_bytes(self, state: ModelState) -> int:
        """Bytes of state a sequence, measured from a returned state."""
        batch = state.tokens.shape[0]
        return state_bytes([layer[:2] for layer in state.layers]) // batch

    def clamped(self) -> int:
        """Read-outs of the last call whose denominator was clamped, over all layers."""
        counts = [m.clamped for m in self.modules() if isinstance(m, Mixer) and m.clamped is not None]
        return int(torch.stack(counts).sum()) if counts else 0
