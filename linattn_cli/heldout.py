"""A saved run on held-out data, of the trained size and of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn_cli import own_mixer
from linattn_cli.config import load_run_config
from linattn_cli.output import CliError, Document
from linattn_cli.recipe import read_recipe
from linattn_cli.runs import RECIPE, require_run, resume_command
from linattn_cli.settings import RunConfig

if TYPE_CHECKING:
    from linattn_cli.checkpoints import Checkpoint
    from linattn_cli.tasks.types import Task

COLUMNS = [
    "n_pairs",
    "seq_len",
    "updates",
    "distance",
    "accuracy",
    "exact_sequence_accuracy",
    "loss",
    "answers",
    "chance_vocab",
    "chance_pairs",
    "beyond_training",
]


def evaluate_run(
    path: Path,
    doc: Document,
    *,
    n_pairs: Sequence[int] | None,
    seq_lens: Sequence[int] | None,
    updates: int | None,
    examples: int | None,
    step: int | None,
    overrides: Mapping[str, Any],
    plot: Path | None = None,
    show: int = 0,
    trust: bool = False,
) -> None:
    """Fill `doc` with one row a size and one a distance range; warn of sequences longer than trained.

    plot  file of a picture of them
    show  sequences of each size to add to the summary as `examples`, with what the model answered

    Raises `CliError` (exit 2) for a folder that is no run, is damaged or has no checkpoint, and for sizes
    that are impossible or do not fit the model.
    """
    from linattn_cli import answers, environment, eval_plot, experiment, plotting
    from linattn_cli.evaluation import evaluate
    from linattn_cli.kernels.dispatch import impl_that_ran, turns_to_chunk

    require_run(path)
    config = _config(path, overrides, trust, doc)
    trained, model = experiment.build(config)
    tasks = list(grid(config, n_pairs=n_pairs, seq_lens=seq_lens, updates=updates))
    for task in tasks:
        _check_length(config, trained, task, doc)
    checkpoint = _load(path, step)
    device = environment.resolve_device(config.train.device)
    dtype = environment.resolve_dtype(config.train.dtype, device)
    impl, turns = experiment.impl_of(config, device), turns_to_chunk()
    doc.config = config
    doc.begin(device=device, dtype=config.train.dtype, impl=impl, seed=config.seed)
    experiment.load_weights(model, checkpoint)
    # bfloat16 is autocast over float32 weights
    model.to(device=device, dtype=None if config.train.dtype == "bfloat16" else dtype)
    count = examples or config.train.eval_examples
    accuracies = []
    shown: list[dict[str, Any]] = []
    with doc.progress(count * len(tasks), "eval") as bar:
        for task in tasks:
            found = evaluate(
                model,
                task,
                examples=count,
                seed=config.seed,
                stream="test",
                device=device,
                dtype=config.train.dtype,
                on_progress=bar.update,
            )
            size = _size(task) | {"step": checkpoint.step}
            constant = {
                **task.chance(),
                "beyond_training": task.input_len > trained.input_len,
                "fingerprint": task.fingerprint(config.seed),
            }
            figures = found.figures()
            accuracies.append(figures["accuracy"])
            doc.results.append({**size, "distance": "all", **figures, **constant})
            doc.results += [{**size, **row, **constant} for row in found.by_distance()]
            if show:
                shown += answers.examples(
                    model, task, count=show, seed=config.seed, device=device, dtype=config.train.dtype
                )
    doc.env["impl"] = impl_that_ran(impl, turns)
    doc.columns = COLUMNS
    doc.summary = {
        "accuracy": sum(accuracies) / len(accuracies),
        "accuracy_min": min(accuracies),
        "step": checkpoint.step,
        "parameters": model.parameter_count(),
        "run": str(path),
    }
    if show:
        answers.report(doc, shown)
    if plot is not None:
        plotting.save(plot, eval_plot.picture(config.model_dump(mode="json"), doc.env, doc.results))
        doc.note(f"plot saved in {plot}")


def _config(path: Path, overrides: Mapping[str, Any], trust: bool, doc: Document) -> RunConfig:
    """The recipe of a run; a mixer of the user's own runs only if it is given again, or the run is trusted."""
    from linattn_cli.experiment import other_code

    given = overrides.get("model.name")
    model = read_recipe(str(path / RECIPE)).data.get("model")
    trained = model.get("name") if isinstance(model, dict) else None
    if given is not None and not (
        own_mixer.is_own(trained)
        and own_mixer.is_own(given)
        and own_mixer.short_name(str(trained)) == own_mixer.short_name(given)
    ):
        raise CliError(
            f"run {path} was trained with {trained}, not with {given}",
            hint="eval needs --model only for a mixer of your own: the file of the class that was trained",
        )
    config = load_run_config(str(path / RECIPE), overrides=dict(overrides), trust=trust)
    if (problem := other_code(path, config)) is not None:
        doc.warn(f"this run was trained with {problem}")
    return config


def grid(
    config: RunConfig,
    *,
    n_pairs: Sequence[int] | None = None,
    seq_lens: Sequence[int] | None = None,
    updates: int | None = None,
) -> list[Task]:
    """The tasks to evaluate: every n_pairs with every length, the rest as trained.

    Where no length is asked for, the trained size keeps its own and others take the shortest legal one.

    >>> [task.input_len for task in grid(RunConfig(), n_pairs=[4, 8])]
    [13, 25]
    """
    from linattn_cli.tasks import make_task

    settings = config.task.model_dump()
    name = settings["name"]
    if name != "mqar" and (n_pairs is not None or updates is not None):
        raise CliError(f"--n-pairs and --updates belong to mqar; this run was trained on {name}", hint="use --seq-lens")
    changes: list[dict[str, Any]] = [{}] if n_pairs is None else [{"n_pairs": n} for n in n_pairs]
    if updates is not None:
        changes = [change | {"updates": updates} for change in changes]
    tasks = []
    for change in changes:
        same = all(settings[key] == value for key, value in change.items())
        lengths = seq_lens if seq_lens is not None else [settings["seq_len"] if same else None]
        tasks += [make_task(name, settings | change | {"seq_len": length}) for length in lengths]
    return tasks


def _size(task: Task) -> dict[str, Any]:
    settings = task.config()
    return {key: settings[key] for key in ("n_pairs", "seq_len", "updates") if key in settings}


def _check_length(config: RunConfig, trained: Task, task: Task, doc: Document) -> None:
    if task.input_len <= trained.input_len:
        return
    if config.model.positions != "learned":
        doc.warn(f"sequences of {task.input_len} tokens: the model was trained on {trained.input_len}")
        return
    have = max(config.model.max_positions, trained.input_len)
    if task.input_len > have:
        raise CliError(
            f"sequences of {task.input_len} tokens do not fit this model: it has {have} positions",
            hint="lower --seq-lens, or train with a larger model.max_positions or model.positions: rotary",
        )
    doc.warn(
        f"sequences of {task.input_len} tokens: positions {trained.input_len + 1} to {task.input_len} "
        f"were never trained (training had {trained.input_len}), so expect low accuracy there"
    )


def _load(path: Path, step: int | None) -> Checkpoint:
    from linattn_cli import checkpoints

    found = checkpoints.load(path, step)
    if found is None:
        raise CliError(
            f"run folder {path} has no checkpoint yet",
            hint=f"let it train further: {resume_command(path)}",
            kind="checkpoint",
        )
    return found
