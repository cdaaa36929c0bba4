"""What a worker does with a cell: train it, judge it on held-out data, and say how it went.

Nothing here raises: whatever happens becomes an `Outcome`, which crosses process and machine borders as it is.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from linattn_cli.runs import CHECKPOINTS, RunFolder

if TYPE_CHECKING:
    import torch

    from linattn_cli.capacity import Cell
    from linattn_cli.evaluation import Evaluation
    from linattn_cli.settings import RunConfig

PROBE_STEPS = 8


class Work(TypedDict):
    """What a worker is given.

    kind     `train`, or `probe`: only time a few steps
    config   a resolved `RunConfig`, without its sweep
    device   where to compute, `cuda:1` for instance
    threads  CPU threads
    weights  give the trained weights back too
    """

    kind: str
    config: dict[str, Any]
    device: str
    threads: int
    weights: bool


class Outcome(TypedDict):
    """What a worker gives back.

    status   `finished`; `diverged`, where the loss was not finite any more; `failed`; `crashed`, set by whoever
             misses the worker
    figures  what was reached, by column of the `cells` table
    metrics  lines of `metrics.jsonl`
    files    what else belongs into the run folder, by path: the checkpoint, where weights were asked for
    error    `type` and `message`, None unless something went wrong
    """

    status: str
    figures: dict[str, Any]
    metrics: list[dict[str, Any]]
    files: dict[str, bytes]
    error: dict[str, str] | None


def job_of(cell: Cell, device: str, *, kind: str = "train", weights: bool = False) -> Work:
    """What a worker needs to run a cell."""
    config = cell.config.model_dump(mode="json", exclude={"sweep"})
    return {"kind": kind, "config": config, "device": device, "threads": cell.threads, "weights": weights}


def crashed(message: str) -> Outcome:
    """The outcome of a worker that is gone."""
    error = {"type": "crash", "message": message}
    return {"status": "crashed", "figures": {}, "metrics": [], "files": {}, "error": error}


def work(job: Work) -> Outcome:
    """Do one piece of work.

    What leaves this process unfit for more passes through, and ends the worker: a terminated training, and a
    broken CUDA context.
    """
    from linattn_cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, describe_error

    metrics: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    started = time.perf_counter()
    try:
        figures = _probe(job) if job["kind"] == "probe" else _train(job, metrics, files)
    except Exception as error:
        failure = describe_error(error)
        if failure.exit_code in (EXIT_INTERRUPTED, EXIT_TERMINATED) or "CUDA error" in failure.message:
            raise
        status = "diverged" if failure.exit_code == EXIT_FAILED and failure.kind == "non_finite" else "failed"
        figures = {"wall_s": time.perf_counter() - started, "device": job["device"]}
        return {
            "status": status,
            "figures": figures,
            "metrics": metrics,
            "files": {},
            "error": {"type": failure.kind, "message": failure.message},
        }
    finally:
        _clean_up()
    figures["wall_s"] = time.perf_counter() - started
    return {"status": "finished", "figures": figures, "metrics": metrics, "files": files, "error": None}


def _prepare(job: Work) -> tuple[RunConfig, torch.device]:
    import torch

    from linattn_cli import environment, own_mixer
    from linattn_cli.settings import RunConfig

    torch.set_num_threads(job["threads"])
    name = job["config"]["model"]["name"]
    if own_mixer.is_own(name):
        own_mixer.allow(name)  # whoever gave the job was allowed to
    config = RunConfig.model_validate(job["config"])
    device = environment.resolve_device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    environment.resolve_dtype(config.train.dtype, device)
    return config, device


def _train(job: Work, metrics: list[dict[str, Any]], files: dict[str, bytes]) -> dict[str, Any]:
    import torch

    from linattn_cli import environment, experiment
    from linattn_cli.cuda_graph import RECORDING
    from linattn_cli.kernels.dispatch import impl_that_ran, turns_to_chunk
    from linattn_cli.training import Trainer

    config, device = _prepare(job)
    impl, turns = experiment.impl_of(config, device), turns_to_chunk()
    # Only the last checkpoint is of use here, and only where it was asked for.
    settings = config.train.model_copy(update={"checkpoint_every": config.train.steps})
    with tempfile.TemporaryDirectory(prefix="linattn-cell-") as folder:
        run = RunFolder(Path(folder)) if job["weights"] else None
        with RECORDING:
            task, model = experiment.build(config)
            trainer = Trainer(model, task, settings, seed=config.seed, device=device, run=run, on_row=metrics.append)
        ended = trainer.train()
        kept = (path for path in Path(folder, CHECKPOINTS).rglob("*") if path.is_file())
        files.update({str(path.relative_to(folder)): path.read_bytes() for path in kept})

    last = ended.row
    with RECORDING:
        if "validation_accuracy" in last and last["step"] == ended.step:
            validation = {key: last[key] for key in ("validation_accuracy", "validation_loss")}
        else:
            found = _judge(model, task, config, device, "validation").figures()
            validation = {"validation_accuracy": found["accuracy"], "validation_loss": found["loss"]}
        test = _judge(model, task, config, device, "test").figures()
        state_bytes = _state_bytes(model, task, config, device)
    return {
        **{key: test[key] for key in ("accuracy", "loss", "exact_sequence_accuracy")},
        **validation,
        **task.chance(),
        "parameters": model.parameter_count(),
        "state_bytes": state_bytes,
        "steps": ended.step,
        "stopped_by": ended.stopped,
        "train_s": ended.train_s,
        "tokens_per_s": ended.tokens_per_s,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else environment.cpu_name(),
        "impl": impl_that_ran(impl, turns),
        "fingerprint": task.fingerprint(config.seed),
    }


def _judge(
    model: Any, task: Any, config: RunConfig, device: torch.device, stream: str, *, examples: int | None = None
) -> Evaluation:
    """What the model answers on a stream of the task, by default on as many examples as the recipe says."""
    from linattn_cli.evaluation import evaluate

    return evaluate(
        model,
        task,
        examples=examples or config.train.eval_examples,
        seed=config.seed,
        stream=stream,
        device=device,
        dtype=config.train.dtype,
    )


def _state_bytes(model: Any, task: Any, config: RunConfig, device: torch.device) -> int | None:
    """Bytes of state after one sequence, measured; None for a layer of the user's own that carries none."""
    import torch

    if not model.carries_state:
        return None

    from linattn_cli.evaluation import precision, to_device

    tokens_BT = to_device(task.batch(1, seed=config.seed, stream="test", index=0).inputs, device)
    model.eval()
    with torch.no_grad(), precision(device, config.train.dtype):
        _, state = model(tokens_BT, return_state=True)
    return model.state_bytes(state)


def _probe(job: Work) -> dict[str, Any]:
    """Seconds of a training step and of judging an example, after the first calls are over."""

    from linattn_cli import experiment
    from linattn_cli.cuda_graph import RECORDING, wait_for_stream
    from linattn_cli.training import Trainer

    config, device = _prepare(job)
    steps = 2 * PROBE_STEPS
    settings = config.train.model_copy(
        update={"steps": steps, "log_every": steps, "eval_every": 0, "target_accuracy": None, "warmup_steps": 1}
    )
    times = []

    def note(step: int) -> None:
        wait_for_stream(device)
        times.append(time.perf_counter())

    with RECORDING:
        task, model = experiment.build(config)
        trainer = Trainer(model, task, settings, seed=config.seed, device=device, on_step=note)
    trainer.train()
    step_s = (times[-1] - times[PROBE_STEPS - 1]) / PROBE_STEPS
    examples = min(64, config.train.eval_examples)
    started = time.perf_counter()
    with RECORDING:  # the wait for it counts: a sweep waits too
        _judge(model, task, config, device, "validation", examples=examples)
    return {"step_s": step_s, "example_s": (time.perf_counter() - started) / examples}


def _clean_up() -> None:
    """Give memory back between cells: other processes share the GPU."""
    torch = sys.modules.get("torch")
    if torch is None:
        return

    from linattn_cli.cuda_graph import RECORDING

    with RECORDING:
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
