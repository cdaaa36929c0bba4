"""The training loop: AdamW, warm-up and cosine, and a run that can be killed at any moment and go on.

Everything a step does depends on the saved state and the step number alone: the data come from
(task config, seed, step), the learning rate from the step. So a resumed run repeats, on a CPU bit for bit,
what the unbroken one would have done.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn_cli import checkpoints
from linattn_cli.cuda_graph import RECORDING, RecordedStep, can_record, wait_for_stream
from linattn_cli.diagnosis import first_nonfinite
from linattn_cli.evaluation import Scored, evaluate, score_tensors, scored_positions, to_device
from linattn_cli.output import CliError
from linattn_cli.runs import RunFolder, newer_format, resume_command
from linattn_cli.settings import TrainConfig
from linattn_cli.tasks.types import Task

TIMING_KEYS = ("tokens_per_s", "elapsed_s")
"""Keys of a `metrics.jsonl` line that depend on the machine's mood; all others repeat exactly."""

STATE_VERSION = 1

MOST_THREADS = 1024


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Rate of step 0, 1, ...: linear warm-up to `lr`, then a cosine to zero at `steps`.

    >>> s = TrainConfig(steps=100, lr=1.0, warmup_steps=10)
    >>> [round(learning_rate(step, s), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * ((step + 1) / warmup)
    return settings.lr * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, settings.steps - warmup)))


@dataclass
class Outcome:
    """How training ended.

    step        optimiser steps done
    stopped     `steps` or `target_accuracy`
    train_s     seconds spent in training steps, over all sessions of the run
    tokens      tokens trained on, over all sessions of the run
    row         the last line of metrics
    """

    step: int
    stopped: str
    train_s: float
    tokens: int
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.train_s if self.train_s > 0 else None


class _Worked(NamedTuple):
    """What a step leaves on the device, until the next one overwrites it."""

    scored: Scored
    loss: Tensor
    grad_norm: Tensor


def _threads(saved: Any) -> int:
    """A checkpoint's number of threads; a forged one must not bring the machine down."""
    if not isinstance(saved, int) or not 1 <= saved <= MOST_THREADS:
        raise ValueError(f"threads is {saved!r}, expected 1 to {MOST_THREADS}")
    return saved


class StopSignal:
    """Remembers SIGINT or SIGTERM until the step in progress is over; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Python delivers signals to the main thread only; in others there is nothing to catch.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


class Trainer:
    """One training run of `model` on `task`.

    With `run` it writes metrics and checkpoints; without, it only trains (a cell of a sweep).
    `on_step` hears the step number after every step, `on_row` every line of metrics.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: TrainConfig,
        *,
        seed: int,
        device: torch.device,
        run: RunFolder | None = None,
        on_step: Callable[[int], object] | None = None,
        on_row: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self.model = model.to(device, torch.float64 if settings.dtype == "float64" else torch.float32)
        self.task = task
        self.settings = settings
        self.seed = seed
        self.device = device
        self.run = run
        self.on_step = on_step
        self.on_row = on_row
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # On a GPU the rate and the step number are tensors, so that a recorded step reads the present ones.
        on_gpu = device.type == "cuda"
        self._rate: Tensor | float = torch.tensor(settings.lr, device=device) if on_gpu else settings.lr
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self._rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
            capturable=on_gpu,
        )
        self.step = 0
        self.saved_step: int | None = None
        self.train_s = 0.0
        self._started = 0.0
        self._row: dict[str, Any] = {}
        # Raised by the first bad step and never lowered: the fused AdamW skips its update while this is 1, so
        # the weights stay as they were and a GPU need not be asked after every step.
        self._bad = torch.zeros((), device=device)
        self._bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self._step_number = torch.zeros((), dtype=torch.int64, device=device)
        self.optimizer.found_inf = self._bad  # type: ignore[attr-defined]
        self._recorded: RecordedStep[_Worked] | None = None
        if settings.cuda_graph and can_record(self.model, device):
            self._recorded = RecordedStep(self._work, device)

    def restore(self, checkpoint: checkpoints.Checkpoint, row: dict[str, Any] | None = None) -> None:
        """Go back to what `checkpoint` holds; `row` is the line of metrics of that step, where there is one.

        Raises `CliError` (exit 2) if the checkpoint is of another model.
        """
        version = checkpoint.state.get("version")
        if isinstance(version, int) and version > STATE_VERSION:
            raise newer_format(checkpoint.path, "", version, STATE_VERSION)
        try:
            self.model.load_state_dict(checkpoint.model)
            self._load_optimizer(checkpoint.state["optimizer"])
            torch.set_rng_state(checkpoint.state["rng"]["cpu"])
            if self.device.type == "cuda" and "cuda" in checkpoint.state["rng"]:
                torch.cuda.set_rng_state(checkpoint.state["rng"]["cuda"], self.device)
            # Sums split over another number of threads round differently.
            torch.set_num_threads(_threads(checkpoint.state["threads"]))
            self.train_s = float(checkpoint.state["train_s"])
        except Exception as error:  # torch raises whatever it stumbles over, and a file may hold anything
            reason = " ".join(str(error).split())[:200]
            raise CliError(
                f"checkpoint {checkpoint.path} does not fit this recipe: {reason}",
                hint="resume with the recipe of the run folder",
                kind="checkpoint",
            ) from error
        self.step = self.saved_step = checkpoint.step
        self._row = row or {}

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """The moments of a checkpoint; the settings stay ours, which may be on another device than its were."""
        own = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group.update(settings)

    def save(self) -> None:
        """Write a checkpoint of the present step, unless the last one is of it."""
        if self.run is None or self.saved_step == self.step:
            return
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "version": STATE_VERSION,
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "rng": rng,
            "threads": torch.get_num_threads(),
            "train_s": self.train_s,
        }
        self.run.sync_metrics()
        checkpoints.save(self.run.path, self.step, self.model.state_dict(), state)
        self.saved_step = self.step

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, over all sessions of the run."""
        return self.step * self.settings.batch_size * self.task.input_len

    def train(self) -> Outcome:
        """Train to the last step or the target accuracy.

        Raises `CliError`: exit 1 when the loss or a gradient is not finite (the weights before that step are
        kept as a checkpoint), 130 or 143 when interrupted or terminated (with a checkpoint).
        """
        try:
            return self._train()
        finally:
            if self._recorded is not None:
                self._recorded.release()

    def _train(self) -> Outcome:
        self.model.train()
        logged_tokens, logged_s = self.tokens, self.train_s
        with StopSignal() as stop:
            self._start_clock()
            while self.step < self.settings.steps and not self._reached():
                try:
                    figures = self._step()
                except torch.linalg.LinAlgError:
                    # Factorisations refuse what is not finite before the loss can show it.
                    self._require_finite()
                    raise self._not_finite(self.step) from None
                validate, log, save = self._due()
                signalled = stop.received
                save = save or signalled is not None
                if log or save:
                    self._stop_clock()
                # Asking costs nothing on a CPU; a GPU is asked only when something is written.
                if log or save or self.device.type == "cpu":
                    self._require_finite()
                if log:
                    with RECORDING:
                        row = figures()
                        if validate:
                            row |= self._validate()
                    seconds = self.train_s - logged_s
                    row["tokens_per_s"] = (self.tokens - logged_tokens) / seconds if seconds > 0 else None
                    row["elapsed_s"] = self.train_s
                    logged_tokens, logged_s = self.tokens, self.train_s
                    self._log(row)
                if self.on_step is not None:
                    self.on_step(self.step)
                if save or self._reached():
                    self.save()
                if signalled is not None:
                    raise self._terminated(signalled)
                if log or save:
                    self._start_clock()
        stopped = "target_accuracy" if self._reached() else "steps"
        return Outcome(self.step, stopped, self.train_s, self.tokens, self._row)

    def _reached(self) -> bool:
        """Whether the present step was validated and met the target."""
        target = self.settings.target_accuracy
        known = self._row.get("step") == self.step and "validation_accuracy" in self._row
        return target is not None and known and self._row["validation_accuracy"] >= target

    def _due(self) -> tuple[bool, bool, bool]:
        """Whether to validate, to log and to save after the present step."""
        step, settings = self.step, self.settings
        last = step == settings.steps
        validate = bool(settings.eval_every) and (last or step % settings.eval_every == 0)
        log = validate or last or step == 1 or step % settings.log_every == 0
        return validate, log, last or step % settings.checkpoint_every == 0

    def _start_clock(self) -> None:
        self._started = time.perf_counter()

    def _stop_clock(self) -> None:
        """Add up training time; what validation and the disk take is not part of it."""
        wait_for_stream(self.device)
        self.train_s += time.perf_counter() - self._started

    def _step(self) -> Callable[[], dict[str, Any]]:
        """One optimiser step; returns what reads its figures off the device, which is not free on a GPU."""
        batch = self.task.batch(self.settings.batch_size, seed=self.seed, stream="train", index=self.step)
        arrays = (batch.inputs, *scored_positions(batch))
        rate = learning_rate(self.step, self.settings)
        self._set_rate(rate)
        self._step_number.fill_(self.step)
        if self._recorded is not None:
            worked = self._recorded(*arrays)
        else:
            worked = self._work(*(to_device(array, self.device) for array in arrays))
        self.step += 1
        step = self.step

        def figures() -> dict[str, Any]:
            return {
                "step": step,
                "loss": worked.loss.item(),
                "lr": rate,
                "grad_norm": worked.grad_norm.item(),
                "accuracy": worked.scored.accuracy().item(),
            }

        return figures

    def _set_rate(self, rate: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def _work(self, inputs: Tensor, index: Tensor, labels: Tensor) -> _Worked:
        """What a step does on the device, from a batch to new weights; nothing in it waits for the device."""
        scored = score_tensors(self.model, inputs, index, labels, dtype=self.settings.dtype)
        loss = scored.loss()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self.settings.grad_clip > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.settings.grad_clip, norm)
        bad = ~(torch.isfinite(loss.detach()) & torch.isfinite(norm))
        self._bad_step.copy_(torch.where(bad & (self._bad_step < 0), self._step_number, self._bad_step))
        self._bad.copy_(torch.maximum(self._bad, bad.float()))
        self.optimizer.step()
        # detached: a step must not keep the last one's autograd nodes alive, least of all into a recording
        return _Worked(Scored(scored.logits.detach(), labels), loss.detach(), norm)

    def _validate(self) -> dict[str, float]:
        found = evaluate(
            self.model,
            self.task,
            examples=self.settings.eval_examples,
            seed=self.seed,
            stream="validation",
            device=self.device,
            dtype=self.settings.dtype,
        ).figures()
        return {"validation_accuracy": found["accuracy"], "validation_loss": found["loss"]}

    def _log(self, row: dict[str, Any]) -> None:
        self._row = row
        if self.run is not None:
            self.run.append_metrics(row)
        if self.on_row is not None:
            self.on_row(row)

    def _require_finite(self) -> None:
        bad_step = int(self._bad_step)
        if bad_step >= 0:
            raise self._not_finite(bad_step)

    def _not_finite(self, bad_step: int) -> CliError:
        """The error that names the step and the tensor, with the weights before it kept as a checkpoint."""
        batch = self.task.batch(self.settings.batch_size, seed=self.seed, stream="train", index=bad_step)
        with RECORDING:
            tensor = first_nonfinite(self.model, batch, device=self.device, dtype=self.settings.dtype)
        self.step = bad_step
        if all(bool(torch.isfinite(p).all()) for p in self.parameters):
            # The skipped updates left the weights of the last good step; keep them under that step's number.
            self.save()
        rate = learning_rate(bad_step, self.settings)
        kept = f"; the checkpoint of step {self.saved_step} is kept" if self.saved_step is not None else ""
        return CliError(
            f"training is not finite at step {bad_step + 1}: first in {tensor}{kept}",
            hint=f"the learning rate was {rate:.3g}: try a lower --lr, a longer warm-up or --dtype float32",
            exit_code=1,
            kind="non_finite",
        )

    def _terminated(self, number: int) -> CliError:
        name = signal.Signals(number).name
        saved = "a checkpoint is saved" if self.run is not None else "nothing is saved"
        return CliError(
            f"{name} at step {self.step}: {saved}",
            hint=f"continue: {resume_command(self.run.path)}" if self.run is not None else "",
            exit_code=128 + number,
            kind="interrupted" if number == signal.SIGINT else "terminated",
        )
