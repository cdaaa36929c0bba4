"""The training loop on a stand-in model of one layer: what is learnt, kept, repeated and refused."""

import os
import signal

import pytest
import torch
from torch import nn

from linattn_cli import checkpoints
from linattn_cli.output import CliError
from linattn_cli.runs import RunFolder, read_metrics
from linattn_cli.settings import TrainConfig
from linattn_cli.tasks import make_task
from linattn_cli.training import TIMING_KEYS, Trainer, learning_rate

CPU = torch.device("cpu")
TASK = make_task("copy", {"seq_len": 3, "vocab_size": 6})


class Bag(nn.Module):
    """Embeds tokens by position and reads the flattened sequence so far: enough to copy three tokens."""

    def __init__(self, task=TASK):
        super().__init__()
        self.length = task.input_len
        self.embed = nn.Embedding(task.vocab_size, 16)
        self.mix = nn.Linear(16 * self.length, 64)
        self.head = nn.Linear(64, task.vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        at = torch.arange(self.length)
        seen = x[:, None] * (at[None, :, None] >= at[None, None, :])[..., None]
        return self.head(torch.relu(self.mix(seen.flatten(2)) + at[:, None]))


class Poisoned(Bag):
    """Not finite on the training batch of one step, in the way a subclass says."""

    step = 7

    def __init__(self):
        super().__init__()
        batch = TASK.batch(8, seed=0, stream="train", index=self.step)
        self.poison = torch.from_numpy(batch.inputs)

    def is_struck(self, tokens):
        return tokens.shape == self.poison.shape and torch.equal(tokens, self.poison)


class BadOutput(Poisoned):
    def forward(self, tokens):
        out = super().forward(tokens)
        return self.norm(out, tokens)

    def __init__(self):
        super().__init__()
        self.norm = Striker(self.is_struck)


class Striker(nn.Module):
    def __init__(self, is_struck):
        super().__init__()
        self.is_struck = is_struck

    def forward(self, x, tokens):
        return x * float("nan") if self.is_struck(tokens) else x


class BadGradient(Poisoned):
    def forward(self, tokens):
        out = super().forward(tokens)
        if self.is_struck(tokens):
            out = out + (self.mix.weight - self.mix.weight.detach()).sum().abs().sqrt()
        return out


class BadFactor(Poisoned):
    """A factorisation refuses what is not finite before there is a loss."""

    def forward(self, tokens):
        out = super().forward(tokens)
        struck = float("nan") if self.is_struck(tokens) else 1.0
        return out * torch.linalg.cholesky(struck * torch.eye(2)).sum() / 2


def make(model=Bag, run=None, on_step=None, **settings):
    torch.manual_seed(0)
    defaults = {"steps": 12, "batch_size": 8, "warmup_steps": 2, "lr": 1e-2, "log_every": 1}
    return Trainer(
        model(),
        TASK,
        TrainConfig(**(defaults | settings)),
        seed=0,
        device=CPU,
        run=run,
        on_step=on_step,
    )


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", stem="x") as folder:
        folder.write_recipe("seed: 0\n")
        yield folder


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def deterministic(path):
    return [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in read_metrics(path)]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_the_schedule_warms_up_and_ends_near_zero():
    settings = TrainConfig(steps=1000, lr=2.0, warmup_steps=100)
    rates = [learning_rate(step, settings) for step in range(1000)]
    assert rates[0] == pytest.approx(0.02)
    assert rates[99] == rates[100] == 2.0
    assert rates[550] == pytest.approx(1.0)
    assert rates[999] < 1e-5
    assert max(rates) == 2.0
    assert rates[100:] == sorted(rates[100:], reverse=True)


def test_it_learns_and_stops_at_the_target(run):
    trainer = make(run=run, steps=2000, eval_every=25, eval_examples=128, target_accuracy=0.95, batch_size=32)
    outcome = trainer.train()
    assert outcome.stopped == "target_accuracy"
    assert outcome.step < 2000
    assert outcome.row["validation_accuracy"] >= 0.95
    assert checkpoints.list_steps(run.path)[-1] == outcome.step
    assert outcome.tokens == outcome.step * 32 * TASK.input_len
    rows = read_metrics(run.path)
    assert rows[0]["loss"] > 1.0 > rows[-1]["loss"]
    assert {"step", "loss", "lr", "grad_norm", "accuracy", "tokens_per_s", "elapsed_s"} <= rows[0].keys()

    again = make(steps=2000, eval_every=25, target_accuracy=0.95, batch_size=32)
    again.restore(checkpoints.load(run.path), rows[-1])
    assert again.train().step == outcome.step


@pytest.mark.parametrize("cut", [4, 5])
def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(run, tmp_path, cut):
    with RunFolder.create(tmp_path / "whole", stem="x") as whole_run:
        whole = make(run=whole_run, checkpoint_every=cut, eval_every=3, eval_examples=16)
        whole.train()

    class Crash(Exception):
        pass

    def crash(step):
        if step == cut + 2:
            raise Crash

    with pytest.raises(Crash):
        make(run=run, on_step=crash, checkpoint_every=cut, eval_every=3, eval_examples=16).train()
    assert run.cut_metrics(cut) == 2
    torch.manual_seed(99)
    resumed = make(run=run, checkpoint_every=cut, eval_every=3, eval_examples=16)
    resumed.restore(checkpoints.load(run.path))
    assert resumed.step == cut
    resumed.train()
    assert deterministic(run.path) == deterministic(whole_run.path)
    assert len(deterministic(run.path)) == 12
    assert_same(weights(resumed), weights(whole))


def test_a_resumed_run_uses_as_many_threads_as_before(run):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        make(run=run, steps=2).train()
        torch.set_num_threads(2)
        make(steps=2).restore(checkpoints.load(run.path))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_checkpoint_of_another_model_is_refused(run):
    make(run=run).train()

    class Wider(Bag):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(16 * self.length, 32)

    with pytest.raises(CliError, match="does not fit this recipe") as caught:
        make(Wider).restore(checkpoints.load(run.path))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        (BadOutput, "output of norm"),
        (BadGradient, "gradient of mix.weight"),
        (BadFactor, "a factorisation inside the model"),
    ],
)
@pytest.mark.parametrize("checkpoint_every", [3, 500])
def test_a_step_that_is_not_finite_is_named_and_the_weights_before_it_kept(run, model, culprit, checkpoint_every):
    with pytest.raises(CliError, match=f"not finite at step 8: first in {culprit}") as caught:
        make(model, run=run, checkpoint_every=checkpoint_every).train()
    assert caught.value.exit_code == 1
    assert "step 7 is kept" in caught.value.message
    assert "--lr" in caught.value.hint
    kept = checkpoints.load(run.path)
    assert kept.step == 7
    good = make(steps=12, on_step=None)
    for _ in range(7):
        good._step()
    assert_same(kept.model, weights(good))
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_gpu_is_not_asked_every_step_and_still_keeps_the_last_good_weights(run, monkeypatch):
    """On a GPU the bad step is noticed only at the next logged one; the updates between must be skipped."""
    trainer = make(BadOutput, run=run, log_every=10)
    asked = []
    real = trainer._require_finite
    # What a GPU run does: `_require_finite` is called only where something is written.
    monkeypatch.setattr(
        trainer, "_require_finite", lambda: real() if trainer.step in (1, 10) else asked.append(trainer.step)
    )
    with pytest.raises(CliError, match="not finite at step 8: first in output of norm"):
        trainer.train()
    assert asked == [2, 3, 4, 5, 6, 7, 8, 9]
    good = make()
    for _ in range(7):
        good._step()
    kept = checkpoints.load(run.path)
    assert kept.step == 7
    assert_same(kept.model, weights(good))
    for mine, theirs in zip(
        kept.state["optimizer"]["state"].values(), good.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert_same(mine, theirs)


def test_weights_that_are_not_finite_are_never_saved(run):
    trainer = make(run=run, checkpoint_every=2)

    def ruin(step):
        if step == 5:
            with torch.no_grad():
                trainer.model.mix.bias[0] = float("inf")

    trainer.on_step = ruin
    with pytest.raises(CliError, match=r"at step 6: first in parameter mix\.bias; .* step 4 is kept"):
        trainer.train()
    assert checkpoints.list_steps(run.path) == [2, 4]


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "SIGINT")])
def test_a_signal_saves_a_checkpoint_first(run, number, code, name):
    before = signal.getsignal(number)

    def send(step):
        if step == 4:
            os.kill(os.getpid(), number)

    with pytest.raises(CliError, match=f"{name} at step 5: a checkpoint is saved") as caught:
        make(run=run, on_step=send).train()
    assert caught.value.exit_code == code
    assert f"--resume --out {run.path}" in caught.value.hint
    assert checkpoints.list_steps(run.path) == [5]
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait(run):
    def send(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make(run=run, on_step=send).train()


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)],
)
def test_bfloat16_is_autocast_over_float32_weights(dtype, weight):
    seen = []

    class Watching(Bag):
        def forward(self, tokens):
            out = super().forward(tokens)
            seen.append(out.dtype)
            return out

    trainer = make(Watching, dtype=dtype, steps=2)
    trainer.train()
    assert seen == [getattr(torch, dtype)] * 2
    assert {p.dtype for p in trainer.parameters} == {weight}
    states = trainer.optimizer.state_dict()["state"].values()
    assert {state["exp_avg"].dtype for state in states} == {weight}


def test_without_a_run_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = []
    trainer = make(steps=3, checkpoint_every=1)
    trainer.on_row = rows.append
    trainer.train()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == []


def test_no_clipping_is_zero():
    clipped, free = make(steps=1, grad_clip=1e-3), make(steps=1, grad_clip=0.0)
    clipped.train()
    free.train()
    norms = [float(nn.utils.get_total_norm([p.grad for p in t.parameters])) for t in (clipped, free)]
    assert norms[0] == pytest.approx(1e-3, rel=1e-4)
    assert norms[1] > 0.1
