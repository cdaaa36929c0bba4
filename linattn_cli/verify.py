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
from linattn_cli.kernels.faults import DoesNotFit
from linattn_cli.kernels.types import state_dtype
from linattn_cli.verify_cases import Case, Inputs, Sizes
from linattn_cli.verify_forms import CHUNK, SERIAL, STATE_PRECISION, Form, Run, draw, execute, input_dtype

LONGEST_SERIAL = 2048
"""Beyond this many tokens the float64 chunk form is the reference, itself checked up to here.

The low-precision serial error that sets the budgets is then at first that of a sequence of this length: it grows with
the number of steps, and a form that is as good is good enough. Where one is not, the whole recurrence is run.
"""

LONGEST_TOKEN_SCAN = 512
"""Beyond this many tokens a scan over tokens, which holds a state for each, is left to the scan over chunks."""

ILL_CONDITIONED = 1e4
"""Condition number above which a low-precision penalty is judged by its residual."""

SMALL = {"tokens": 11, "key_dim": 4, "value_dim": 3}
"""Sizes at which the serial oracle meets its brute force, cubic in T."""

BEYOND_DOUBT = 4.0
"""An error this many times its budget is wrong whatever the draw; below, the serial error is measured again."""

FURTHER_SEEDS = (1_000_003, 2_000_003, 3_000_017, 4_000_037)
"""Added to the seed for the further draws."""

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
            yield row_of(case, form.name, None, None, None, sizes) | unjudged("not run", reason)
        if reason is None or (own != sizes and _why_not(case, form, own, device) is None):
            able.setdefault(own, []).append(form)
    for own, runnable in able.items():
        if own.tokens > LONGEST_SERIAL:
            shorter = replace(own, tokens=LONGEST_SERIAL)
            yield from _verify_dtype(case, [CHUNK], torch.float64, shorter, seed, device)
        for dtype in dtypes:
            lacking = {form: reason for form in runnable if (reason := _why_not_in(dtype, form)) is not None}
            for form, reason in lacking.items():
                yield row_of(case, form.name, None, dtype, None, own) | unjudged("not run", reason)
            chosen = [form for form in runnable if form not in lacking]
            if chosen:
                yield from _verify_dtype(case, chosen, dtype, own, seed, device)


def _why_not(case: Case, form: Form, sizes: Sizes, device: str) -> str | None:
    if form.over == "tokens" and sizes.tokens > LONGEST_TOKEN_SCAN:
        return f"it holds a state a token; above T = {LONGEST_TOKEN_SCAN} the scan over chunks covers it"
    return case.why_not(form.impl, sizes, device)


def _why_not_in(dtype: torch.dtype, form: Form) -> str | None:
    if form.impl != "triton":
        return None
    if dispatch.triton_interpreted() and dtype != torch.float32:
        return "Triton's interpreter computes half precision wrongly and has no float64; it is checked in float32"
    return dispatch.why_not_dtype(dtype)


@dataclass(frozen=True)
class _Quantity:
    """One tensor to be judged, in the reference run."""

    expected: Tensor
    dtype: torch.dtype
    scale: Scale
    gradient: bool = False


@dataclass(frozen=True)
class _Reference:
    """The float64 run that judges, the serial errors that set the budgets, and where residuals take its place."""

    against: str
    quantities: dict[str, _Quantity]
    serial: dict[str, Comparison]
    condition: float | None
    by_residual: bool

    def budget(self, name: str, dtype: torch.dtype) -> Budget:
        return budget(dtype, self.serial[name], gradient=self.quantities[name].gradient)


def _verify_dtype(
    case: Case, forms: list[Form], dtype: torch.dtype, sizes: Sizes, seed: int, device: str
) -> Iterator[Row]:
    inputs = draw(case, dtype, sizes, seed, device)
    reference = _reference(case, inputs, dtype, sizes, seed)
    further: dict[str, Comparison] | None = None
    for form in forms:
        try:
            compared = list(_compared(case, inputs, form, reference, dtype, seed))
        except DoesNotFit as error:  # the kernels are not wrong, they are not here
            yield row_of(case, form.name, None, dtype, None, sizes) | unjudged("not run", str(error))
            continue
        for name, comparison in compared:
            row = row_of(case, form.name, reference.against, dtype, name, sizes)
            if dtype == torch.float16 and reference.serial[name].max_error is None:
                yield row | unjudged("not run", "float16 ends at 65,504: the serial recurrence overflows too")
                continue
            allowed = reference.budget(name, dtype)
            if dtype != torch.float64 and _in_doubt(comparison, allowed, sizes):
                if further is None:
                    further = _further_errors(case, inputs, reference, dtype, sizes, seed, device)
                more = budget(dtype, further.get(name, reference.serial[name]), gradient=False)
                allowed = Budget(max(allowed.max_error, more.max_error), max(allowed.rms_ratio, more.rms_ratio))
            yield row | judged(comparison, allowed) | {"condition": reference.condition}


def _compared(
    case: Case, inputs: Inputs, form: Form, reference: _Reference, dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Comparison]]:
    """Each quantity of a form against the reference; a form that raises has a problem in all of them."""
    crash: Comparison | None = None
    found: dict[str, Tensor | None] = {}
    try:
        run = execute(case, inputs, form, gradients=form.gradients, seed=seed, dtype=dtype)
    except Exception as error:  # a form that cannot even run is what this looks for
        if isinstance(error, (MemoryError, torch.OutOfMemoryError, DoesNotFit)) or "allocate memory" in str(error):
            raise
        crash = Comparison(None, None, problem=f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    else:
        found = _measured(case, _widened(inputs), run, reference.by_residual)
    for name, quantity in reference.quantities.items():
        if form.gradients or not quantity.gradient:
            yield name, crash or compare(found.get(name), quantity.expected, dtype=quantity.dtype, scale=quantity.scale)


def _share(found: Comparison, allowed: Budget) -> float:
    if found.max_error is None or found.rms_ratio is None:
        return float("inf")
    return max(found.max_error / allowed.max_error, found.rms_ratio / allowed.rms_ratio)


def _in_doubt(found: Comparison, allowed: Budget, sizes: Sizes) -> bool:
    """Whether an error over its budget may yet be one that the serial recurrence makes too."""
    return 1 < _share(found, allowed) < (BEYOND_DOUBT if sizes.tokens <= LONGEST_SERIAL else float("inf"))


def _further_errors(
    case: Case, inputs: Inputs, reference: _Reference, dtype: torch.dtype, sizes: Sizes, seed: int, device: str
) -> dict[str, Comparison]:
    """Serial errors by a closer look: of the whole sequence where only its beginning was run, else of more draws.

    The error of one draw is itself random, and a form as accurate as the serial recurrence would now and then
    be called wrong by it.
    """
    if sizes.tokens > LONGEST_SERIAL:
        return _serial_errors(case, inputs, reference.quantities, dtype, seed, reference.by_residual)
    largest: dict[str, Comparison] = {}
    for other in FURTHER_SEEDS:
        drawn = draw(case, dtype, sizes, seed + other, device)
        for name, error in _reference(case, drawn, dtype, sizes, seed).serial.items():
            if error.problem:
                continue
            known = largest.get(name, Comparison(0.0, 0.0))
            largest[name] = Comparison(
                max(error.max_error or 0.0, known.max_error or 0.0), max(error.rms_ratio or 0.0, known.rms_ratio or 0.0)
            )
    return largest


def _serial_errors(
    case: Case, inputs: Inputs, quantities: dict[str, _Quantity], dtype: torch.dtype, seed: int, by_residual: bool
) -> dict[str, Comparison]:
    """Errors of the serial recurrence in the dtype under test."""
    serial = execute(case, inputs, SERIAL, gradients=True, seed=seed, dtype=dtype)
    measured = _measured(case, _widened(inputs), serial, by_residual)
    return {
        name: compare(measured.get(name), q.expected, dtype=q.dtype, scale=q.scale) for name, q in quantities.items()
    }


def _widened(inputs: Inputs) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


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


def unjudged(status: str, reason: str) -> Row:
    empty = dict.fromkeys(("max_error", "rms_ratio", "budget", "rms_budget", "passed"))
    return empty | {
        "status": status,
        "reason": reason,
        "worst": [],
        "got": None,
        "expected": None,
        "condition": None,
    }


def _reference(
    case: Case, inputs: Inputs, dtype: torch.dtype, sizes: Sizes, seed: int, by_residual: bool | None = None
) -> _Reference:
    """What judges forms on these inputs; `by_residual` None decides by the condition number."""
    wide = _widened(inputs)
    oracle = SERIAL if sizes.tokens <= LONGEST_SERIAL else CHUNK
    truth = execute(case, wide, oracle, gradients=True, seed=seed, dtype=dtype)
    condition = None if case.judge is None else case.judge(wide, truth.values).condition
    if by_residual is None:
        by_residual = dtype != torch.float64 and condition is not None and condition > ILL_CONDITIONED
    quantities = _quantities(case, wide, truth, dtype, condition, by_residual)
    errors = {name: Comparison(0.0, 0.0) for name in quantities}
    if dtype != torch.float64 and oracle is SERIAL:
        errors = _serial_errors(case, inputs, quantities, dtype, seed, by_residual)
    elif dtype != torch.float64:
        shorter = replace(sizes, tokens=LONGEST_SERIAL)
        device = str(next(iter(inputs.values())).device)
        short_inputs = draw(case, dtype, shorter, seed, device)
        errors = _reference(case, short_inputs, dtype, shorter, seed, by_residual).serial
    return _Reference(f"{oracle.name} float64", quantities, errors, condition, by_residual)


def _quantities(
    case: Case, wide: Inputs, truth: Run, dtype: torch.dtype, condition: float | None, by_residual: bool
) -> dict[str, _Quantity]:
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
    if condition is not None and condition > ILL_CONDITIONED:
        return wanted  # the error of a gradient grows with the square of the condition number
    for name, gradient in truth.gradients.items():
        if gradient is None:
            gradient = torch.zeros_like(wide[name])
        scale = Scale.of(gradient)
        if name == "log_decay":
            # It is a difference of sums that cancel: relative to what is summed (MATH.md, section 7). Where a
            # mixer normalises q, q.dq is zero, and v.dv, which is a.da in both scans, tells the size.
            found = [(wide[x], truth.gradients[x]) for x in ("q", "v")]
            terms = [(x * gradient_of_x).sum(-1) for x, gradient_of_x in found if gradient_of_x is not None]
            sizes = [scale, *map(Scale.of, terms)]
            scale = Scale(max(size.peak for size in sizes), max(size.rms for size in sizes))
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
