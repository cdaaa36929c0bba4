"""The schema of a recipe, and how command line, recipe and defaults become one resolved `RunConfig`.

Precedence: command line over recipe over defaults. Unknown keys are errors everywhere, never dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from linattn_cli import __version__
from linattn_cli.kernels.registry import MAX_HEAD_DIM, MIXERS, Option
from linattn_cli.output import CliError
from linattn_cli.own_mixer import (
    absolute_name,
    find_mixer,
    is_own,
    load,
    names_in,
    portable_name,
    replace_at,
    short_name,
    unknown_hint,
)
from linattn_cli.recipe import KeyPath, dump_yaml, nearest
from linattn_cli.sources import Sources

Scalar = bool | int | float | str | None
Impl = Literal["auto", "reference", "scan", "chunk", "triton"]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Section(BaseModel):
    """A section of a recipe: unknown keys, nan, and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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
            raise _problem(f"there is no model {name!r}{nearest(name, MIXERS)}", hint=unknown_hint(MIXERS))
        return name

    @model_validator(mode="after")
    def _same_code(self) -> ModelConfig:
        sha256 = load(self.name).sha256 if is_own(self.name) else None
        if self.code_sha256 not in (None, sha256):
            raise _problem(
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
            raise _problem(
                f"{self.name} has no impl {self.impl!r}",
                at=("impl",),
                hint=f"it has {', '.join(('auto', *mixer.impls))}",
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise _problem(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}",
                at=("kv_heads",),
                hint="query heads share key/value heads in equal groups",
            )
        for key, value in self.options.items():
            if key not in mixer.options:
                known = ", ".join(mixer.options) or "no options of its own"
                raise _problem(
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
            raise _problem(
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
        raise _problem(
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
                raise _problem(
                    f"{name!r} cannot name a variant",
                    at=("variants", name),
                    hint="a name that is no mixer's, without commas, colons and equals signs",
                )
        for arm in [*self.models, *(arm for grid in self.more for arm in grid.models)]:
            name, _ = split_arm(arm)
            if name not in known and not is_own(name):
                raise _problem(
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


_SECTIONS: dict[str, type[Section]] = {"model": ModelConfig, "train": TrainConfig, "sweep": SweepConfig}


def load_run_config(
    recipe: str | None = None,
    sets: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    *,
    trust: bool = False,
) -> RunConfig:
    """The resolved configuration of a run.

    recipe     name of a packaged recipe, or a path; None is the defaults
    sets       `--set` arguments, `section.key=value` with YAML values
    overrides  what dedicated options were given, by dotted key (`{"model.d_head": 64}`); None is not given
    trust      run a file that only the recipe names as its mixer; one given by `sets` or `overrides` always is

    Raises `CliError` (exit 2) naming file, line, key and the nearest valid key.

    >>> load_run_config(sets=["model.d_head=16"], overrides={"task.n_pairs": 4}).task.n_pairs
    4
    """
    sources = Sources.collect(recipe, sets or [], overrides or {})
    _refuse_leftovers(sources)
    sources.admit_code(trust)
    data = sources.data
    if isinstance(task := data.setdefault("task", {}), dict):
        task.setdefault("name", "mqar")
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise _explain(error, sources) from None
    _check_task(config, sources)
    return config


def derive(config: RunConfig, changes: Mapping[str, Any], *, label: str) -> RunConfig:
    """`config` without its sweep, with some dotted keys set anew; everything is checked again.

    Another mixer takes none of the options of `config`, and another task none of its settings. Raises
    `CliError` (exit 2) that begins with `label`.

    >>> derive(RunConfig(), {"model.name": "linear", "task.n_pairs": 4}, label="a cell").model.options["readout"]
    'ratio'
    """
    # Only what was written: what was resolved from it must be resolved anew.
    data = config.model_dump(mode="json", exclude={"sweep"}, exclude_unset=True)
    if changes.get("model.name", config.model.name) != config.model.name:
        data["model"] = {key: value for key, value in data.get("model", {}).items() if key != "options"}
    if changes.get("task.name", config.task.name) != config.task.name:
        data["task"] = {}
    data.setdefault("task", {}).setdefault("name", config.task.name)
    sources = Sources(None, data)
    for key, value in changes.items():
        sources.put(tuple(key.split(".")), value, "")
    sources.given.clear()  # these are no options of a command line
    try:
        derived = RunConfig.model_validate(data)
        _check_task(derived, sources)
    except ValidationError as error:
        found = _explain(error, sources)
        raise CliError(f"{label}: {found.message}", hint=found.hint, kind=found.kind) from None
    except CliError as error:
        raise CliError(f"{label}: {error.message}", hint=error.hint, kind=error.kind) from None
    return derived


def _check_task(config: RunConfig, sources: Sources) -> None:
    """Let the task itself refuse what is impossible, before anything is built."""
    from linattn_cli.tasks import make_task

    try:
        make_task(config.task.name, config.task.model_dump())
    except ValueError as error:
        place = sources.where_any(("task",))
        raise CliError(f"{place}: {error}" if place else str(error), kind="recipe") from None


def dump_recipe(config: RunConfig, *, beside_code: bool = False) -> str:
    """The resolved recipe as YAML, accepted back unchanged.

    beside_code  the recipe will lie beside a copy of the user's own mixer, and names that
    """
    data = config.model_dump(mode="json")
    for path, name in list(names_in(data)):
        copied = beside_code and path == ("model", "name")
        replace_at(data, path, portable_name(name) if copied else absolute_name(name))
    if data["sweep"] is None:
        del data["sweep"]
    return f"# Resolved by linattn {__version__}: every key of the run, accepted as a recipe.\n{dump_yaml(data)}"


def _refuse_leftovers(sources: Sources) -> None:
    """A `--model` other than the recipe's keeps the backbone; options of the other mixer are an error."""
    recipe = sources.recipe
    if recipe is None:
        return
    for section, default, own in (("model", "vla", "options"), ("task", "mqar", None)):
        written = recipe.data.get(section)
        chosen = sources.get((section, "name"))
        if not isinstance(written, dict) or chosen is None:
            continue
        before = written.get("name", default)
        if chosen == before or (is_own(chosen) and is_own(before) and short_name(chosen) == short_name(before)):
            continue
        if own is None:
            known = TASK_CONFIGS[chosen].model_fields if chosen in TASK_CONFIGS else written
            left: list[KeyPath] = [(section, key) for key in written if key not in known]
            remedy = f"replace the section: --set '{section}={{name: {chosen}}}'"
        else:
            options = written.get(own)
            left = [(section, own, key) for key in options] if isinstance(options, dict) else []
            remedy = f"drop them with --set {section}.{own}={{}}"
        left = [path for path in left if sources.comes_from_recipe(path)]
        if left:
            keys = ", ".join(".".join(path) for path in left)
            raise CliError(
                f"{recipe.where(left[0])}: {keys} was written for {section} {before}, not for {chosen}",
                hint=remedy,
                kind="recipe",
            )


def _problem(message: str, *, at: tuple[str, ...] = (), hint: str = "") -> PydanticCustomError:
    """A validation error that knows the key below the validated one, and its remedy."""
    return PydanticCustomError("linattn", "{message}", {"message": message, "at": at, "hint": hint})


def _explain(error: ValidationError, sources: Sources) -> CliError:
    problems = [_explain_one(dict(item), sources) for item in error.errors(include_url=False)]
    message, hint = problems[0]
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    writer = sources.recipe.written_by if sources.recipe is not None else None
    if writer is not None and _release(writer) > _release(__version__):
        return CliError(
            f"{message}; the recipe was written by a newer linattn, {writer}, this is {__version__}",
            hint="update linattn: pip install -U linattn",
            kind="newer_format",
        )
    return CliError(message, hint=hint, kind="recipe")


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare it by.

    >>> _release("0.10.2.dev1") > _release("0.9")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _explain_one(item: dict[str, Any], sources: Sources) -> tuple[str, str]:
    context = item.get("ctx", {})
    path = tuple(str(part) for part in item["loc"])
    if path[:1] == ("task",) and len(path) > 1 and path[1] in TASK_CONFIGS:
        path = (path[0], *path[2:])  # pydantic puts the chosen task's name between section and key
    path = (*path, *context.get("at", ()))
    key = ".".join(path)
    place = sources.where(path) or sources.where_any(path)
    where = f"{place}: " if place else ""
    if item["type"] == "extra_forbidden":
        section = ".".join(path[:-1])
        valid = list(_keys_of(section, sources))
        owner = f"task {sources.get(('task', 'name'))}" if section == "task" else section or "a recipe"
        return (
            f"{where}{key} is not a key of {owner}{nearest(path[-1], valid)}",
            f"{owner} has {', '.join(valid)}",
        )
    if item["type"] == "union_tag_invalid":
        name = str(sources.get(("task", "name")))
        place = sources.where(("task", "name"))
        message = f"{place}: there is no task {name!r}{nearest(name, TASK_CONFIGS)}"
        return message, f"there are {', '.join(TASK_CONFIGS)}; linattn list tasks describes them"
    if item["type"] == "linattn":
        return f"{where}{context['message']}", context["hint"]
    said = item["msg"].removeprefix("Value error, ")
    return f"{where}{key}: {said[:1].lower()}{said[1:]}, got {item.get('input')!r}"[:300], ""


def _keys_of(section: str, sources: Sources) -> dict[str, Any]:
    if section == "task":
        return TASK_CONFIGS[str(sources.get(("task", "name")))].model_fields
    return _SECTIONS[section].model_fields if section in _SECTIONS else RunConfig.model_fields
