"""Kernels that record what Triton would do with them, where there is no GPU."""

from __future__ import annotations

import pytest
import triton

from tests.kernels.on_triton import kernels_imported

with kernels_imported():
    from linattn_cli.kernels.launch import launch
    from linattn_cli.kernels.operator_triton import Operator

side_by_side = pytest.mark.skipif(
    not hasattr(triton, "AsyncCompileMode"), reason="before Triton 3.5 kernels compile one by one"
)


class Kernel:
    """What `launch` uses of a kernel of Triton's; `log` hears of everything."""

    arg_names = ("p_x", "SIZE")
    specialised = ()
    module = "on the GPU"

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def warmup(self, *_, **__):
        self.log.append(f"compile {self.name}")
        return self

    def result(self):
        return self

    @property
    def run(self):
        self.log.append(f"load {self.name}")

    def __getitem__(self, grid):
        def first_launch(*_, **__):
            self.log.append(f"launch {self.name}")
            return {(*grid, 1, 1)[:3]: lambda *_: self.log.append(f"launch {self.name}")}

        return first_launch


def launches(kernels, x, size=1):
    for kernel in kernels:
        launch(kernel, (2,), x, SIZE=size, num_warps=4)
    return "done"


def doubled(ahead: Kernel, back: Kernel) -> Operator:
    """An operator that doubles, of a kernel forward and one backward."""

    def forward(x):
        launches([ahead], x)
        return 2 * x, x

    def gradient(upstream, x):
        launches([back], x)
        return 2 * upstream

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    def backward(gradient, ctx, d_o, d_state):
        assert d_state is None
        return gradient(d_o, *ctx.saved_tensors)

    traced = type("Traced", (), {"register_autograd": lambda *_, **__: None})()
    return Operator(forward, traced, setup, backward, gradient, None)
