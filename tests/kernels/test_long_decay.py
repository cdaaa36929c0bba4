"""The gradient of a log-decay over many tokens: its rounding must not grow with their number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tests.kernels.on_triton import DEVICE, EPS, kernels_imported

with kernels_imported():
    from linattn_cli.kernels.delta.reference import delta_scan_reference
    from linattn_cli.kernels.delta.triton import delta_scan_triton
    from linattn_cli.kernels.linear.reference import linear_scan_reference
    from linattn_cli.kernels.linear.triton import linear_scan_triton

SCANS = {"linear": (linear_scan_reference, linear_scan_triton), "delta": (delta_scan_reference, delta_scan_triton)}


pytestmark = pytest.mark.usefixtures("interpreter")


def log_decay_gradient(scan, tensors: dict[str, Tensor], dtype: torch.dtype, weight: Tensor, **options) -> Tensor:
    inputs = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
    o = scan(**inputs, initial_state=None, reverse=False, **options)[0]
    return torch.autograd.grad(o, inputs["log_decay"], weight.to(dtype))[0].double()


@pytest.mark.parametrize("name", SCANS)
def test_rounding_of_the_log_decay_gradient_does_not_grow_with_length(name: str) -> None:
    # Eight sequences are enough for a super-chunk of the whole length, were it not for the rule under test.
    torch.manual_seed(0)
    B, T, H, K = 1, 1024, 8, 16
    q, k, v, weight = (torch.randn(B, T, H, K, device=DEVICE) for _ in range(4))
    tensors = {"q": q, "v": v, "log_decay": logsigmoid(torch.randn(B, T, H, device=DEVICE) + 4)}
    tensors |= {"k": k} if name == "linear" else {"p": normalize(k, dim=-1), "a": normalize(k, dim=-1) / 2}
    options = {"exclusive": False} if name == "linear" else {"return_residual": False}
    serial, triton = SCANS[name]
    exact = log_decay_gradient(serial, tensors, torch.float64, weight, **options)
    error, allowed = (
        (log_decay_gradient(scan, tensors, torch.float32, weight, **options, **more) - exact).square().mean().sqrt()
        for scan, more in ((triton, {"chunk_size": None}), (serial, {}))
    )
    assert error <= 2 * allowed + 4 * EPS * exact.square().mean().sqrt()
