"""Kernels that need more shared memory than the GPU has: one stage less, then the chunk form, or an error.

There is no GPU here: what Triton would do is recorded instead.
"""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

from linattn_cli.cuda_graph import EAGER_STEPS, RecordedStep
from linattn_cli.kernels import dispatch
from linattn_cli.kernels.faults import DoesNotFit
from linattn_cli.output import describe_error
from tests.kernels.on_triton import kernels_imported
from tests.kernels.recorded_kernels import Kernel, doubled, launches, side_by_side

with kernels_imported():
    from triton.runtime.errors import OutOfResources

    from linattn_cli.kernels.launch import compiled_together


class Large(Kernel):
    """A kernel that fits with no more than `stages` pipeline stages. Like Triton's, it says that it does not once, and
    then gives what says so again."""

    def __init__(self, name: str, log: list[str], stages: int) -> None:
        super().__init__(name, log)
        self.stages = stages
        self.compiled: dict[int, _Compiled] = {}

    def compile(self, num_stages: int) -> _Compiled:
        return self.compiled.setdefault(num_stages, _Compiled(self, num_stages))

    def warmup(self, *_, num_stages: int, **__):
        self.log.append(f"compile {self.name} in {num_stages}")
        return self.compile(num_stages)

    def __getitem__(self, grid):
        def first_launch(*_, num_stages: int, **__):
            compiled = self.compile(num_stages)
            compiled.run()
            self.log.append(f"launch {self.name} in {num_stages}")
            return compiled

        return first_launch


class _Compiled:
    def __init__(self, kernel: Large, num_stages: int) -> None:
        self.kernel, self.num_stages, self.module, self.refused = kernel, num_stages, None, False

    @property
    def run(self):
        if self.num_stages <= self.kernel.stages:
            self.module = "on the GPU"
            return lambda: None
        if not self.refused:
            self.refused = True
            self._refuse()
        return self._refuse

    def _refuse(self):
        raise OutOfResources(100_000 * self.num_stages, 99_000, "shared memory")

    def __getitem__(self, grid):
        return lambda *_: self.kernel.log.append(f"launch {self.kernel.name} in {self.num_stages}")


@pytest.fixture(autouse=True)
def nothing_fell_back(monkeypatch, on_a_gpu):
    monkeypatch.setattr(dispatch, "_fell_back", set())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))


def test_one_stage_is_taken_where_two_do_not_fit() -> None:
    log: list[str] = []
    launches([kernel := Large("a", log, stages=1)], torch.zeros(4))
    launches([kernel], torch.zeros(4))
    assert log == ["launch a in 1"] * 2


@side_by_side
def test_one_stage_is_taken_in_a_rehearsal_too() -> None:
    log: list[str] = []
    compiled_together(launches, [Large("a", log, stages=2), Large("b", log, stages=1)], torch.zeros(4))
    assert log == ["compile a in 2", "compile b in 2", "compile b in 1", "launch a in 2", "launch b in 1"]


@side_by_side
@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_kernels_are_compiled_for_the_tensors_at_hand_without_holding_them(start) -> None:
    seen = []

    class Looking(Large):
        def warmup(self, x, **options):
            seen.append((x.dtype, x.data_ptr() % 16, isinstance(x, torch.Tensor)))
            return super().warmup(x, **options)

    x = torch.zeros(9, dtype=torch.bfloat16)[start:]
    compiled_together(launches, [Looking("a", [], stages=1)], x)
    assert seen == [(torch.bfloat16, x.data_ptr() % 16, False)] * 2


def test_a_kernel_that_never_fits_is_named_by_what_it_needs() -> None:
    with pytest.raises(DoesNotFit, match=r"needs 100,000 bytes of shared memory and the GPU has 99,000"):
        launches([Large("a", [], stages=0)], torch.zeros(4))


def form_of(*kernels: Kernel):
    """A form that doubles: by its kernels, or as `chunk` without."""

    @dispatch.runs_kernels
    def form(x, *, impl="auto"):
        return 2 * x if impl == "chunk" else (launches(kernels, x), 2 * x)[1]

    return form


def test_auto_means_chunk_from_then_on_and_says_so_once() -> None:
    log: list[str] = []
    form, x = form_of(Kernel("a", log), Large("b", log, stages=0)), torch.ones(4)
    before = dispatch.turns_to_chunk()
    with pytest.warns(RuntimeWarning, match=r"form runs as impl='chunk': a kernel needs 100,000 bytes"):
        assert form(x).tolist() == [2.0] * 4
    log.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert form(x).tolist() == form(x=x, impl="auto").tolist() == [2.0] * 4
    assert log == []
    assert dispatch.turns_to_chunk() == before + 3


def test_other_dimensions_are_tried_anew() -> None:
    form, x = form_of(Large("a", [], stages=0)), torch.ones(1, 1, 1, 4)
    with pytest.warns(RuntimeWarning):
        form(x)
    with pytest.warns(RuntimeWarning):
        form(torch.ones(1, 1, 1, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        form(torch.ones(1, 9, 1, 4))


def test_triton_by_name_is_an_error_every_time() -> None:
    form, before = form_of(Large("a", [], stages=0)), dispatch.turns_to_chunk()
    for _ in range(2):
        with pytest.raises(DoesNotFit, match="impl triton was asked for, but a kernel needs") as refused:
            form(torch.ones(4), impl="triton")
    failure = describe_error(refused.value)
    assert (failure.exit_code, failure.hint) == (3, "use --impl chunk, or --impl auto")
    assert dispatch.turns_to_chunk() == before


@side_by_side
def test_a_backward_that_does_not_fit_is_known_before_its_forward_runs() -> None:
    log: list[str] = []
    operator = doubled(Kernel("a", log), Large("a'", log, stages=0))

    @dispatch.runs_kernels
    def form(x, *, impl="auto"):
        return 2 * x if impl == "chunk" else operator(x)[0]

    x = torch.ones(4, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="form runs as impl='chunk'"):
        form(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 4
    assert not [line for line in log if line.startswith("launch")]


def test_a_training_step_that_fell_back_is_not_recorded(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(RecordedStep, "_record", lambda *_: pytest.fail("recorded"))
    form = form_of(Large("a", [], stages=0))
    step = RecordedStep(form, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(EAGER_STEPS + 2):
            assert step(np.ones(4)).tolist() == [2.0] * 4


def test_a_run_and_its_evaluation_say_what_ran(monkeypatch, capsys, tmp_path) -> None:
    """As on a GPU that the kernels do not fit: triton is chosen, and every call of the mixer turns to chunk."""
    from linattn_cli import environment
    from linattn_cli.app import main
    from linattn_cli.layers import VLA

    monkeypatch.undo()  # tensors are on the CPU here
    mixes = VLA.mix

    def mix(*tensors, **options):
        return dispatch._by_chunk(lambda *x, impl, **others: mixes(*x, **others), *tensors, **options)

    monkeypatch.setattr(environment, "resolve_impl", lambda *_: "triton")
    monkeypatch.setattr(VLA, "mix", mix)
    run = str(tmp_path / "run")
    sizes = ["--set", "model.d_model=8", "--set", "model.heads=1", "--set", "model.ffn=8", "--d-head", "8"]
    train = ["train", *sizes, "--n-pairs", "1", "--steps", "2", "--device", "cpu", "--out", run]
    for words in (train, ["eval", run, "--device", "cpu"]):
        with pytest.raises(SystemExit) as left:
            main([*words, "--json", "--quiet"])
        assert not left.value.code
        assert json.loads(capsys.readouterr().out)["env"]["impl"] == "chunk"
