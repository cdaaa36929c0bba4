"""The bfloat16 paths of the kernels against their budget, without a GPU.

Triton's interpreter has no bfloat16, but tensor cores only round what they multiply: here the kernels run on float32
numbers that bfloat16 holds, every product rounds its operands, and scans hand on rounded outputs and gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linattn_cli.compare import Scale, budget, compare
from linattn_cli.kernels import dispatch
from tests.kernels.on_triton import GPU, kernels_imported

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton has no wheel for this system")
with kernels_imported():
    from linattn_cli.kernels.forms.ahla import ahla
    from linattn_cli.kernels.forms.hla2 import hla2
    from linattn_cli.kernels.forms.hla3 import hla3
    from linattn_cli.kernels.forms.linear import linear_attention
    from linattn_cli.kernels.linear.triton import linear_scan_triton

pytestmark = pytest.mark.skipif(GPU, reason="a GPU has bfloat16 itself: linattn verify-scan")
HALF = torch.bfloat16
TOKENS = 97


def rounded(x: Tensor) -> Tensor:
    return x.to(HALF).float()


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> Tensor:
        return rounded(d_x)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Products round their operands; how many there were."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    builder, count = interpreter.InterpreterBuilder, [0]
    exact = builder.create_dot

    def narrow(handle: Any) -> Any:
        data = rounded(torch.from_numpy(np.ascontiguousarray(handle.data)).float()).numpy()
        return interpreter.TensorHandle(data, handle.dtype)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        count[0] += 1
        return exact(self, narrow(a), narrow(b), *others)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    return count


def scan(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A linear scan whose inputs, output and their gradients are bfloat16 numbers."""
    o, final = linear_scan_triton(*map(Round.apply, (q, k, v)), **options)
    return Round.apply(o), final


def inputs(decay: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 4, "k": 2, "v": 2}
    x = {name: rounded(torch.randn(1, TOKENS, H, 20, generator=generator)) for name, H in heads.items()}
    if decay != "none":
        x["log_decay"] = -0.1 * torch.rand(1, TOKENS, 2, generator=generator)
        x["log_decay"][:, 2::9] = -50.0
    return x


def results(form: Any, x: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    held = {name: y.to(dtype).requires_grad_() for name, y in x.items()}
    o = form(**held, **options).o
    upstream = rounded(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)))
    grads = torch.autograd.grad(o, list(held.values()), upstream.to(dtype))
    return {"o": o.detach()} | dict(zip(held, grads, strict=True))


def check(ours: dict[str, Tensor], truth: dict[str, Tensor], x: dict[str, Tensor]) -> None:
    """Half of what `verify-scan` allows: real tensor cores sum in another order."""
    for name, exact in truth.items():
        scale = Scale.of(exact)
        if name == "log_decay":  # a cancelling sum (MATH.md section 7)
            terms = Scale.of((x["q"].double() * truth["q"]).sum(-1))
            scale = Scale(max(scale.peak, terms.peak), max(scale.rms, terms.rms))
        serial = compare(exact.to(HALF), exact, dtype=HALF, scale=scale)
        allowed = budget(HALF, serial, gradient=name != "o")
        found = compare(ours[name].to(HALF), exact, dtype=HALF, scale=scale)
        assert found.max_error is not None, found.problem
        assert found.max_error <= allowed.max_error / 2, f"{name}: {found}, allowed {allowed}"
        assert found.rms_ratio <= allowed.rms_ratio / 2, f"{name}: {found}, allowed {allowed}"


@pytest.mark.parametrize(
    ("form", "decay"),
    [(hla2, "none"), (hla2, "mask"), (ahla, "none"), (ahla, "cascade"), (hla3, "none"), (hla3, "moment")],
)
def test_nested_scans(form: Any, decay: str, tensor_cores: list[int]) -> None:
    x = inputs(decay)
    truth = results(form, x, torch.float64, decay=decay, impl="reference")
    with dispatch.override("linear_scan", "triton", scan):
        ours = results(form, x, torch.float32, decay=decay, impl="triton")
    assert tensor_cores[0] > 0
    check(ours, truth, x)


def test_linear_attention(tensor_cores: list[int]) -> None:
    x = inputs("none")
    truth = results(linear_attention, x, torch.float64, impl="reference")
    ours = results(linear_attention, x, torch.float32, impl="triton")
    assert tensor_cores[0] > 0
    check(ours, truth, x)
