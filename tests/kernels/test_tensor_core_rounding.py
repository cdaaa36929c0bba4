"""Float32 products on tensor cores that cut off their sums, as Hopper's do, without a GPU.

Triton's interpreter multiplies in float32. Here `exact_dot` takes the way it takes on a GPU: the parts that bfloat16
holds are multiplied 16 terms at a time, and each partial sum loses what does not fit into float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from linattn_cli.compare import compare
from tests.kernels.on_triton import GPU, kernels_imported

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton has no wheel for this system")
with kernels_imported():
    from linattn_cli.kernels import triton_common
    from linattn_cli.kernels.delta import triton_forward
    from linattn_cli.kernels.delta.api import delta_scan

pytestmark = pytest.mark.skipif(GPU, reason="a GPU shows it itself: linattn verify-scan")
TOKENS = 2048


def cut(x: np.ndarray) -> np.ndarray:
    """Float64 to float32, toward zero."""
    nearest = x.astype(np.float32)
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)


def create_dot(self: Any, a: Any, b: Any, c: Any, *_: Any) -> Any:
    total = c.data.astype(np.float64)
    for k in range(0, a.data.shape[-1], 16):
        product = a.data[..., k : k + 16].astype(np.float64) @ b.data[..., k : k + 16, :].astype(np.float64)
        total = cut(product + total).astype(np.float64)
    return interpreter.TensorHandle(total.astype(np.float32), c.dtype.scalar)


def split(b_x: Any, ROUNDED: bool) -> list[Any]:
    """What `triton_common.split` does, on float32 tensors: the interpreter has no bfloat16."""
    rest, parts = torch.from_numpy(np.ascontiguousarray(b_x.handle.data)), []
    for _ in range(3):
        part = rest.bfloat16().float() if ROUNDED else (rest.view(torch.int32) & -65536).view(torch.float32)
        rest = rest - part
        parts.append(interpreter.tl.core.tensor(interpreter.TensorHandle(part.numpy(), b_x.dtype.scalar), b_x.type))
    return parts


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(triton_common, "split", split)
    monkeypatch.setattr(triton_common, "INTERPRETED", False)


def scan(dtype: torch.dtype, impl: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, p, a, v = (torch.randn(1, TOKENS, 1, 20, generator=generator) for _ in range(4))
    p = normalize(p, dim=-1)
    a = normalize(p + 0.3 * a, dim=-1)  # near p, or the state grows without bounds
    return delta_scan(*(x.to(dtype) for x in (q, p, a, v)), impl=impl).o


def share() -> float:
    """The root mean square error of the kernels over that of a serial run."""
    exact = scan(torch.float64, "reference")
    kernels = compare(scan(torch.float32, "triton"), exact, dtype=torch.float32).rms_ratio
    serial = compare(scan(torch.float32, "reference"), exact, dtype=torch.float32).rms_ratio
    assert kernels is not None
    assert serial is not None
    return kernels / serial


def test_a_scan_that_forgets_nothing_errs_no_more_than_the_serial_recurrence(tensor_cores: None) -> None:
    assert share() < 1


def test_it_would_if_sums_were_left_to_tensor_cores(tensor_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = triton_common.exact_dot
    for module in (triton_common, triton_forward):
        monkeypatch.setattr(module, "exact_dot", lambda a, b, ROUNDED=False: rounded(a, b))
    assert share() > 2
