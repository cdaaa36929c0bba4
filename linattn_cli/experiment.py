"""From a resolved recipe to a model, a run folder and the figures a run ends with."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn_cli import own_mixer
from linattn_cli.config import dump_recipe, load_run_config
from linattn_cli.output import CliError
from linattn_cli.recipe import read_recipe
from linattn_cli.runs import RECIPE, RunFolder, read_metrics, require_run, resume_command
from linattn_cli.settings import MqarConfig, RunConfig

if TYPE_CHECKING:
    import torch

    from linattn_cli.checkpoints import Checkpoint
    from linattn_cli.model import LanguageModel
    from linattn_cli.output import Document
    from linattn_cli.require import Requirement
    from linattn_cli.tasks.types import Task

MAY_CHANGE = {
    "train.steps",
    "train.device",
    "train.log_every",
    "train.eval_every",
    "train.eval_examples",
    "train.target_accuracy",
    "train.checkpoint_every",
    "train.cuda_graph",
}
"""Keys that a resumed run may set anew; any other would make it a run of something else."""

PROBE_EXAMPLES = 64


@dataclass
class Start:
    """What a training session begins from.

    config      the resolved recipe
    run         the folder, owned by this process; None when it is still to be made
    checkpoint  where to go on from; None at the beginning
    row         the line of metrics of the checkpoint's step
    changed     (key, before, after) of what the resumed run sets anew
    """

    config: RunConfig
    run: RunFolder | None = None
    checkpoint: Checkpoint | None = None
    row: dict[str, Any] | None = None
    changed: tuple[tuple[str, Any, Any], ...] = ()

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def resolve(
    *,
    recipe: str | None,
    sets: list[str] | None,
    overrides: Mapping[str, Any],
    out: Path | None,
    resume: bool,
    from_step: int | None = None,
    trust: bool = False,
) -> Start:
    """Read the recipe, or with `resume` the run folder `out`, which is then owned by this process.

    Raises `CliError` (exit 2) for a recipe that is wrong, and for a folder that is not there, damaged, in use
    or of another recipe.
    """
    if not resume:
        if from_step is not None:
            raise CliError("--from-step belongs to --resume", hint="add --resume --out RUN")
        return Start(load_run_config(recipe, sets, dict(overrides), trust=trust))
    if out is None:
        raise CliError("--resume needs the run folder", hint=_latest_hint(Path("runs")))
    require_run(out)
    run = RunFolder.resume(out)
    try:
        return _resume(run, recipe, sets, overrides, from_step, trust)
    except BaseException:
        run.close()
        raise


def _resume(
    run: RunFolder,
    recipe: str | None,
    sets: list[str] | None,
    overrides: Mapping[str, Any],
    from_step: int | None,
    trust: bool,
) -> Start:
    from linattn_cli import checkpoints

    stored_recipe = str(run.path / RECIPE)
    name = overrides.get("model.name")
    mine = {"model.name": name} if own_mixer.is_own(name) else {}
    stored = load_run_config(stored_recipe, overrides=mine, trust=trust)
    config = load_run_config(recipe or stored_recipe, sets, dict(overrides), trust=trust)
    if (problem := other_code(run.path, config)) is not None:
        raise CliError(
            f"run folder {run.path} was started with {problem}",
            hint=f"continue with the copy in it: {resume_command(run.path)}; or choose another --out",
            kind="run_folder",
        )
    checkpoint = checkpoints.load(run.path, from_step)
    step = 0 if checkpoint is None else checkpoint.step
    if config.train.steps < step:
        raise CliError(
            f"run folder {run.path} is at step {step} already, past --steps {config.train.steps}",
            hint="give more steps, or choose another --out",
            kind="run_folder",
        )
    changed = tuple(differences(stored.model_dump(mode="json"), config.model_dump(mode="json")))
    for key, before, after in changed:
        if key not in MAY_CHANGE:
            raise CliError(
                f"run folder {run.path} was started with {key} = {before}, not {after}",
                hint=f"continue it as it is: {resume_command(run.path)}; or choose another --out",
                kind="run_folder",
            )
    row = next((row for row in read_metrics(run.path) if row["step"] == step), None)
    return Start(config, run, checkpoint, row, changed)


def _go_back(start: Start, run: RunFolder) -> Iterator[str]:
    """Cut a resumed folder back to its checkpoint, and say what that did."""
    from linattn_cli import checkpoints

    for key, before, after in start.changed:
        yield f"{key} changed from {before} to {after}"
    if start.checkpoint is None:
        yield "no checkpoint yet: starting from the first step"
    else:
        yield f"continuing from {start.checkpoint.path}"
    for newer in checkpoints.discard_after(run.path, start.step):
        yield f"dropped the checkpoint of step {newer}"
    checkpoints.prune(run.path)
    run.clear_leftovers()
    run.cut_metrics(start.step)
    if start.changed:
        run.write_recipe(dump_recipe(start.config, beside_code=True))


def other_code(path: Path, config: RunConfig) -> str | None:
    """Where a run folder's mixer is the user's own: how the one of `config` differs from it, or None."""
    model = read_recipe(str(path / RECIPE)).data.get("model")
    before = model.get("code_sha256") if isinstance(model, dict) else None
    now = config.model.code_sha256
    if before == now:
        return None
    return (
        f"another {own_mixer.short_name(config.model.name)}: its SHA-256 was {before}, that of the one given is {now}"
    )


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values.

    >>> list(differences({"train": {"lr": 1, "steps": 2}}, {"train": {"lr": 3, "steps": 2}}))
    [('train.lr', 1, 3)]
    """
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def build(config: RunConfig) -> tuple[Task, LanguageModel]:
    """The task and a freshly initialised model; the weights depend on the recipe alone."""
    import torch

    from linattn_cli.cuda_graph import RECORDING
    from linattn_cli.model import build_model
    from linattn_cli.tasks import make_task

    task = make_task(config.task.name, config.task.model_dump())
    with RECORDING:  # the generator is the process's
        torch.manual_seed(config.seed)
        return task, build_model(config.model, vocab_size=task.vocab_size, seq_len=task.input_len)


def train(
    start: Start,
    doc: Document,
    *,
    out: Path | None,
    requirements: Sequence[Requirement] = (),
    plot: Path | None = None,
) -> None:
    """Train to the end, keep everything in the run folder, and fill `doc` with what was reached.

    Missed requirements make the document `failed`; the run is kept. A `plot` is drawn also where training stops
    early: the curve up to there tells why.
    """
    from linattn_cli import environment, require
    from linattn_cli.kernels.dispatch import impl_that_ran, turns_to_chunk
    from linattn_cli.training import Trainer

    config = start.config
    doc.config = config
    with contextlib.ExitStack() as stack:
        if start.run is not None:
            stack.enter_context(start.run)
        device = environment.resolve_device(config.train.device)
        environment.resolve_dtype(config.train.dtype, device)
        impl, turns = impl_of(config, device), turns_to_chunk()
        doc.begin(device=device, dtype=config.train.dtype, impl=impl, seed=config.seed)
        say_what_is_absent(config.model.name, doc)
        task, model = build(config)
        run = start.run or stack.enter_context(_new_run(config, out))
        bar = stack.enter_context(doc.progress(config.train.steps, "train"))
        bar.log(f"run folder {run.path}")
        values: dict[str, Any] = {}
        trainer = Trainer(
            model,
            task,
            config.train,
            seed=config.seed,
            device=device,
            run=run,
            on_row=lambda row: values.update(_shown(row)),
            on_step=lambda step: bar.update(1, **values),
        )
        if start.checkpoint is not None:
            trainer.restore(start.checkpoint, start.row)
            bar.skip(trainer.step)
        if start.run is not None:
            # Only now, when nothing can refuse the resume any more.
            for note in _go_back(start, run):
                bar.log(note)
        try:
            outcome = trainer.train()
        except (CliError, KeyboardInterrupt):
            _draw(plot, run, doc)
            raise
        doc.env["impl"] = impl_that_ran(impl, turns)
        doc.summary = {
            **measure(model, task, config, device),
            "tokens_per_s": outcome.tokens_per_s,
            "train_s": outcome.train_s,
            "steps": outcome.step,
            "stopped_by": outcome.stopped,
            "run": str(run.path),
        }
        require.check(requirements, doc)
        run.write_result(doc.as_dict())
        _draw(plot, run, doc)
    doc.note(f"saved in {run.path}")
    trust = " --trust" if own_mixer.is_own(config.model.name) else ""
    doc.note(f"next: linattn eval {shlex.quote(str(run.path))}{_other_sizes(config)}{trust}")


def _draw(plot: Path | None, run: RunFolder, doc: Document) -> None:
    """Draw what `metrics.jsonl` has of a run, at its end or where it stopped."""
    from linattn_cli import plotting
    from linattn_cli.train_plot import picture

    metrics = read_metrics(run.path)
    if plot is not None and metrics:
        plotting.save(plot, picture(doc.config.model_dump(mode="json"), doc.env, metrics, doc.summary))
        doc.note(f"plot saved in {plot}")


def impl_of(config: RunConfig, device: torch.device) -> str:
    """The implementation that runs; a layer of the user's own without a form is code that we know nothing of."""
    from linattn_cli import environment

    if own_mixer.is_own(config.model.name) and not own_mixer.find_mixer(config.model.name).impls:
        return "own code"
    return environment.resolve_impl(config.model.impl, device, config.train.dtype)


def say_what_is_absent(name: str, doc: Document) -> None:
    """What a mixer of the user's own does not have, one line each on stderr."""
    if own_mixer.is_own(name):
        own = own_mixer.load(name)
        for absence in own.absences():
            doc.log(f"{own.class_} has {absence}")


def _other_sizes(config: RunConfig) -> str:
    """Half and twice the pairs of the training, as an option of `eval`."""
    if not isinstance(config.task, MqarConfig):
        return ""
    n = config.task.n_pairs
    sizes = sorted({max(1, n // 2), n, 2 * n if 4 * n < config.task.vocab_size else n})
    return " --n-pairs " + ",".join(map(str, sizes))


def load_weights(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Put the weights of a checkpoint into a model. Raises `CliError` (exit 2) if they are of another one."""
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CliError(
            f"checkpoint {checkpoint.path} does not fit its recipe: {reason}",
            hint="was recipe.yaml edited, or the run trained by another version?",
            kind="checkpoint",
        ) from error


def _new_run(config: RunConfig, out: Path | None) -> RunFolder:
    run = RunFolder.create(out, stem=f"{own_mixer.short_name(config.model.name)}-{config.task.name}")
    try:
        record_recipe(run, config)
    except BaseException:
        run.close()
        raise
    return run


def record_recipe(run: RunFolder, config: RunConfig) -> None:
    """Write what repeats a run: its recipe, and the file of a mixer of the user's own."""
    if config.model.code_sha256 is not None:
        run.write_code(own_mixer.source_of(config.model.code_sha256))
    run.write_recipe(dump_recipe(config, beside_code=True))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """What the progress bar shows of a line of metrics."""
    names = {"loss": "loss", "accuracy": "accuracy", "validation_accuracy": "validation"}
    return {shown: row[key] for key, shown in names.items() if key in row}


def measure(model: LanguageModel, task: Task, config: RunConfig, device: torch.device) -> dict[str, Any]:
    """What a run ends with: held-out accuracy beside chance, the state and its Jacobian."""
    from linattn_cli.evaluation import evaluate

    found = evaluate(
        model,
        task,
        examples=config.train.eval_examples,
        seed=config.seed,
        stream="test",
        device=device,
        dtype=config.train.dtype,
    )
    return {
        **found.figures(),
        **task.chance(),
        **probe(model, task, config, device),
        "parameters": model.parameter_count(),
        "fingerprint": task.fingerprint(config.seed),
    }


def probe(model: LanguageModel, task: Task, config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Size and norm of the state after a held-out sequence, and the largest Jacobian norm on the way."""
    import torch

    from linattn_cli.evaluation import precision, to_device
    from linattn_cli.probes import jacobian_norms, state_norms

    batch = task.batch(PROBE_EXAMPLES, seed=config.seed, stream="test", index=0)
    tokens_BT = to_device(batch.inputs, device)
    model.eval()
    size: int | None = None
    sizes: dict[str, float] = {}
    if model.carries_state:
        with torch.no_grad(), precision(device, config.train.dtype):
            _, state = model(tokens_BT, return_state=True)
        size = model.state_bytes(state)
        sizes = {f"state_norm_max_{name}": value for name, value in state_norms(state.layers).items()}
    norms = [found.largest for found in jacobian_norms(model, tokens_BT, dtype=config.train.dtype)]
    figures: dict[str, Any] = {"state_bytes": size, **sizes}
    figures["jacobian_norm_max"] = max(norms, default=None)
    if not norms:
        name = own_mixer.short_name(config.model.name)
        why = f"a step of {name} is not g I - a p^T" if sizes else f"{name} has no state of fixed size"
        if own_mixer.is_own(config.model.name):
            why = f"{name} has no jacobian_factors"
        figures["jacobian"] = f"none: {why}"
    return figures


def _latest_hint(root: Path) -> str:
    runs = sorted(root.glob(f"*/{RECIPE}"), key=lambda path: path.stat().st_mtime) if root.is_dir() else []
    return resume_command(runs[-1].parent if runs else Path("RUN"))
