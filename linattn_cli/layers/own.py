"""A layer of the user's own in the backbone: built from its constructor's names, checked at every call.

What it must be: a subclass of `Mixer`, or any `nn.Module` with

    __init__(self, d_model, heads, d_head, *, <options with defaults>)     each of these if it wants it
    forward(self, x, state=None, return_state=False, padding_mask=None)    x is all that it must take

`forward` maps `[B, T, D]` to `[B, T, D]`, causally; with `return_state` it returns `(y, state)`, the state a tensor,
tuple, list or NamedTuple of tensors that continues the sequence. `padding_mask` is `[B, T]`, true at real tokens.
It may have `jacobian_factors(x)` as `Mixer` does, and the class attributes `form` (`staticmethod` of a form) and
`impls` (the implementations that the form has; `reference` among them is its serial oracle).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn_cli import own_mixer
from linattn_cli.layers.base import MixerState
from linattn_cli.output import EXIT_MEMORY, describe_error

if TYPE_CHECKING:
    from linattn_cli.own_mixer import Own
    from linattn_cli.settings import ModelConfig


def build_own(config: ModelConfig) -> nn.Module:
    """A freshly initialised layer of the class that `config.name` means.

    Raises `CliError` (exit 2) where its constructor fails, and for a setting of the backbone that it does not
    take: that setting would be lost without a word.
    """
    own = own_mixer.load(config.name)
    backbone = {
        "kv_heads": config.kv_heads,
        "output_norm": config.output_norm,
        "short_conv": config.short_conv,
        "rotary": config.positions == "rotary",
        "impl": config.impl,
        "chunk_size": config.chunk_size,
    }
    neutral = {"kv_heads": None, "output_norm": config.output_norm, "short_conv": 0, "rotary": False, "impl": "auto"}
    for name, value in backbone.items():
        if name not in own.takes and value != neutral.get(name):
            setting = "positions rotary" if name == "rotary" else f"{name} {value}"
            raise own_mixer.CliError(
                f"{own.path}: {own.class_} does not take {name}, and {setting} was asked for",
                hint=f"add {name} to its constructor, or leave that setting out",
                kind="code",
            )
    settings = {"d_model": config.d_model, "heads": config.heads, "d_head": config.d_head, **backbone}
    arguments = {name: value for name, value in settings.items() if name in own.takes}
    try:
        return checked(own)(**arguments, **config.options)
    except Exception as error:
        if describe_error(error).exit_code == EXIT_MEMORY:
            raise
        raise own_mixer.code_error(error, own.path, f"could not build {own.class_}") from error


def checked(own: Own) -> type[nn.Module]:
    """A subclass with the signature of `Mixer.forward`, whose errors are told as the user's, with file and line.

    Names of parameters stay as they are: its weights load into the bare class.
    """
    base: Any = own.layer

    class Checked(base):
        carries_state = own.carries_state

        def forward(
            self,
            x_BTD: Tensor,
            state: Any = None,
            return_state: bool = False,
            padding_mask: Tensor | None = None,
        ) -> Any:
            given = _arguments(own, state, return_state, padding_mask)
            try:
                found = super().forward(x_BTD, **given)
            except Exception as error:
                passes = isinstance(error, torch.linalg.LinAlgError)  # training asks itself why
                if passes or describe_error(error).exit_code == EXIT_MEMORY:
                    raise
                raise own_mixer.code_error(error, own.path, f"failed in {own.class_}.forward") from error
            y, after = _split(own, found, return_state)
            _check_output(own, y, x_BTD)
            if not return_state or own.is_mixer:
                return (y, after) if return_state else y
            _check_state(own, after)
            seen = x_BTD.new_zeros(x_BTD.shape[0], dtype=torch.int64) if state is None else state.tokens
            count = x_BTD.shape[1] if padding_mask is None else padding_mask.sum(1)
            return y, MixerState(after, None, seen + count)

    Checked.__name__ = Checked.__qualname__ = own.class_
    return Checked


def _arguments(own: Own, state: Any, return_state: bool, padding_mask: Tensor | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if state is not None or return_state:
        if not own.carries_state:
            raise ValueError(f"{own.path}: {own.class_}.forward takes no state and return_state, so it cannot decode")
        given |= {"state": state if own.is_mixer or state is None else state.form, "return_state": return_state}
    if padding_mask is not None:
        if "padding_mask" not in own.forward:
            raise ValueError(f"{own.path}: {own.class_}.forward takes no padding_mask, got a padded batch")
        given["padding_mask"] = padding_mask
    return given


def _split(own: Own, found: Any, return_state: bool) -> tuple[Any, Any]:
    if not return_state:
        return found, None
    if not (isinstance(found, tuple) and len(found) == 2):
        raise ValueError(
            f"{own.path}: {own.class_}.forward with return_state must return (y, state), got {type(found).__name__}"
        )
    return found


def _check_output(own: Own, y: Any, x: Tensor) -> None:
    wanted = f"{own.path}: {own.class_}.forward must return a tensor [B, T, D] = {list(x.shape)}"
    if not isinstance(y, Tensor):
        raise ValueError(f"{wanted}, got {type(y).__name__}")
    if y.shape != x.shape:
        swapped = "; dimensions 1 and 2 look swapped" if y.dim() == 3 and y.mT.shape == x.shape else ""
        raise ValueError(f"{wanted}, got {list(y.shape)}{swapped}")


def _check_state(own: Own, state: Any) -> None:
    parts = [state]
    while parts:
        part = parts.pop()
        if isinstance(part, (tuple, list)):
            parts.extend(part)
        elif part is not None and not isinstance(part, (Tensor, int)):
            raise ValueError(
                f"{own.path}: the state of {own.class_} must be a tensor, tuple, list or NamedTuple of tensors, "
                f"got {type(part).__name__} in it"
            )
