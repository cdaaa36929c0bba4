"""Everything `probe-norm` measures of one recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn_cli.output import EXIT_MEMORY, CliError
from linattn_cli.probe_jacobians import (
    Step,
    acts_on_columns,
    build_matrix,
    closed_form,
    joint_with_penalty,
    matrix_error,
    matrix_norm,
    matrix_radius,
)
from linattn_cli.probe_products import (
    GradientFlow,
    Products,
    gradient_flow,
    lengths,
    matrix_products,
    spread,
    window_products,
)
from linattn_cli.probe_source import Subject
from linattn_cli.probe_states import (
    A,
    Norms,
    Recurrence,
    first_bad_token,
    leaves,
    memory,
    select,
    stack,
    state_norms_over_time,
    walk,
    with_leaves,
)

JOINT_STEPS = 128
"""Steps at which the Jacobian of a joint state is measured, evenly spread."""

PENALTY_STEPS = 32
"""Steps at which that of A and S together is."""

WINDOWS = 16
"""Windows of one length over which products of a joint state are measured."""

SVD_FLOPS = 2e10
MOST_BYTES = 4 * 2**30
KEPT_BYTES = 2**29

UNIT = 1e-6
"""How far from 1 the length of a direction may be for the closed form to be about it."""


@dataclass
class Jacobians:
    """`J_t` of the memory of a state.

    names           the tensors it is taken of
    steps           counted from 1
    norms, radii    `[len(steps), N]` float64, N sequences times heads
    residual        largest relative residual of an iteration; 0 where all values were computed
    error           largest relative error of a check: of J on random vectors, or of forward against reverse products
    cosine          `a_t . k_t`, `[T, N]`; None where a step is not `I - a k^T` with unit vectors
    closed_error    largest difference of the closed form in that cosine from the measured norm
    """

    names: list[str]
    steps: list[int]
    norms: Tensor
    radii: Tensor
    products: Products
    error: float
    residual: float = 0.0
    cosine: Tensor | None = None
    closed_error: float | None = None


@dataclass
class Measurement:
    """What was found of one subject; `reason` says why there is no Jacobian.

    condition      cond(A_t), `[T, N]`; None without A
    penalty_norms  norms of the Jacobian of A and S together at `penalty_steps`, `[n, N]`
    """

    subject: Subject
    reason: str | None = None
    state: Norms | None = None
    jacobians: Jacobians | None = None
    flow: GradientFlow | None = None
    condition: Tensor | None = None
    penalty_steps: list[int] | None = None
    penalty_norms: Tensor | None = None
    penalty_residual: float = 0.0


def measure(subject: Subject, impl: str) -> Measurement:
    """Norms of states in the subject's dtype and by `impl`; Jacobians, products and gradients in float64.

    float64 has no Triton kernel: there `impl` triton stands for chunk.
    """
    recurrence, exact = subject.recurrence, subject.exact
    if not exact.has_fixed_state():
        return Measurement(subject, reason="none: its cache grows with T")
    broken = first_bad_token(recurrence.tokens) or first_bad_token(exact.tokens)
    if broken is not None:
        return Measurement(subject, f"none: the input {broken[1]} is not finite", Norms({}, broken))
    exact_impl = impl if impl in ("reference", "scan") else "chunk"
    empty = exact.empty()
    first = Step(exact, exact.windows([0], 1), empty, memory(empty))
    one_matrix = acts_on_columns(first)
    if one_matrix:
        _check_memory(exact.length, leaves(empty)[first.names[0]])
    found = Measurement(subject, state=state_norms_over_time(recurrence, impl))
    with torch.no_grad():
        found.condition = _conditions(exact, exact_impl) if A in leaves(empty) else None
        if one_matrix:
            matrices, error = _matrices(exact, exact_impl, first)
            found.jacobians = _of_matrices(matrices, first.names, error, subject)
        else:
            matrices = None
            found.jacobians = _of_joint(exact, exact_impl, first)
        if found.condition is not None:
            _with_penalty(found, exact, exact_impl)
    found.flow = gradient_flow(exact, exact_impl, matrices)
    return found


def _matrices(exact: Recurrence, impl: str, first: Step) -> tuple[Tensor, float]:
    """J of every step, `[T, B, H, K, K]` on the CPU, and the largest error of a check of it."""
    S = leaves(first.before)[first.names[0]]
    batch, heads, key_dim, _ = S.shape
    shape = (exact.length, batch, heads, key_dim, key_dim)
    matrices, error = torch.zeros(shape, dtype=torch.float64), 0.0
    for visit in walk(exact, impl):
        # The step is affine, its Jacobian that at any S: one that overflowed is taken at zero.
        S = leaves(visit.before)[first.names[0]].nan_to_num(0.0, 0.0, 0.0)
        step = Step(exact, visit.tokens, with_leaves(visit.before, {first.names[0]: S}), first.names)
        J = build_matrix(step)
        error = max(error, matrix_error(step, J))
        matrices[visit.steps] = J.view(len(visit.steps), *shape[1:]).cpu()
    return matrices, error


def _check_memory(steps: int, S: Tensor) -> None:
    """Refuse before anything is measured: the matrices of all steps are held three times, for their products."""
    batch, heads, key_dim, _ = S.shape
    needed = 3 * 8 * steps * batch * heads * key_dim**2
    if needed > MOST_BYTES:
        raise CliError(
            f"the Jacobians of {steps} steps with {heads} heads of dimension {key_dim} would take "
            f"{needed / 2**30:.1f} GiB",
            hint="lower --seq-len, --heads or --d-head",
            exit_code=EXIT_MEMORY,
            kind="memory",
        )


def _of_matrices(J: Tensor, names: list[str], error: float, subject: Subject) -> Jacobians:
    total, key_dim = J.shape[0], J.shape[-1]
    affordable = int(SVD_FLOPS / (20 * key_dim**3 * J.shape[1] * J.shape[2]))
    chosen = spread(total, max(affordable, 16))
    some = J[chosen].flatten(1, 2)
    norms, radii = matrix_norm(some), matrix_radius(some)
    found = Jacobians(names, [t + 1 for t in chosen], norms, radii, matrix_products(J), error)
    directions = subject.directions()
    if directions is not None and key_dim > 1:  # the closed form is about a plane and what is orthogonal to it
        a, k = (x.transpose(0, 1).flatten(1, 2).cpu() for x in directions)
        if all(((x.norm(dim=-1) - 1).abs() < UNIT).all() for x in (a, k)):
            found.cosine = (a * k).sum(-1)
            found.closed_error = float((closed_form(found.cosine[chosen]) - norms).abs().max())
    return found


def _conditions(exact: Recurrence, impl: str) -> Tensor:
    """cond(A_t) of every step, `[T, N]`, by the eigenvalues of A."""
    conditions: Tensor | None = None
    for visit in walk(exact, impl):
        eigenvalues = torch.linalg.eigvalsh(leaves(visit.after)[A].cpu())
        ratio = (eigenvalues[..., -1] / eigenvalues[..., 0]).view(len(visit.steps), -1)
        if conditions is None:
            conditions = torch.zeros(exact.length, ratio.shape[1], dtype=torch.float64)
        conditions[visit.steps] = ratio
    assert conditions is not None
    return conditions


class _Kept:
    """States before chosen steps, stacked, with their rows."""

    def __init__(self, recurrence: Recurrence, impl: str, steps: list[int]) -> None:
        wanted, batch, kept = set(steps), recurrence.batch, {}
        for visit in walk(recurrence, impl):
            for index, step in enumerate(visit.steps):
                if step in wanted:
                    kept[step] = select(visit.before, list(range(index * batch, (index + 1) * batch)))
        order = sorted(kept)
        self.recurrence = recurrence
        self.states = stack([kept[step] for step in order])
        self.rows = {step: list(range(i * batch, (i + 1) * batch)) for i, step in enumerate(order)}

    def at(self, steps: list[int]) -> Any:
        return select(self.states, [row for step in steps for row in self.rows[step]])


def _of_joint(exact: Recurrence, impl: str, first: Step) -> Jacobians:
    total = exact.length
    size = 8 * sum(leaves(first.before)[name].numel() for name in first.names)
    most = max(8, min(JOINT_STEPS, KEPT_BYTES // (16 * size)))  # a dozen vectors of a Krylov space beside the states
    steps = spread(total, most)
    starts = {n: [n * i for i in spread(total // n, min(WINDOWS, most))] for n in lengths(total) if n > 1}
    kept = _Kept(exact, impl, sorted({*steps, *(t for firsts in starts.values() for t in firsts)}))
    step = Step(exact, exact.windows(steps, 1), kept.at(steps), first.names).flat()
    norm, radius = step.norm(), step.radius()
    products = window_products(exact, kept.states, kept.rows, starts, impl, norm.values)
    return Jacobians(
        first.names,
        [t + 1 for t in steps],
        norm.values.view(len(steps), -1),
        radius.values.view(len(steps), -1),
        products,
        step.adjoint_error(),
        float(torch.maximum(norm.residuals, radius.residuals).max()),
    )


def _with_penalty(found: Measurement, exact: Recurrence, impl: str) -> None:
    """The Jacobian of A and S together."""
    steps = spread(exact.length, PENALTY_STEPS)
    kept = _Kept(exact, impl, steps)
    step = joint_with_penalty(exact, exact.windows(steps, 1), kept.at(steps)).flat()
    norm = step.norm(most=40, tolerance=1e-6)
    found.penalty_steps = [t + 1 for t in steps]
    found.penalty_norms = norm.values.view(len(steps), -1)
    found.penalty_residual = float(norm.residuals.max())
