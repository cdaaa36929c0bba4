"""A tiny check of every operator here, with the implementation that would run; for `linattn doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn_cli.compare import Comparison, budget, compare
from linattn_cli.kernels import dispatch
from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.penalty import penalty_gain
from linattn_cli.kernels.registry import PRIMITIVES
from linattn_cli.kernels.types import ScanOutput

Operator = Callable[[dict[str, Tensor], str], ScanOutput]

# Two chunks and a bit, and a key dimension that is no power of two: where tails and masks go wrong.
_BATCH, _TOKENS, _HEADS, _KEY, _VALUE = 1, 150, 2, 24, 32


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    decay = -torch.rand(_BATCH, _TOKENS, _HEADS, generator=generator, dtype=torch.float64)
    return {
        "q": normal(_BATCH, _TOKENS, _HEADS, _KEY),
        "k": unit(_BATCH, _TOKENS, _HEADS, _KEY),
        "v": normal(_BATCH, _TOKENS, _HEADS, _VALUE),
        "u": unit(_BATCH, _TOKENS, _HEADS, _KEY),
        "log_decay": 0.1 * decay,
    }


def _linear(x: dict[str, Tensor], impl: str) -> ScanOutput:
    return linear_scan(x["q"], x["k"], x["v"], log_decay=x["log_decay"], impl=impl)


def _delta(x: dict[str, Tensor], impl: str) -> ScanOutput:
    return delta_scan(x["q"], x["k"], x["k"], x["v"], log_decay=x["log_decay"], impl=impl)


def _penalty(x: dict[str, Tensor], impl: str) -> ScanOutput:
    return penalty_gain(x["u"], x["k"], lambda0=1.0, impl=impl)


_OPERATORS: dict[str, tuple[Operator, tuple[str, ...]]] = {
    "linear_scan": (_linear, ("q", "k", "v")),
    "delta_scan": (_delta, ("q", "k", "v")),
    "penalty_gain": (_penalty, ("u", "k")),
}


def check_operators(device: torch.device) -> list[dict[str, Any]]:
    """One row per operator and quantity: float32 here against the float64 reference on the CPU."""
    return [row for name in PRIMITIVES for row in _check(name, device)]


def _check(name: str, device: torch.device) -> list[dict[str, Any]]:
    operator, wanted = _OPERATORS[name]
    probe = torch.empty(0, device=device)
    impl = dispatch.resolve(name, "auto", probe)
    common = {"operator": name, "device": str(device), "impl": impl, "dtype": "float32"}
    reason = dispatch.why_not_triton(name, probe) or "auto is chunk on the CPU, also with Triton's interpreter"
    exact = _inputs()
    low = {key: tensor.float() for key, tensor in exact.items()}
    reference = _run(operator, exact, wanted, "reference")
    serial = _run(operator, low, wanted, "reference")
    here = {key: tensor.to(device) for key, tensor in low.items()}
    try:
        started = time.perf_counter()
        got = _run(operator, here, wanted, impl)
        first_s = time.perf_counter() - started
        started = time.perf_counter()
        _run(operator, here, wanted, impl)
        second_s = time.perf_counter() - started
    except Exception as error:  # a kernel that cannot even run here is this check's finding
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        return [{**common, "quantity": "output", "passed": False, "problem": problem}]
    rows = []
    for quantity in ("output", "gradient"):
        names = [key for key in reference if key.startswith(quantity)]
        row = _worst([_judge(got[key], reference[key], serial[key], quantity) for key in names])
        rows.append(
            {
                **common,
                "quantity": quantity,
                **row,
                "first_call_s": first_s,
                "latency_ms": 1000 * second_s,
                "why_not_triton": reason if impl != "triton" else None,
            }
        )
    return rows


def _run(operator: Operator, inputs: dict[str, Tensor], wanted: tuple[str, ...], impl: str) -> dict[str, Tensor]:
    """Output and gradients, back on the CPU, so that a GPU has finished when this returns."""
    leaves = {key: inputs[key].clone().requires_grad_() for key in wanted}
    out = operator({**inputs, **leaves}, impl).o
    gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    found = {"output": out.detach().cpu()}
    return found | {f"gradient of {key}": g.cpu() for key, g in zip(wanted, gradients, strict=True)}


def _judge(got: Tensor, expected: Tensor, serial: Tensor, quantity: str) -> dict[str, Any]:
    found: Comparison = compare(got, expected, dtype=torch.float32)
    allowed = budget(torch.float32, compare(serial, expected, dtype=torch.float32), gradient=quantity == "gradient")
    return {
        "max_error": found.max_error,
        "budget": allowed.max_error,
        "passed": allowed.allows(found),
        "problem": found.problem or None,
    }


def _worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def badness(row: dict[str, Any]) -> tuple[bool, float]:
        error = row["max_error"]
        return not row["passed"], float("inf") if error is None else error / row["budget"]

    return max(rows, key=badness)
