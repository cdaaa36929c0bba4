"""The checker behind `verify-scan`: every form of every operator against the serial recurrence in float64.

Inputs are rounded to the dtype under test before anything runs, so that an error is one of computation. The
budget of a low precision is set by the serial recurrence run in it (`compare.budget`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linattn_cli.compare import Budget, Comparison, Scale, budget, compare, name_of
from linattn_cli.kernels import dispatch
from linattn_cli.kernels.types import state_dtype
from linattn_cli.verify_cases import Case, Inputs, Sizes
from linattn_cli.verify_forms import CHUNK, SERIAL, STATE_PRECISION, Form, Run, draw, execute, input_dtype

LONGEST_SERIAL = 2048
"""Beyond this many tokens the float64 chunk form is the reference, itself checked up to here."""

LONGEST_TOKEN_SCAN = 512
"""Beyond this many tokens a scan over tokens, which holds a state for each, is left to the scan over chunks."""

ILL_CONDITIONED = 1e4
"""Condition number above which a low-precision penalty is judged by its residual."""

SMALL = {"tokens": 11, "key_dim": 4, "value_dim": 3}
"""Sizes at which the serial oracle meets its brute force, cubic in T."""

Row = dict[str, Any]


def verify(
    cases: Iterable[Case],
    forms: Iterable[Form],
    dtypes: Iterable[torch.dtype],
    sizes: Sizes,
    *,
    seed: int,
    device: str,
) -> Iterator[Row]:
    """Rows, one a quantity of a form of a case in a dtype; forms that cannot do a case have one row saying so."""
    forms, dtypes = tuple(forms), tuple(dtypes)
    for case in cases:
        yield from verify_case(case, forms, dtypes, sizes, seed=seed, device=device)


def verify_case(
    case: Case,
    forms: tuple[Form, ...],
    dtypes: tuple[torch.dtype, ...],
    sizes: Sizes,
    *,
    seed: int,
    device: str,
) -> Iterator[Row]:
    """The rows of one case."""
    if SERIAL in forms and case.brute_force is not None:
        yield _verify_serial(case, sizes, seed)
    able: dict[Sizes, list[Form]] = {}
    for form in forms:
        if form is SERIAL:
            continue
        own = case.limit(form.impl, sizes)
        reason = _why_not(case, form, sizes, device)
        if reason is not None:
            yield row_of(case, form.name, None, None, None, sizes) | _unjudged("not run", reason)
        if reason is None or (own != sizes and _why_not(case, form, own, device) is None):
            able.setdefault(own, []).append(form)
    for own, runnable in able.items():
        if own.tokens > LONGEST_SERIAL:
            shorter = replace(own, tokens=LONGEST_SERIAL)
            yield from _verify_dtype(case, [CHUNK], torch.float64, shorter, seed, device)
        for dtype in dtypes:
            chosen = [form for form in runnable if not _only_float32(form) or dtype == torch.float32]
            if chosen:
                yield from _verify_dtype(case, chosen, dtype, own, seed, device)


def _why_not(case: Case, form: Form, sizes: Sizes, device: str) -> str | None:
    if form.over == "tokens" and sizes.tokens > LONGEST_TOKEN_SCAN:
        return f"it holds a state a token; above T = {LONGEST_TOKEN_SCAN} the scan over chunks covers it"
    return case.why_not(form.impl, sizes, device)


def _only_float32(form: Form) -> bool:
    """Triton's interpreter computes bfloat16 wrongly and is no test of it; it is checked in float32."""
    return form.impl == "triton" and dispatch.triton_interpreted()


@dataclass(frozen=True)
class _Quantity:
    """One tensor to be judged, in the reference run."""

    expected: Tensor
    dtype: torch.dtype
    scale: Scale
    gradient: bool = False


@dataclass(frozen=True)
class _Reference:
    """The float64 run that judges, the budgets it allows, and where residuals take its place."""

    against: str
    quantities: dict[str, _Quantity]
    budgets: dict[str, Budget]
    condition: float | None
    by_residual: bool


def _verify_dtype(
    case: Case, forms: list[Form], dtype: torch.dtype, sizes: Sizes, seed: int, device: str
) -> Iterator[Row]:
    inputs = draw(case, dtype, sizes, seed, device)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    reference = _reference(case, inputs, wide, dtype, sizes, seed)
    for form in forms:
        try:
            run = execute(case, inputs, form, gradients=form.gradients, seed=seed, dtype=dtype)
        except (ValueError, RuntimeError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise
            found, crash = {}, f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            found, crash = _measured(case, wide, run, reference.by_residual), ""
        for name, quantity in reference.quantities.items():
            if quantity.gradient and not form.gradients:
                continue
            if crash:
                comparison = Comparison(None, None, problem=crash)
            else:
                got = found.get(name)
                comparison = compare(got, quantity.expected, dtype=quantity.dtype, scale=quantity.scale)
            row = row_of(case, form.name, reference.against, dtype, name, sizes)
            yield row | judged(comparison, reference.budgets[name]) | {"condition": reference.condition}


def _verify_serial(case: Case, sizes: Sizes, seed: int) -> Row:
    """The oracle itself against an explicit sum over all index sets, which only short sequences allow."""
    assert case.brute_force is not None
    small = replace(sizes, **SMALL)
    inputs = draw(case, torch.float64, small, seed, "cpu")
    values = execute(case, inputs, SERIAL, gradients=False, seed=seed, dtype=torch.float64).values
    comparison = compare(values["o"], case.brute_force(inputs), dtype=torch.float64)
    row = row_of(case, SERIAL.name, "brute force", torch.float64, "o", small)
    return row | judged(comparison, budget(torch.float64, comparison, gradient=False)) | {"condition": None}


def row_of(
    case: Case, form: str, against: str | None, dtype: torch.dtype | None, quantity: str | None, sizes: Sizes
) -> Row:
    return {
        "model": case.model,
        "options": case.options,
        "form": form,
        "against": against,
        "dtype": None if dtype is None else name_of(dtype),
        "quantity": quantity,
        "seq_len": sizes.tokens,
        "d_head": sizes.key_dim,
    }


def judged(comparison: Comparison, allowed: Budget) -> Row:
    """The columns that say how a comparison went."""
    passed = allowed.allows(comparison)
    return {
        "max_error": comparison.max_error,
        "rms_ratio": comparison.rms_ratio,
        "budget": allowed.max_error,
        "rms_budget": allowed.rms_ratio,
        "passed": passed,
        "status": "passed" if passed else "failed",
        "reason": comparison.problem or None,
        "worst": list(comparison.worst),
        "got": comparison.got,
        "expected": comparison.expected,
    }


def _unjudged(status: str, reason: str) -> Row:
    empty = dict.fromkeys(("max_error", "rms_ratio", "budget", "rms_budget", "passed"))
    return empty | {
        "status": status,
        "reason": reason,
        "worst": [],
        "got": None,
        "expected": None,
        "condition": None,
    }


def _reference(case: Case, inputs: Inputs, wide: Inputs, dtype: torch.dtype, sizes: Sizes, seed: int) -> _Reference:
    oracle = SERIAL if sizes.tokens <= LONGEST_SERIAL else CHUNK
    truth = execute(case, wide, oracle, gradients=True, seed=seed, dtype=dtype)
    condition = None if case.judge is None else case.judge(wide, truth.values).condition
    by_residual = dtype != torch.float64 and condition is not None and condition > ILL_CONDITIONED
    quantities = _quantities(case, wide, truth, dtype, by_residual)
    budgets = {name: budget(dtype, Comparison(0.0, 0.0), gradient=q.gradient) for name, q in quantities.items()}
    if dtype != torch.float64:
        serial = execute(case, inputs, SERIAL, gradients=True, seed=seed, dtype=dtype)
        measured = _measured(case, wide, serial, by_residual)
        for name, q in quantities.items():
            error = compare(measured.get(name), q.expected, dtype=q.dtype, scale=q.scale)
            budgets[name] = budget(dtype, error, gradient=q.gradient)
    return _Reference(f"{oracle.name} float64", quantities, budgets, condition, by_residual)


def _quantities(case: Case, wide: Inputs, truth: Run, dtype: torch.dtype, by_residual: bool) -> dict[str, _Quantity]:
    """What is judged, with the dtype it must have and what its errors are relative to."""
    wanted: dict[str, _Quantity] = {}
    residuals: dict[str, Tensor] = {}
    if by_residual:
        assert case.judge is not None
        residuals = case.judge(wide, truth.values).residuals
    for name, value in truth.values.items():
        if f"{name} residual" in residuals:
            exact = torch.zeros_like(residuals[f"{name} residual"])
            wanted[f"{name} residual"] = _Quantity(exact, torch.float64, Scale(1.0, 1.0))
            continue
        wide_state = name.startswith(STATE_PRECISION) and not case.cached
        wanted[name] = _Quantity(value, state_dtype(dtype) if wide_state else dtype, Scale.of(value))
    if by_residual:
        return wanted  # a gradient of an ill-conditioned inverse has no digits to compare
    for name, gradient in truth.gradients.items():
        if gradient is None:
            continue
        scale = Scale.of(gradient)
        if name == "log_decay" and truth.gradients.get("q") is not None:
            # It is a difference of sums that cancel: relative to what is summed (MATH.md, section 7).
            terms = Scale.of((wide["q"] * truth.gradients["q"]).sum(-1))
            scale = Scale(max(scale.peak, terms.peak), max(scale.rms, terms.rms))
        wanted[f"grad {name}"] = _Quantity(gradient, input_dtype(name, dtype), scale, gradient=True)
    return wanted


def _measured(case: Case, wide: Inputs, run: Run, by_residual: bool) -> dict[str, Tensor | None]:
    """The tensors of a run by the names of `_quantities`."""
    found: dict[str, Tensor | None] = dict(run.values)
    if by_residual:
        assert case.judge is not None
        found |= case.judge(wide, run.values).residuals
    for name, gradient in run.gradients.items():
        # No path from an input to any output is a gradient of zero.
        found[f"grad {name}"] = torch.zeros_like(wide[name]) if gradient is None else gradient
    return found
