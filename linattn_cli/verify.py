"""The checker behind `verify-scan`: every form of every operator against the serial recurrence in float64.

Inputs are rounded to the dtype under test before anything runs, so that an error is one of computation. The
budget of a low precision is set by the serial recurrence run in it (`compare.budget`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn_cli.compare import Budget, Comparison, Scale, budget, compare, name_of
from linattn_cli.kernels.types import state_dtype
from linattn_cli.verify_cases import Case, Inputs, Sizes

LONGEST_SERIAL = 2048
"""Beyond this many tokens the float64 chunk form is the reference, itself checked up to here."""

ILL_CONDITIONED = 1e4
"""Condition number above which a low-precision penalty is judged by its residual."""

FULL_PRECISION_INPUTS = ("log_decay",)
"""Inputs kept in float32 where the others are in half precision, as the layers pass them."""

SMALL = {"tokens": 11, "key_dim": 4, "value_dim": 3}
"""Sizes at which the serial oracle meets its brute force, cubic in T."""

STATE_PRECISION = ("state", "residual")
"""Values kept in the state's dtype whatever that of the inputs."""


@dataclass(frozen=True)
class Form:
    """One way to compute an operator.

    name       as given to `--forms`
    impl       implementation asked of the operator
    pieces     `whole`: one call; `split`: two, the state carried; `decode`: one token a call
    over       for `scan`: over `tokens` or over `chunks`
    gradients  whether gradients are checked as well
    """

    name: str
    impl: str
    pieces: str = "whole"
    over: str = "chunks"
    gradients: bool = True

    def matches(self, wanted: str) -> bool:
        """Whether `--forms` means this form: by its name, or by its implementation.

        >>> Form("chunk-split", "chunk", "split").matches("chunk")
        True
        """
        return wanted in (self.name, self.impl)


SERIAL = Form("serial", "reference", gradients=False)
CHUNK = Form("chunk", "chunk")

FORMS: tuple[Form, ...] = (
    SERIAL,
    CHUNK,
    Form("chunk-split", "chunk", "split"),
    Form("chunk-decode", "chunk", "decode", gradients=False),
    Form("scan-tokens", "scan", over="tokens"),
    Form("scan-chunks", "scan"),
    Form("scan-split", "scan", "split"),
    Form("triton", "triton"),
    Form("triton-split", "triton", "split"),
    Form("triton-decode", "triton", "decode", gradients=False),
)


@dataclass(frozen=True)
class Run:
    """Everything a form computed: outputs and final state, then gradients by input name."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def chunk_size_for(tokens: int) -> int:
    """Short enough for several chunks, and never a divisor of T, so that there is a tail.

    >>> chunk_size_for(97), chunk_size_for(128), chunk_size_for(4096), chunk_size_for(1)
    (16, 15, 63, 16)
    """
    size = 16 if tokens <= 512 else 64
    while size > 3 and tokens >= size and tokens % size == 0:
        size -= 1
    return size


def verify(
    cases: Iterable[Case],
    forms: Iterable[Form],
    dtypes: Iterable[torch.dtype],
    sizes: Sizes,
    *,
    seed: int,
    device: str,
) -> Iterator[dict[str, Any]]:
    """Rows, one a quantity of a form of a case in a dtype."""
    forms, dtypes = tuple(forms), tuple(dtypes)
    for case in cases:
        able = []
        if SERIAL in forms and case.brute_force is not None:
            yield _verify_serial(case, sizes, seed)
        for form in forms:
            if form is SERIAL:
                continue
            reason = case.why_not(form.impl, sizes, device)
            if reason is None:
                able.append(form)
            else:
                yield not_run(case, form, sizes, reason)
        if not able:
            continue
        if sizes.tokens > LONGEST_SERIAL:
            shorter = replace(sizes, tokens=LONGEST_SERIAL)
            yield from _verify_case(case, (CHUNK,), torch.float64, shorter, seed, device)
        for dtype in dtypes:
            yield from _verify_case(case, tuple(able), dtype, sizes, seed, device)


def draw(case: Case, dtype: torch.dtype, sizes: Sizes, seed: int, device: str) -> dict[str, Tensor]:
    """The inputs of a case, in the dtype that the operator receives; the same numbers for every dtype."""
    made = case.inputs(sizes, _generator(f"{seed}/{case.model}/{case.options}/{sizes}"))
    return {
        name: (x.to(_input_dtype(name, dtype)) if x.is_floating_point() else x).to(device) for name, x in made.items()
    }


def _generator(label: str) -> torch.Generator:
    """Seeded by a digest of the label: torch keeps only 32 bits of a CPU seed, so they must all count."""
    return torch.Generator().manual_seed(zlib.crc32(label.encode()))


def _input_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return state_dtype(dtype) if name.startswith("initial") or name in FULL_PRECISION_INPUTS else dtype


def execute(case: Case, inputs: Inputs, form: Form, *, gradients: bool, seed: int, dtype: torch.dtype) -> Run:
    """Run a form, and differentiate it against a random upstream gradient that depends on names alone.

    dtype  the dtype under test: upstream gradients are rounded to what it gives outputs and states, also in
           the float64 run that judges them
    """
    leaves = {name: x.detach().requires_grad_(gradients and x.is_floating_point()) for name, x in inputs.items()}
    with torch.set_grad_enabled(gradients):
        values = _call_in_pieces(case, leaves, form)
    if not gradients:
        return Run(values, {})
    outputs, upstreams = [], []
    for name, value in values.items():
        if value.requires_grad:
            outputs.append(value)
            upstreams.append(_upstream(name, value, seed, dtype))
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(outputs, list(wanted.values()), upstreams, allow_unused=True)
    return Run({name: x.detach() for name, x in values.items()}, dict(zip(wanted, found, strict=True)))


def _upstream(name: str, value: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(value.shape, generator=_generator(f"{seed}/{name}"), dtype=torch.float64)
    rounded = drawn.to(state_dtype(dtype) if name.startswith(STATE_PRECISION) else dtype)
    return rounded.to(value.dtype).to(value.device)


def _call_in_pieces(case: Case, inputs: Inputs, form: Form) -> dict[str, Tensor]:
    tokens = next(x.shape[1] for name, x in inputs.items() if not name.startswith("initial"))
    size = tokens if form.over == "tokens" else chunk_size_for(tokens)
    edges = list(range(tokens + 1)) if form.pieces == "decode" else [0, tokens]
    if form.pieces == "split":
        edges = [0, max(1, tokens // 3), tokens] if tokens > 1 else edges
    spans = list(pairwise(edges))
    state, parts = case.start(inputs), []
    for begin, end in reversed(spans) if case.reverse else spans:
        piece = {name: x if name.startswith("initial") else x[:, begin:end] for name, x in inputs.items()}
        called = case.call(piece, state=state, impl=form.impl, chunk_size=size)
        assert called.impl == form.impl, f"{case.model} ran {called.impl}, {form.impl} was asked for"
        state = called.state
        parts.append(called.values)
    if case.reverse:
        parts.reverse()
    values = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    return values | named_state(state)


def named_state(state: Any, prefix: str = "state") -> dict[str, Tensor]:
    """The tensors of a state by the names of its fields.

    >>> from linattn_cli.kernels.types import PenaltyState
    >>> list(named_state(PenaltyState(torch.zeros(1), torch.zeros(1), 3)))
    ['state.mass', 'state.inverse']
    """
    if isinstance(state, Tensor):
        return {prefix: state} if state.is_floating_point() else {}
    if not isinstance(state, (tuple, list)):
        return {}
    found: dict[str, Tensor] = {}
    for name, part in zip(getattr(state, "_fields", range(len(state))), state, strict=True):
        found |= named_state(part, f"{prefix}.{name}")
    return found


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


def _verify_case(
    case: Case, forms: tuple[Form, ...], dtype: torch.dtype, sizes: Sizes, seed: int, device: str
) -> Iterator[dict[str, Any]]:
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
            allowed = reference.budgets[name]
            yield {
                "model": case.model,
                "options": case.options,
                "form": form.name,
                "against": reference.against,
                "dtype": name_of(dtype),
                "quantity": name,
                "seq_len": sizes.tokens,
                **judged(comparison, allowed),
                "condition": reference.condition,
            }


def _verify_serial(case: Case, sizes: Sizes, seed: int) -> dict[str, Any]:
    """The oracle itself against an explicit sum over all index sets, which only short sequences allow."""
    assert case.brute_force is not None
    small = replace(sizes, **SMALL)
    inputs = draw(case, torch.float64, small, seed, "cpu")
    values = execute(case, inputs, SERIAL, gradients=False, seed=seed, dtype=torch.float64).values
    expected = case.brute_force(inputs)
    comparison = compare(values["o"], expected, dtype=torch.float64)
    return {
        "model": case.model,
        "options": case.options,
        "form": SERIAL.name,
        "against": "brute force",
        "dtype": "float64",
        "quantity": "o",
        "seq_len": small.tokens,
        **judged(comparison, budget(torch.float64, comparison, gradient=False)),
        "condition": None,
    }


def judged(comparison: Comparison, allowed: Budget) -> dict[str, Any]:
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


def not_run(case: Case, form: Form, sizes: Sizes, reason: str) -> dict[str, Any]:
    """The row of a form that cannot do a case: it is never left out."""
    return {
        "model": case.model,
        "options": case.options,
        "form": form.name,
        "against": None,
        "dtype": None,
        "quantity": None,
        "seq_len": sizes.tokens,
        "max_error": None,
        "rms_ratio": None,
        "budget": None,
        "rms_budget": None,
        "passed": None,
        "status": "not run",
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
        wanted[f"grad {name}"] = _Quantity(gradient, _input_dtype(name, dtype), scale, gradient=True)
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
