"""What `probe-norm` measures: bare operators on random keys, or the layers of a model, untrained or of a run.

Each comes out as a recurrence in the dtype asked for, and the same in float64 on the same inputs, which the
Jacobians are measured on.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linattn_cli.evaluation import precision, to_device
from linattn_cli.kernels.forms.features import unit
from linattn_cli.kernels.forms.vla import vla_directions
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Mixer
from linattn_cli.layers.hla import HigherOrder
from linattn_cli.output import CliError
from linattn_cli.own_mixer import find_mixer, is_own, load, short_name
from linattn_cli.probe_states import Recurrence
from linattn_cli.runs import resume_command
from linattn_cli.settings import RunConfig
from linattn_cli.verify_mixers import form_of

if TYPE_CHECKING:
    from linattn_cli.model import LanguageModel

VOCABULARY = 128
RUN_SEQUENCES = 8
FORGET_BIAS = 4.0
"""Forget gates of bare operators are `sigmoid(4 + noise)`, near 0.98, as those of `decay_delta` start."""

Directions = Callable[[], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class Subject:
    """One recurrence to measure.

    model       its name in tables
    mixer       its name in the registry, with the options in force
    source      `operator`, `model`, or the run folder
    layer       number of the layer; None for a bare operator
    recurrence  in the dtype asked for
    exact       in float64, on the same inputs
    directions  the a and k of `J_t = I - a_t k_t^T`, `[B, T, H, K]` float64, as the forward pass makes them; None
                where a step is not that
    """

    model: str
    mixer: str
    options: Mapping[str, Any]
    source: str
    layer: int | None
    seed: int
    recurrence: Recurrence
    exact: Recurrence
    directions: Directions


def operator_subject(
    config: RunConfig,
    *,
    seq_len: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    name: str | None = None,
) -> Subject:
    """A form of the registry on inputs drawn from N(0, 1).

    u is a unit vector over sqrt(d_head) and q of the higher orders is divided by sqrt(d_head), as their layers
    do; beta is the sigmoid of noise, forget gates are near 0.98.
    """
    mixer, options = find_mixer(config.model.name), config.model.options
    if is_own(mixer.name) and not load(mixer.name).has_oracle:
        raise CliError(
            f"{short_name(mixer.name)} has no form with a serial oracle to probe",
            hint="give its class `form` and `impls` with reference in it; or --source model, for a subclass of Mixer",
        )
    form = form_of(mixer)
    parameters = inspect.signature(form).parameters
    settings = {name: value for name, value in options.items() if name in parameters and name != "beta"}
    tokens = {name: x.to(dtype).to(device) for name, x in _draw(config, parameters, seq_len, seed).items()}

    def run(tokens: Mapping[str, Tensor], state: Any, *, impl: str, mask: Tensor | None = None) -> FormOutput:
        return form(**tokens, **settings, mask=mask, initial_state=state, impl=impl)

    exact = {name: x.double() for name, x in tokens.items()}

    def directions() -> tuple[Tensor, Tensor] | None:
        if mixer.name != "vla":
            return None
        chosen: dict[str, Any] = {key: settings[key] for key in ("lambda0", "penalty", "normalise_gate", "feature_map")}
        key, write, _ = vla_directions(exact["k"], exact.get("u"), exact.get("beta"), **chosen, impl="chunk")
        return write, key

    named = (name or mixer.name, mixer.name, options)
    return Subject(*named, "operator", None, seed, Recurrence(tokens, run), Recurrence(exact, run), directions)


def _draw(config: RunConfig, parameters: Mapping[str, Any], tokens: int, seed: int) -> dict[str, Tensor]:
    model, options = config.model, config.model.options
    kv_heads = model.kv_heads or model.heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator, dtype=torch.float64)

    def wanted(name: str, chosen: bool) -> bool:
        return name in parameters and (chosen or parameters[name].default is inspect.Parameter.empty)

    made = {
        "q": normal(model.heads, model.d_head),
        "k": normal(kv_heads, model.d_head),
        "v": normal(kv_heads, model.d_head),
    }
    if _is_higher_order(model.name):
        made["q"] *= model.d_head**-0.5
    if wanted("u", options.get("penalty") == "learned"):
        made["u"] = unit(normal(kv_heads, model.d_head)) * model.d_head**-0.5
    if wanted("beta", options.get("beta") == "sigmoid"):
        made["beta"] = normal(kv_heads).sigmoid()
    if wanted("log_decay", options.get("decay", "none") != "none"):
        made["log_decay"] = torch.nn.functional.logsigmoid(FORGET_BIAS + normal(kv_heads))
    return made


def _is_higher_order(name: str) -> bool:
    import importlib

    module, layer = find_mixer(name).layer.split(":")
    return issubclass(getattr(importlib.import_module(module), layer), HigherOrder)


def model_subjects(
    config: RunConfig, *, seq_len: int, seed: int, device: torch.device, name: str | None = None
) -> list[Subject]:
    """The layers of a freshly initialised model, on random tokens."""
    from linattn_cli.model import build_model

    torch.manual_seed(seed)
    model = build_model(config.model, vocab_size=VOCABULARY, seq_len=seq_len)
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(VOCABULARY, (1, seq_len), generator=generator)
    return layer_subjects(model, tokens_BT, config, source="model", seed=seed, device=device, name=name)


def run_subjects(
    path: Path, config: RunConfig, *, seq_len: int | None, step: int | None, device: torch.device
) -> list[Subject]:
    """The layers of a trained run on held-out sequences of its task.

    Raises `CliError` (exit 2) for a run that is damaged or has no checkpoint, and for lengths that its task or
    its positions do not have.
    """
    from linattn_cli import checkpoints, experiment
    from linattn_cli.heldout import grid

    task = grid(config, seq_lens=None if seq_len is None else [seq_len])[0]
    _, model = experiment.build(config)
    found = checkpoints.load(path, step)
    if found is None:
        raise CliError(
            f"run folder {path} has no checkpoint yet",
            hint=f"let it train further: {resume_command(path)}",
            kind="checkpoint",
        )
    experiment.load_weights(model, found)
    batch = task.batch(RUN_SEQUENCES, seed=config.seed, stream="test", index=0)
    tokens_BT = to_device(batch.inputs, torch.device("cpu"))
    return layer_subjects(model, tokens_BT, config, source=str(path), seed=config.seed, device=device)


def layer_subjects(
    model: LanguageModel,
    tokens_BT: Tensor,
    config: RunConfig,
    *,
    source: str,
    seed: int,
    device: torch.device,
    name: str | None = None,
) -> list[Subject]:
    """Every mixer of a model as a recurrence, on what the layers before it make of these tokens."""
    dtype = config.train.dtype
    model.to(device=device, dtype=torch.float64 if dtype == "float64" else None).eval()
    model.set_impl(config.model.impl)
    inputs: dict[int, Tensor] = {}
    mixers: list[Any] = [block.mixer for block in model.blocks]
    layers = [mixer for mixer in mixers if isinstance(mixer, Mixer)]
    if len(layers) < len(mixers):
        raise CliError(
            f"{short_name(config.model.name)} is no subclass of Mixer, and what it carries is not known",
            hint="probe-norm follows `mix` of a linattn_cli.layers.Mixer; derive the class from it",
        )

    def remember(index: int) -> Any:
        return lambda module, args: inputs.update({index: args[0].detach()})

    handles = [layer.register_forward_pre_hook(remember(index)) for index, layer in enumerate(layers)]
    try:
        with torch.no_grad(), precision(device, dtype):
            model(tokens_BT.to(device))
    finally:
        for handle in handles:
            handle.remove()
    named = (name or config.model.name, config.model.name, config.model.options, source)
    return [Subject(*named, index, seed, *_layer(layer, inputs[index], dtype)) for index, layer in enumerate(layers)]


def _layer(layer: Mixer, x: Tensor, dtype: str) -> tuple[Recurrence, Recurrence, Directions]:
    """The recurrence of a layer on its inputs x, the same in float64, and its directions."""
    layer.clamped = None
    wide = copy.deepcopy(layer).double().requires_grad_(False)
    layer.requires_grad_(False)

    def directions() -> tuple[Tensor, Tensor] | None:
        factors = wide.jacobian_factors(x.double())
        if factors is None or factors[0] is not None:
            return None
        _, a, k = factors
        return None if a is None or k is None else (a, k)

    return _layer_recurrence(layer, x, dtype), _layer_recurrence(wide, x.double(), "float64"), directions


def _layer_recurrence(layer: Mixer, x: Tensor, dtype: str) -> Recurrence:
    """`mix` of a layer: its form and the gates it computes from x, token by token."""
    with torch.no_grad(), precision(x.device, dtype):
        q, k, v, _, _ = layer.project(x)

    def run(tokens: Mapping[str, Tensor], state: Any, *, impl: str, mask: Tensor | None = None) -> FormOutput:
        before, layer.impl = layer.impl, impl
        try:
            with precision(x.device, dtype):
                return layer.mix(**tokens, mask=mask, initial_state=state)
        finally:
            layer.impl = before

    return Recurrence({"q": q, "k": k, "v": v, "x": x}, run)
