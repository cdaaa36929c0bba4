"""What `linattn latency` times: the arms, and the tensors each takes.

An arm is one way to compute one mixer: a form of the registry with an implementation, a bare primitive, or
softmax as torch's fused SDPA. It is called as a function of its tensors, without a model around it.
"""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn_cli.kernels.delta.api import delta_scan
from linattn_cli.kernels.forms.features import unit
from linattn_cli.kernels.forms.softmax import SoftmaxState, softmax_serial
from linattn_cli.kernels.linear.api import linear_scan
from linattn_cli.kernels.penalty.api import penalty_gain
from linattn_cli.kernels.registry import PRIMITIVES, Mixer
from linattn_cli.kernels.types import state_dtype
from linattn_cli.verify_mixers import form_of

Tensors = Mapping[str, Tensor]

MODES = ("forward", "train", "decode")

PREFIX = 97
"""Tokens at the start of every length that are the same numbers, so that one serial run checks all lengths. A
prime: a call of so many ends in a chunk that is not full."""

DECODED = 64
"""Tokens a repetition of `decode` makes, so that work which falls due every 64 tokens is counted once."""

SOFTMAX = "softmax"

LAMBDA0 = 0.1
"""Ridge of the bare `penalty_gain`, VLA's default."""


@dataclass(frozen=True)
class Setting:
    """The shape everything is timed at, T excepted."""

    batch: int
    heads: int
    d_head: int
    dtype: torch.dtype
    device: torch.device
    mode: str = "forward"
    seed: int = 0


@dataclass(frozen=True)
class Arm:
    """One thing to time.

    names    the tensors it takes, of those that `draw` makes
    call     `call(tensors, state) -> (o, state)`; a state of None starts from nothing
    oracle   the same by the serial recurrence, what `call` is checked against
    prefill  `prefill(tensors) -> state` after a context, for `decode`
    chunk    the output by the chunk form, where there is one
    context  entered around calls, outside the time: where torch is told which kernel to use
    why_not  why it cannot run here, or None
    peer     whether it is somebody else's kernel
    """

    model: str
    impl: str
    names: tuple[str, ...]
    call: Callable[[Tensors, Any], tuple[Tensor, Any]]
    oracle: Callable[[Tensors, Any], Tensor]
    prefill: Callable[[Tensors], Any]
    chunk: Callable[[Tensors], Tensor] | None = None
    context: Callable[[], Any] = contextlib.nullcontext
    why_not: str | None = None
    peer: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.impl


def draw(names: Iterable[str], setting: Setting, tokens: int) -> dict[str, Tensor]:
    """Tensors `[B, T, H, ...]` on the device; the first `PREFIX` tokens do not depend on T.

    Features (`q_unit`, `k_unit`) are for arms that take them ready-made; log-decays are float32 or float64.
    """
    made: dict[str, Tensor] = {}
    wide = state_dtype(setting.dtype)
    for name in names:
        if name == "log_decay":
            made[name] = -0.1 * _random(torch.rand, name, setting, tokens)
            continue
        if name == "beta":
            x = _random(torch.rand, name, setting, tokens)
        elif name in ("q_unit", "k_unit"):
            x = unit(_random(torch.randn, name[0], setting, tokens, setting.d_head))
        elif name == "u":
            x = unit(_random(torch.randn, name, setting, tokens, setting.d_head)) / setting.d_head**0.5
        elif name == "a":  # near k_unit, as a write direction is: the recurrence stays tame at any length
            noise = _random(torch.randn, name, setting, tokens, setting.d_head) * setting.d_head**-0.5
            x = unit(unit(_random(torch.randn, "k", setting, tokens, setting.d_head)) + 0.3 * noise)
        else:
            x = _random(torch.randn, name, setting, tokens, setting.d_head)
        assert x.dtype == wide
        made[name] = x.to(setting.dtype)
    return made


def _random(kind: Callable[..., Tensor], name: str, setting: Setting, tokens: int, *dim: int) -> Tensor:
    parts = []
    for part, length in enumerate((PREFIX, tokens - PREFIX)):
        if length > 0:
            seed = zlib.crc32(f"{setting.seed}/{name}/{part}".encode())
            generator = torch.Generator(setting.device).manual_seed(seed)
            shape = (setting.batch, length, setting.heads, *dim)
            dtype = state_dtype(setting.dtype)
            parts.append(kind(shape, generator=generator, device=setting.device, dtype=dtype))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, :tokens].contiguous()


def resolved(impl: str, setting: Setting) -> str:
    """What `auto` means for these tensors; any other name is itself."""
    from linattn_cli.kernels import dispatch

    if impl != "auto":
        return impl
    probe = torch.empty(0, device=setting.device, dtype=setting.dtype)
    names = {dispatch.resolve(operator, impl, probe) for operator in PRIMITIVES}
    return names.pop() if len(names) == 1 else "auto"


def why_not(name: str, impl: str, known: tuple[str, ...], setting: Setting) -> str | None:
    """Why an implementation of a mixer or primitive cannot run here, or None."""
    from linattn_cli.kernels import dispatch

    if impl == "triton":
        probe = torch.empty(0, device=setting.device, dtype=setting.dtype)
        operators = [name] if name in PRIMITIVES else list(PRIMITIVES)
        reasons = (dispatch.why_not_triton(operator, probe) for operator in operators)
        return next((reason for reason in reasons if reason), None)
    if impl != "auto" and impl not in known:
        return f"{name} has no impl {impl!r}; it has {', '.join(known)}"
    return None


def mixer_arm(mixer: Mixer, impl: str, setting: Setting) -> Arm:
    """A form of the registry under its default options."""
    form = form_of(mixer)
    impl = resolved(impl, setting)

    def call(x: Tensors, state: Any) -> tuple[Tensor, Any]:
        out = form(**x, initial_state=state, impl=impl)
        return out.o, out.state

    def oracle(x: Tensors, state: Any) -> Tensor:
        return form(**x, initial_state=state, impl="reference").o

    def chunk(x: Tensors) -> Tensor:
        return form(**x, impl="chunk").o

    def prefill(x: Tensors) -> Any:
        return form(**x, impl="triton" if impl == "triton" else "chunk").state

    names = ("q", "k", "v", *optional_tensors(mixer))
    reason = why_not(mixer.name, impl, mixer.impls, setting)
    return Arm(mixer.name, impl, names, call, oracle, prefill, chunk, why_not=reason)


def optional_tensors(mixer: Mixer) -> list[str]:
    """The tensors beyond q, k and v that a form takes under its default options.

    >>> from linattn_cli.kernels.registry import MIXERS
    >>> optional_tensors(MIXERS["decay_delta"]), optional_tensors(MIXERS["vla"])
    (['log_decay'], ['u'])
    """
    parameters = inspect.signature(form_of(mixer)).parameters
    defaults = {name: option.default for name, option in mixer.options.items()}
    wanted = {
        "u": defaults.get("penalty") == "learned",
        "beta": defaults.get("beta") == "sigmoid",
        "log_decay": defaults.get("decay", "none") != "none",
    }
    return [
        name
        for name, chosen in wanted.items()
        if name in parameters and (chosen or parameters[name].default is inspect.Parameter.empty)
    ]


class _Primitive(NamedTuple):
    names: tuple[str, ...]
    run: Callable[[Tensors, Any, str], Any]


_PRIMITIVES = {
    "linear_scan": _Primitive(
        ("q", "k_unit", "v"), lambda x, s, impl: linear_scan(x["q"], x["k_unit"], x["v"], initial_state=s, impl=impl)
    ),
    "delta_scan": _Primitive(
        ("q", "k_unit", "a", "v"),
        lambda x, s, impl: delta_scan(x["q"], x["k_unit"], x["a"], x["v"], initial_state=s, impl=impl),
    ),
    "penalty_gain": _Primitive(
        ("u", "k_unit"),
        lambda x, s, impl: penalty_gain(x["u"], x["k_unit"], lambda0=LAMBDA0, initial_state=s, impl=impl),
    ),
}


def primitive_arm(name: str, impl: str, setting: Setting) -> Arm:
    """A primitive on ready-made features: no feature map, no read-out."""
    names, run = _PRIMITIVES[name]
    impl = resolved(impl, setting)

    def call(x: Tensors, state: Any) -> tuple[Tensor, Any]:
        out = run(x, state, impl)
        return out.o, out.final_state

    def oracle(x: Tensors, state: Any) -> Tensor:
        return run(x, state, "reference").o

    def chunk(x: Tensors) -> Tensor:
        return run(x, None, "chunk").o

    def prefill(x: Tensors) -> Any:
        return run(x, None, "triton" if impl == "triton" else "chunk").final_state

    reason = why_not(name, impl, PRIMITIVES[name].impls, setting)
    return Arm(name, impl, names, call, oracle, prefill, chunk, why_not=reason)


class Cache(NamedTuple):
    """Keys and values `[B, S, H, D]` with room for the tokens to come, of which `length` are filled."""

    k: Tensor
    v: Tensor
    length: int


def sdpa_arm(backend: SDPBackend | None = None) -> Arm:
    """Softmax as torch's fused SDPA, called directly; by one backend, or the one torch prefers."""

    def call(x: Tensors, cache: Cache | None) -> tuple[Tensor, Cache | None]:
        if cache is None:
            q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None
        length = cache.length + 1
        cache.k[:, cache.length : length] = x["k"]
        cache.v[:, cache.length : length] = x["v"]
        q, k, v = (y.transpose(1, 2) for y in (x["q"], cache.k[:, :length], cache.v[:, :length]))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return o, Cache(cache.k, cache.v, length)

    def oracle(x: Tensors, cache: Cache | None) -> Tensor:
        state = None
        if cache is not None:
            k, v = cache.k[:, : cache.length], cache.v[:, : cache.length]
            state = SoftmaxState(k, v, torch.ones(k.shape[:2], dtype=torch.bool, device=k.device))
        return softmax_serial(x["q"], x["k"], x["v"], initial_state=state).o

    def prefill(x: Tensors) -> Cache:
        k, v = (torch.cat((x[name], x[name].new_zeros(_room(x[name]))), dim=1) for name in ("k", "v"))
        return Cache(k, v, x["k"].shape[1])

    arm = Arm(SOFTMAX, "sdpa", ("q", "k", "v"), call, oracle, prefill)
    return arm if backend is None else replace(arm, context=lambda: sdpa_kernel([backend]))


def _room(x: Tensor) -> tuple[int, ...]:
    return (x.shape[0], DECODED, *x.shape[2:])


FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)

LARGEST_SCORES = 2**28
"""Bytes of scores up to which torch's unfused attention is tried as well; it wins at short lengths."""


def sdpa_backends(setting: Setting, tokens: int) -> list[SDPBackend]:
    """The backends worth trying at a length: all fused ones, and the unfused one while its scores are small."""
    queries = 1 if setting.mode == "decode" else tokens
    scores = setting.batch * setting.heads * queries * tokens * 4
    fused = list(FUSED) if setting.device.type == "cuda" else [SDPBackend.FLASH_ATTENTION]
    return fused + ([SDPBackend.MATH] if scores <= LARGEST_SCORES else [])
