"""Which arms `linattn latency` times: softmax, then models by implementations."""

from __future__ import annotations

import torch

from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
from linattn_cli.latency_cases import SOFTMAX, Arm, Setting, draw, mixer_arm, primitive_arm, sdpa_arm
from linattn_cli.latency_own import own_arm
from linattn_cli.own_mixer import is_own


def arms(models: list[str], impls: list[str], setting: Setting) -> list[Arm]:
    """The arms of models times implementations; softmax, which has one form only, is there once and first."""
    found = [sdpa_arm()]
    for model in models:
        if model == SOFTMAX:
            continue
        for impl in impls:
            arm = arm_of(model, impl, setting)
            if arm.key not in [other.key for other in found]:
                found.append(arm)
    return found


def arm_of(model: str, impl: str, setting: Setting) -> Arm:
    """The arm of one mixer, one of the user's own or a primitive."""
    if is_own(model):
        return own_arm(model, impl, setting)
    return primitive_arm(model, impl, setting) if model in PRIMITIVES else mixer_arm(MIXERS[model], impl, setting)


def run_through(arm: Arm, setting: Setting, tokens: int) -> None:
    """A forward, a backward and one decoding step, for those who watch what the kernels do."""
    tensors = draw(arm.names, setting, tokens + 1)
    before = {name: x[:, :tokens].contiguous() for name, x in tensors.items()}
    leaves = {name: x.clone().requires_grad_() for name, x in before.items()}
    o, _ = arm.call(leaves, None)
    torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o), allow_unused=True)
    with torch.no_grad():
        arm.call({name: x[:, tokens:].contiguous() for name, x in tensors.items()}, arm.prefill(before))
