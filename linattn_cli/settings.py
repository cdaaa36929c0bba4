"""The sections of a recipe: what each key is called, which values it takes and what it means.

Unknown keys are errors everywhere, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from linattn_cli.kernels.registry import MAX_HEAD_DIM, MIXERS, Option
from linattn_cli.own_mixer import (
    find_mixer,
    is_own,
    load,
    unknown_hint,
)
from linattn_cli.recipe import nearest

Scalar = bool | int | float | str | None
Impl = Literal["auto", "reference", "scan", "chunk", "triton"]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Section(BaseModel):
    """A section of a recipe: unknown keys, nan, and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def problem(message: str, *, at: tuple[str, ...] = (), hint: str = "") -> PydanticCustomError:
    """A validation error that knows the key below the validated one, and its remedy."""
    return PydanticCustomError("linattn", "{message}", {"message": message, "at": at, "hint": hint})


class ModelConfig(Section):
    """The mixer and the backbone around it.

    kv_heads       None means as many as `heads`
    max_positions  raised to the training length where that is longer
    short_conv     width of the short causal convolution before every mixer; 0 is none
    chunk_size     None chooses it from the length and the device
    options        the mixer's own options, resolved to the full set of `registry.MIXERS[name].options`
    code_sha256    digest of the file that `name` means, where that is a mixer of the user's own; checked if given
    """

    name: str = "vla"
    layers: Positive = 2
    d_model: Positive = 128
    heads: Positive = 4
    kv_heads: Positive | None = None
    d_head: Annotated[int, Field(ge=1, le=MAX_HEAD_DIM)] = 32
    ffn: Positive = 256
    positions: Literal["learned", "rotary", "none"] = "learned"
    max_positions: Positive = 512
    tied_head: bool = True
    output_norm: bool = True
    short_conv: NonNegative = 0
    impl: Impl = "auto"
    chunk_size: Positive | None = None
    options: dict[str, Scalar] = Field(default_factory=dict, validate_default=True)
    code_sha256: str | None = None

    @field_validator("name")
    @classmethod
    def _known_mixer(cls, name: str) -> str:
        if name not in MIXERS and not is_own(name):
            raise problem(f"there is no model {name!r}{nearest(name, MIXERS)}", hint=unknown_hint(MIXERS))
        return name

    @model_validator(mode="after")
    def _same_code(self) -> ModelConfig:
        sha256 = load(self.name).sha256 if is_own(self.name) else None
        if self.code_sha256 not in (None, sha256):
            raise problem(
                f"{self.name} is not the code that this recipe was written for: its SHA-256 is {sha256}",
                at=("code_sha256",),
                hint="use the file of that time, or give this one with --model to use it all the same",
            )
        object.__setattr__(self, "code_sha256", sha256)
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if key != "code_sha256" or value is not None}

    @model_validator(mode="after")
    def _fits_the_mixer(self) -> ModelConfig:
        mixer = find_mixer(self.name)
        if self.impl not in ("auto", *mixer.impls):
            raise problem(
                f"{self.name} has no impl {self.impl!r}",
                at=("impl",),
                hint=f"it has {', '.join(('auto', *mixer.impls))}",
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise problem(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}",
                at=("kv_heads",),
                hint="query heads share key/value heads in equal groups",
            )
        for key, value in self.options.items():
            if key not in mixer.options:
                known = ", ".join(mixer.options) or "no options of its own"
                raise problem(
                    f"{self.name} has no option {key!r}{nearest(key, mixer.options)}",
                    at=("options", key),
                    hint=f"{self.name} has {known}",
                )
            _check_option(self.name, key, value, mixer.options[key])
        resolved = {key: self.options.get(key, option.default) for key, option in mixer.options.items()}
        object.__setattr__(self, "options", resolved)  # the section is frozen; this is still its making
        return self


def _check_option(mixer: str, key: str, value: object, option: Option) -> None:
    at = ("options", key)
    if option.choices:
        if value not in option.choices:
            guess = nearest(str(value), option.choices)
            raise problem(
                f"{mixer} option {key} must be one of {', '.join(option.choices)}; got {value!r}{guess}",
                at=at,
            )
        return
    kind: type = type(option.default)
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a word"}
    fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if option.default is None:
        fits = value is None or isinstance(value, (bool, int, float, str))
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise problem(
            f"{mixer} option {key} must be {words.get(kind, 'a scalar')}; got {value!r}",
            at=at,
            hint=f"{option.help}; the default is {option.default!r}",
        )


class MqarConfig(Section):
    """Multi-query associative recall; `linattn_cli.tasks.mqar` says what is possible.

    seq_len   None is the shortest legal one
    updates   number of keys assigned a second time; the latest value counts
    power_a   zoology's exponent of the query gaps, p_i ~ i^(power_a - 1)
    """

    name: Literal["mqar"] = "mqar"
    protocol: Literal["vla", "zoology"] = "vla"
    n_pairs: Positive = 8
    seq_len: Positive | None = None
    vocab_size: Positive = 128
    updates: NonNegative = 0
    power_a: float = 0.01
    random_non_queries: bool = True


class CopyConfig(Section):
    """Copy `seq_len` tokens after a separator; the model reads 2 * seq_len tokens."""

    name: Literal["copy"] = "copy"
    seq_len: Positive = 32
    vocab_size: Positive = 32


TASK_CONFIGS: dict[str, type[MqarConfig] | type[CopyConfig]] = {"mqar": MqarConfig, "copy": CopyConfig}
TaskConfig = Annotated[MqarConfig | CopyConfig, Field(discriminator="name")]


class TrainConfig(Section):
    """AdamW with linear warm-up and cosine decay.

    warmup_steps     clamped to `steps`
    grad_clip        largest global gradient norm; 0 is no clipping
    dtype            bfloat16 is autocast over float32 weights
    device           auto is the first GPU that works here, else the CPU
    eval_every       0 evaluates at the end only; set to `log_every` where a target accuracy needs it
    target_accuracy  stop as soon as the validation stream reaches it
    cuda_graph       on a GPU, record a step once and replay it; the numbers stay the same
    """

    steps: Positive = 3000
    lr: Annotated[float, Field(gt=0)] = 3e-4
    batch_size: Positive = 64
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    warmup_steps: NonNegative = 300
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (
        0.9,
        0.999,
    )
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "auto"
    log_every: Positive = 50
    eval_every: NonNegative = 0
    eval_examples: Positive = 1024
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    checkpoint_every: Positive = 500
    cuda_graph: bool = True

    @model_validator(mode="after")
    def _resolve(self) -> TrainConfig:
        object.__setattr__(self, "warmup_steps", min(self.warmup_steps, self.steps))
        if self.target_accuracy is not None and self.eval_every == 0:
            object.__setattr__(self, "eval_every", self.log_every)
        return self


class SweepGrid(Section):
    """Every combination of the lists that are not empty, over the settings of the recipe.

    models  arms: a mixer, a mixer with options of its own (`vla:penalty=none`), or a name of `sweep.variants`
    points  keys that change together, as `{task.n_pairs: 4, task.seq_len: 64}`
    grid    any other dotted keys, each with its values
    """

    models: list[str] = Field(default_factory=list)
    n_pairs: list[Positive] = Field(default_factory=list)
    d_heads: list[Positive] = Field(default_factory=list)
    seq_lens: list[Positive] = Field(default_factory=list)
    lrs: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
    seeds: list[Seed] = Field(default_factory=list)
    points: list[Annotated[dict[str, Scalar], Field(min_length=1)]] = Field(default_factory=list)
    grid: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = Field(default_factory=dict)


class SweepConfig(SweepGrid):
    """A grid of training runs, for `linattn capacity-sweep`.

    variants  names for settings to compare, dotted keys under each; empty `models` means all of these
    more      further grids; the lists that one leaves empty are those above
    threads   CPU threads of a run; part of what decides its figures, so not taken from the machine
    """

    variants: dict[str, dict[str, Scalar]] = Field(default_factory=dict)
    more: list[SweepGrid] = Field(default_factory=list)
    threads: Positive = 1

    @model_validator(mode="after")
    def _known_arms(self) -> SweepConfig:
        known = [*MIXERS, *self.variants]
        for name in self.variants:
            if name in MIXERS or not name.strip() or set(name) & set(",:="):
                raise problem(
                    f"{name!r} cannot name a variant",
                    at=("variants", name),
                    hint="a name that is no mixer's, without commas, colons and equals signs",
                )
        for arm in [*self.models, *(arm for grid in self.more for arm in grid.models)]:
            name, _ = split_arm(arm)
            if name not in known and not is_own(name):
                raise problem(
                    f"there is no model {name!r}{nearest(name, known)}",
                    at=("models",),
                    hint=f"there are {', '.join(known)}; settings go behind the name, as in vla:penalty=none",
                )
        return self


def split_arm(arm: str) -> tuple[str, list[str]]:
    """The model of an arm and the settings behind it.

    >>> split_arm("vla:penalty=none:readout=raw")
    ('vla', ['penalty=none', 'readout=raw'])
    """
    words = arm.split(":")
    first = next((index for index, word in enumerate(words) if "=" in word), len(words))
    return ":".join(words[:first]), words[first:]


class RunConfig(Section):
    """Everything that decides a run; two equal ones give equal results on the same machine."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskConfig = Field(default_factory=MqarConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    seed: Seed = 0
    sweep: SweepConfig | None = None

    @model_validator(mode="after")
    def _no_graph_of_own_code(self) -> RunConfig:
        """A replayed step would not see what the user's Python does; it can be asked for."""
        if is_own(self.model.name) and "cuda_graph" not in self.train.model_fields_set:
            object.__setattr__(self, "train", self.train.model_copy(update={"cuda_graph": False}))
        return self
