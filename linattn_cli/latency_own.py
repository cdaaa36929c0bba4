"""A mixer of the user's own as an arm of `linattn latency`: by its form, or as a whole layer where it has none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from linattn_cli import own_mixer
from linattn_cli.latency_cases import Arm, Setting, Tensors, mixer_arm
from linattn_cli.settings import ModelConfig

LAYER = "layer"
"""What the implementation of a layer is called that chooses none."""


def own_arm(name: str, impl: str, setting: Setting) -> Arm:
    """The arm of `path/to/mine.py:MyMixer`: its form if that has a serial oracle, else the layer."""
    own = own_mixer.load(name)
    return mixer_arm(own.entry, impl, setting) if own.has_oracle else layer_arm(name, impl, setting)


def explain(name: str) -> str | None:
    """What a reader of the table must know of this arm, or None where it is like the others."""
    own = own_mixer.load(name)
    if own.has_oracle:
        return None
    judged = "token by token in float64" if own.carries_state else "the same call in float64, for want of a state"
    return (
        f"{own.class_} is timed as a layer: with its projections, which the other arms do not have, and in train "
        f"without the gradients of its weights; checked against {judged}"
    )


def layer_arm(name: str, impl: str, setting: Setting) -> Arm:
    """The layer on `[B, T, heads * d_head]`."""
    from linattn_cli.model import build_mixer

    own = own_mixer.load(name)
    reason = None
    if impl != "auto" and impl not in own.entry.impls:
        reason = f"{own.class_} has no impl {impl!r}; it has {', '.join(('auto', *own.entry.impls))}"
    if setting.mode == "decode" and not own.carries_state:
        reason = f"{own.class_}.forward takes no state and return_state, so it cannot decode"
    width = setting.heads * setting.d_head
    chosen: Any = impl if impl in own.entry.impls else "auto"
    torch.manual_seed(setting.seed)
    built = build_mixer(
        ModelConfig(name=name, d_model=width, heads=setting.heads, d_head=setting.d_head, impl=chosen)
    ).eval()
    layers: dict[torch.dtype, nn.Module] = {}

    def layer(x: Tensor) -> nn.Module:
        if x.dtype not in layers:
            layers[x.dtype] = copy.deepcopy(built).to(x.device, x.dtype)
        return layers[x.dtype]

    def call(x: Tensors, state: Any) -> tuple[Tensor, Any]:
        tokens = x["x"].flatten(2)
        if setting.mode == "decode":
            return layer(tokens)(tokens, state, return_state=True)
        return layer(tokens)(tokens), None

    def oracle(x: Tensors, state: Any) -> Tensor:
        tokens = x["x"].flatten(2)
        if not own.carries_state:
            return layer(tokens)(tokens)
        outputs = []
        for token in tokens.split(1, dim=1):
            y, state = layer(tokens)(token, state, return_state=True)
            outputs.append(y)
        return torch.cat(outputs, dim=1)

    def prefill(x: Tensors) -> Any:
        tokens = x["x"].flatten(2)
        return layer(tokens)(tokens, return_state=True)[1]

    label = LAYER if impl == "auto" else impl
    return Arm(name, label, ("x",), call, oracle, prefill, why_not=reason)
