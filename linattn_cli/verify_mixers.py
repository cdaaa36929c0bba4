"""What `verify-scan` checks of the mixers: every option of the registry, one at a time, and awkward pairs.

A mixer that is added to the registry is checked without a line here, as long as its tensors have names that
are known below.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.registry import PRIMITIVES, Mixer
from linattn_cli.own_mixer import find_mixer, is_own
from linattn_cli.verify_cases import Called, Case, Inputs, Sizes, decays, normal, unit

NUMBERS: dict[str, float] = {"lambda0": 1.0, "ridge": 0.5}
"""A second value for options that are numbers."""

COMPANIONS: dict[tuple[str, object], dict[str, object]] = {
    # A denominator of signed features passes through zero, where no form has a digit to compare.
    ("readout", "ratio"): {"feature_map": "elu1"},
    ("feature_map", "silu"): {"readout": "raw"},
    ("feature_map", "identity"): {"readout": "raw"},
    # Positive keys share a direction, whose mass grows with T: condition numbers of some 300 at lambda0 0.1.
    ("penalty", "key"): {"lambda0": 1.0},
    # An unnormalised gain up to 1 / lambda0 makes the state grow by as much a token.
    ("normalise_gate", False): {"lambda0": 1.0},
}
"""What must go with an option for its outputs to be well conditioned."""

PAIRS: dict[str, tuple[dict[str, object], ...]] = {
    "hla2": (
        {"masked": False, "decay": "moment"},
        {"masked": False, "ridge": 0.5},
        {"state_form": "paper", "decay": "moment"},
        {"state_form": "paper", "decay": "cascade"},
        {"readout": "ratio", "decay": "mask"},
        {"readout": "ratio", "state_form": "paper"},
        {"ridge": 0.5, "decay": "moment"},
    ),
    "ahla": ({"readout": "ratio", "decay": "cascade"},),
    "hla3": (
        {"variant": "published", "decay": "moment"},
        {"variant": "published", "readout": "ratio"},
        {"readout": "ratio", "decay": "mask"},
    ),
    "vla": ({"readout": "raw", "beta": "sigmoid"},),
}
"""Options worth checking together."""


def mixer_cases(names: list[str], *, quick: bool = False) -> list[Case]:
    """The cases of the mixers called `names`; with `quick` no pairs of options."""
    return [case for name in names for case in _cases_of(find_mixer(name), quick)]


def form_of(mixer: Mixer) -> Callable[..., Any]:
    """The function behind `Mixer.form`."""
    module, name = mixer.form.split(":")
    return getattr(importlib.import_module(module), name)


def option_sets(mixer: Mixer, *, quick: bool = False) -> list[dict[str, object]]:
    """Settings of the options to check: the defaults, every other value alone, then the pairs.

    >>> from linattn_cli.kernels.registry import MIXERS
    >>> option_sets(MIXERS["decay_delta"], quick=True)[0]
    {}
    """
    sets: list[dict[str, object]] = [{}]
    for name, option in mixer.options.items():
        values: tuple[object, ...] = option.choices
        if isinstance(option.default, bool):
            values = (True, False)
        elif not values and name in NUMBERS:
            values = (NUMBERS[name],)
        sets += [{name: value} for value in values if value != option.default]
    if not quick:
        sets += list(PAIRS.get(mixer.name, ()))
    return [_with_companions(mixer, options) for options in sets]


def _with_companions(mixer: Mixer, options: dict[str, object]) -> dict[str, object]:
    full = dict(options)
    for name, value in options.items():
        for other, needed in COMPANIONS.get((name, value), {}).items():
            if other in mixer.options:
                full.setdefault(other, needed)
    return full


def _cases_of(mixer: Mixer, quick: bool) -> list[Case]:
    cases = [_case(mixer, options) for options in option_sets(mixer, quick=quick)]
    if not is_own(mixer.name):  # a form of the user's own need not know grouped heads
        cases.append(_case(mixer, {}, groups=2))
    if "mask" in inspect.signature(form_of(mixer)).parameters:
        cases.append(_case(mixer, {}, padded=True))
    return cases


def _case(mixer: Mixer, options: dict[str, object], *, groups: int = 1, padded: bool = False) -> Case:
    form = form_of(mixer)
    parameters = inspect.signature(form).parameters
    settings = {name: value for name, value in options.items() if name in parameters and name != "beta"}
    tensors = _tensor_names(mixer, options, parameters)

    def inputs(sizes: Sizes, generator: Generator) -> dict[str, Tensor]:
        made = _draw(tensors, sizes, generator, groups)
        if padded:
            made["mask"] = _padding(sizes)
        return made

    def call(x: Inputs, *, state: Any, impl: str, chunk_size: int | None) -> Called:
        out = form(**x, **settings, initial_state=state, chunk_size=chunk_size, impl=impl)
        o = out.o
        if "mask" in x:  # what a padded token gives is nobody's business
            o = o * x["mask"].view(*x["mask"].shape, 1, 1)
        return Called({"o": o}, out.state, out.impl)

    words = [f"{name} {value}" for name, value in options.items()]
    words += ["grouped"] if groups > 1 else []
    words += ["padding mask"] if padded else []
    return Case(
        mixer.name,
        ", ".join(words) or "defaults",
        inputs,
        call,
        cached=mixer.name == "softmax",
        limit=_limit(options),
        why_not=_why_not(mixer, options),
        brute_force=_brute_force(mixer, settings),
    )


def _tensor_names(mixer: Mixer, options: dict[str, object], parameters: Any) -> list[str]:
    """Which tensors the form takes under these options, beyond those it always needs."""
    names = ["q", "k", "v"]
    for name in ("u", "beta", "log_decay"):
        if name not in parameters:
            continue
        required = parameters[name].default is inspect.Parameter.empty
        chosen = {
            "u": _value(mixer, options, "penalty") == "learned",
            "beta": _value(mixer, options, "beta") == "sigmoid",
            "log_decay": _value(mixer, options, "decay") not in (None, "none"),
        }[name]
        if required or chosen:
            names.append(name)
    return names


def _value(mixer: Mixer, options: dict[str, object], name: str) -> object:
    default = mixer.options[name].default if name in mixer.options else None
    return options.get(name, default)


def _draw(names: list[str], sizes: Sizes, generator: Generator, groups: int) -> dict[str, Tensor]:
    batch, tokens, heads, key_dim = sizes.batch, sizes.tokens, sizes.heads, sizes.key_dim
    made = {
        "q": normal(generator, batch, tokens, heads * groups, key_dim),
        "k": normal(generator, batch, tokens, heads, key_dim),
        "v": normal(generator, batch, tokens, heads, sizes.value_dim),
    }
    if "u" in names:  # as the layer makes it: unit vectors over the root of the key dimension
        made["u"] = unit(normal(generator, batch, tokens, heads, key_dim)) / key_dim**0.5
    if "beta" in names:
        made["beta"] = normal(generator, batch, tokens, heads).sigmoid()
    if "log_decay" in names:
        made["log_decay"] = decays(generator, sizes, "smooth")
        made["log_decay"][:, tokens // 2] = -50.0
    return made


def _padding(sizes: Sizes) -> Tensor:
    """The first sequence is padded on the left, the second on the right, as batches of texts are."""
    mask = torch.ones(sizes.batch, sizes.tokens, dtype=torch.bool)
    padding = sizes.tokens // 3
    mask[0, :padding] = False
    if sizes.batch > 1 and padding:
        mask[1, -padding:] = False
    return mask


def _limit(options: dict[str, object]) -> Callable[[str, Sizes], Sizes]:
    def limit(impl: str, sizes: Sizes) -> Sizes:
        if impl == "scan" and options.get("variant") == "published":
            return replace(sizes, tokens=min(sizes.tokens, 41), key_dim=min(sizes.key_dim, 6))
        return sizes

    return limit


def _why_not(mixer: Mixer, options: dict[str, object]) -> Callable[[str, Sizes, str], str | None]:
    def why_not(impl: str, sizes: Sizes, device: str) -> str | None:
        if impl == "scan" and "scan" not in mixer.impls:
            return f"{mixer.name} has no associative scan"
        if is_own(mixer.name) and impl not in mixer.impls:
            return f"{mixer.name} has no impl {impl}"
        if impl == "triton":
            if mixer.name == "softmax":
                return "softmax is torch's SDPA, it has no triton form here"
            tensor = torch.empty(0, device=device)
            reasons = (dispatch.why_not_triton(operator, tensor) for operator in PRIMITIVES)
            return next((reason for reason in reasons if reason), None)
        if impl == "scan" and options.get("variant") == "published":
            from linattn_cli.kernels.monoids.hla3_published import MAX_KEY_DIM

            if sizes.key_dim > MAX_KEY_DIM:
                return (
                    f"its dense maps hold K^3 V numbers a segment, for checking up to K = {MAX_KEY_DIM}, "
                    f"not at K = {sizes.key_dim}"
                )
        return None

    return why_not


def _brute_force(mixer: Mixer, settings: dict[str, object]) -> Callable[[Inputs], Tensor] | None:
    from linattn_cli.brute_force import SUMS

    sums = SUMS.get(mixer.name)
    if sums is None:
        return None
    known = inspect.signature(sums).parameters
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    used = {name: value for name, value in settings.items() if name in known or free}
    used.pop("state_form", None)  # another state, the same numbers

    def run(x: Inputs) -> Tensor:
        groups = x["q"].shape[2] // x["k"].shape[2]
        full = {n: t if n in ("q", "mask") else t.repeat_interleave(groups, dim=2) for n, t in x.items()}
        mask = full.pop("mask", None)
        return sums(**full, **used) if mask is None else _without_padding(sums, full, mask, used)

    return run


def _without_padding(sums: Callable[..., Tensor], x: Inputs, mask: Tensor, used: dict[str, object]) -> Tensor:
    """The sum over each sequence with its padding cut out, put back in place, and zero at the padding."""
    rows = []
    for row, real in enumerate(mask):
        o = sums(**{name: t[row : row + 1, real] for name, t in x.items()}, **used)[0]
        rows.append(o.new_zeros(len(real), *o.shape[1:]).index_put((real.nonzero().squeeze(1),), o))
    return torch.stack(rows)
