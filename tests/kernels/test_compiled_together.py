"""Kernels that are not compiled yet are found by a rehearsal and compiled before the first launch.

There is no GPU here: what Triton would do is recorded instead.
"""

from __future__ import annotations

import pytest
import torch

from linattn_cli.kernels import dispatch
from tests.kernels.on_triton import kernels_imported
from tests.kernels.recorded_kernels import Kernel, doubled, launches, side_by_side

with kernels_imported():
    from linattn_cli.kernels.launch import compiled_together, launch


def pair(name: str, log: list[str]) -> tuple[Kernel, Kernel]:
    """A kernel of a forward and that of its backward."""
    return Kernel(name, log), Kernel(f"{name}'", log)


@side_by_side
def test_every_missing_kernel_is_compiled_before_the_first_launch(on_a_gpu) -> None:
    log: list[str] = []
    kernels, x = [Kernel("a", log), Kernel("b", log)], torch.zeros(4)
    assert compiled_together(launches, kernels, x) == "done"
    assert log[:2] == ["compile a", "compile b"]
    assert sorted(log[2:4]) == ["load a", "load b"]
    assert log[4:] == ["launch a", "launch b"]
    log.clear()
    assert compiled_together(launches, kernels, x) == "done"
    assert log == ["launch a", "launch b"]


def test_a_kernel_is_compiled_once_fusing_and_once_not(on_a_gpu) -> None:
    asked: list[bool] = []

    class Recorder(Kernel):
        def __getitem__(self, grid):
            def first_launch(*_, enable_fp_fusion: bool, **__):
                asked.append(enable_fp_fusion)
                return {(*grid, 1, 1)[:3]: lambda *_: None}

            return first_launch

    kernel, x = Recorder("a", []), torch.zeros(4)
    for fused in (True, False, True, False):
        launch(kernel, (2,), x, SIZE=1, num_warps=4, fused=fused)
    assert asked == [True, False]


@side_by_side
def test_only_what_is_missing_is_compiled(on_a_gpu) -> None:
    log: list[str] = []
    kernels, x = [Kernel("a", log), Kernel("b", log)], torch.zeros(4)
    launches(kernels[:1], x)
    log.clear()
    compiled_together(launches, kernels, x)
    assert log == ["launch a", "compile b", "load b", "launch a", "launch b"]


@side_by_side
def test_a_fault_of_the_rehearsal_is_left_to_the_run(on_a_gpu) -> None:
    log: list[str] = []
    kernel, x = Kernel("a", log), torch.zeros(4)
    runs = iter((None, "the results are not filled", None))

    def run():
        fault = next(runs)
        launches([kernel], x)
        if fault:
            raise ArithmeticError(fault)
        return "done"

    assert compiled_together(run) == "done"
    assert log == ["compile a", "load a", "launch a"]

    def broken():
        launches([kernel], x)
        raise ArithmeticError("the inputs are wrong")

    with pytest.raises(ArithmeticError, match="inputs are wrong"):
        compiled_together(broken)
    launches([Kernel("c", log)], x)  # and nothing is left of the stage
    assert log[-1] == "launch c"


@side_by_side
def test_a_forward_of_training_compiles_its_backward_too(on_a_gpu) -> None:
    log: list[str] = []
    operator, x = doubled(*pair("a", log)), torch.ones(4, requires_grad=True)
    o, _ = operator(x)
    assert log[:2] == ["compile a", "compile a'"]
    assert log[4:] == ["launch a"]
    o.sum().backward()
    assert log[5:] == ["launch a'"]
    assert x.grad.tolist() == [2.0] * 4


@side_by_side
def test_without_a_gradient_only_the_forward_is_compiled(on_a_gpu) -> None:
    log: list[str] = []
    doubled(*pair("a", log))(torch.ones(4))
    assert log == ["compile a", "load a", "launch a"]


@side_by_side
@pytest.mark.parametrize("named", [False, True])
def test_a_form_compiles_the_kernels_of_all_its_operators(on_a_gpu, monkeypatch, named) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    log: list[str] = []
    first, second = doubled(*pair("a", log)), doubled(*pair("b", log))

    @dispatch.runs_kernels
    def form(x, *, scale):
        return second(first(x)[0])[0] * scale

    x = torch.ones(4, requires_grad=True)
    (form(scale=3.0, x=x) if named else form(x, scale=3.0)).sum().backward()
    assert log[:4] == ["compile a", "compile a'", "compile b", "compile b'"]
    assert log[8:] == ["launch a", "launch b", "launch b'", "launch a'"]
    assert x.grad.tolist() == [12.0] * 4
