"""What the tests of the fused operators share: counting calls, drawing tensors, gradients, and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from linattn_cli.compare import budget, compare
from tests.kernels.on_triton import DEVICE, compile_one_by_one

SYMMETRIC = ("mass", "inverse")


def count_calls(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[int]:
    """The lengths of the calls that the operator `name` of a module makes from now on."""
    compile_one_by_one(monkeypatch)
    calls: list[int] = []
    run = getattr(module, name)

    def counted(q: Tensor, *tensors: Any, **options: Any) -> Any:
        calls.append(q.shape[1])
        return run(q, *tensors, **options)

    monkeypatch.setattr(module, name, counted)
    return calls


def normals() -> Callable[..., Tensor]:
    """Draws of one seeded stream, by shape."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def with_gradients(
    results: dict[str, Tensor], held: dict[str, Tensor], *, allow_unused: bool = False
) -> dict[str, Tensor]:
    """The results, and the gradients of everything held under a fixed random upstream on all of them."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(iter(held.values())).dtype
    loss = torch.zeros((), dtype=dtype, device=DEVICE)
    for name, y in results.items():
        upstream = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        if name in SYMMETRIC:
            upstream = upstream + upstream.mT
        loss = loss + (y * upstream.to(DEVICE, dtype)).sum()
    grads = torch.autograd.grad(loss, list(held.values()), allow_unused=allow_unused)
    gradients = {f"d_{name}": grad for name, grad in zip(held, grads, strict=True) if grad is not None}
    return {name: y.detach() for name, y in (results | gradients).items()}


def check_outputs(outputs: Callable[..., dict[str, Tensor]], x: dict[str, Tensor], **options: Any) -> None:
    """`outputs(x, impl, dtype)` of the kernels against the serial form in float64, within the budget of float32."""
    exact = outputs(x, "reference", torch.float64, **options)
    serial = outputs(x, "reference", torch.float32, **options)
    ours = outputs(x, "triton", torch.float32, **options)
    assert set(ours) == set(exact)
    if "clamped" in exact:
        assert int(ours.pop("clamped")) == int(exact.pop("clamped"))
    for name, truth in exact.items():
        gradient = name.startswith("d_")
        allowed = budget(torch.float32, compare(serial[name], truth, dtype=torch.float32), gradient=gradient)
        found = compare(ours[name], truth, dtype=torch.float32)
        assert allowed.allows(found), f"{name}: {found}, allowed {allowed}"
