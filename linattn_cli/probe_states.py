"""States by the names of their tensors, every state of a sequence in about sqrt(T) calls, and how norms grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels.types import FormOutput

LEAST_POINTS = 8
"""Steps that a growth exponent needs; fewer are not a trend."""

A = "penalty.inverse"
"""The penalty's inverse, the A of the equations, by its path in a state."""


@dataclass(frozen=True)
class Recurrence:
    """A mixer as a map from tokens and a state to outputs and a state.

    tokens  named inputs, `[B, T, ...]`
    run     `run(tokens, state, impl=, mask=)`; the state None is the empty one
    """

    tokens: Mapping[str, Tensor]
    run: Callable[..., FormOutput]

    @property
    def batch(self) -> int:
        return next(iter(self.tokens.values())).shape[0]

    @property
    def length(self) -> int:
        return next(iter(self.tokens.values())).shape[1]

    def slice(self, start: int, stop: int) -> dict[str, Tensor]:
        """The tokens `start` to `stop - 1`."""
        return {name: x[:, start:stop] for name, x in self.tokens.items()}

    def windows(self, starts: list[int], length: int) -> dict[str, Tensor]:
        """Windows of `length` tokens as a batch `[W * B, length, ...]`, windows slowest."""
        return {name: torch.cat([x[:, start : start + length] for start in starts]) for name, x in self.tokens.items()}

    def empty(self) -> Any:
        """The state before the first token: what a padded token leaves behind."""
        mask = torch.zeros(self.batch, 1, dtype=torch.bool, device=next(iter(self.tokens.values())).device)
        return self.run(self.slice(0, 1), None, impl="reference", mask=mask).state

    def has_fixed_state(self) -> bool:
        """Whether the state stays the same size, unlike a cache of keys and values."""
        shapes = []
        for count in (1, 2):
            tokens = {name: x[:, :1].repeat_interleave(count, 1) for name, x in self.tokens.items()}
            state = self.run(tokens, None, impl="reference").state
            shapes.append([x.shape for x in leaves(state).values()])
        return shapes[0] == shapes[1]


@dataclass(frozen=True)
class Visit:
    """Some steps of a sequence at once.

    steps   0-based, N of them
    tokens  their tokens, `[N * B, 1, ...]`, steps slowest
    before  states before them, batch `[N * B]`
    after   states after them
    output  `[N * B, 1, Q, V]`
    """

    steps: list[int]
    tokens: dict[str, Tensor]
    before: Any
    after: Any
    output: Tensor


def walk(recurrence: Recurrence, impl: str) -> Iterator[Visit]:
    """Every step of a sequence with the states around it, through the recurrence itself.

    The states at the ends of sqrt(T) segments come first; then all segments advance by one token at a time, as
    a batch. Visits hold interleaved steps, each step once.
    """
    total = recurrence.length
    size = max(1, math.isqrt(total - 1) + 1) if total > 1 else 1
    starts = list(range(0, total, size))
    state = recurrence.empty()
    boundaries = [state]
    for start in starts[:-1]:
        state = recurrence.run(recurrence.slice(start, start + size), state, impl=impl).state
        boundaries.append(state)
    state = stack(boundaries)
    for offset in range(size):
        steps = list(range(offset, total, size))
        if not steps:
            return
        before = narrow(state, len(steps) * recurrence.batch)
        tokens = recurrence.windows(steps, 1)
        out = recurrence.run(tokens, before, impl=impl)
        yield Visit(steps, tokens, before, out.state, out.o)
        state = out.state


def leaves(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a state by its path, in a fixed order.

    >>> from linattn_cli.kernels.forms.mesa import RlsState
    >>> from linattn_cli.kernels.types import PenaltyState
    >>> S = torch.zeros(1, 1, 2, 2)
    >>> list(leaves(RlsState(S, PenaltyState(S, S))))
    ['S', 'penalty.mass', 'penalty.inverse']
    """
    if isinstance(state, Tensor):
        return {prefix: state}
    fields = getattr(state, "_fields", ())
    found: dict[str, Tensor] = {}
    for name in fields:
        found.update(leaves(getattr(state, name), f"{prefix}.{name}" if prefix else name))
    return found


def with_leaves(state: Any, new: Mapping[str, Tensor], prefix: str = "") -> Any:
    """A state with some of its tensors replaced."""
    if isinstance(state, Tensor):
        return new.get(prefix, state)
    fields = getattr(state, "_fields", ())
    if not fields:
        return state
    paths = {name: f"{prefix}.{name}" if prefix else name for name in fields}
    return type(state)(*(with_leaves(getattr(state, name), new, path) for name, path in paths.items()))


def stack(states: list[Any]) -> Any:
    """States of equal shapes as one, batch after batch; a counter takes its largest value."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(states)
    if isinstance(first, int):
        # The age of an inverse: the oldest asks for a fresh one no later than any other would.
        return max(states)
    if first is None:
        return None
    return type(first)(*(stack([getattr(state, name) for state in states]) for name in first._fields))


def narrow(state: Any, rows: int) -> Any:
    """The first `rows` of a state's batch."""
    return with_leaves(state, {name: x[:rows] for name, x in leaves(state).items()})


def select(state: Any, rows: list[int]) -> Any:
    """Some rows of a state's batch."""
    return with_leaves(state, {name: x[rows] for name, x in leaves(state).items()})


def memory(state: Any) -> list[str]:
    """The tensors that a state remembers values in: S, or all moments of a higher order.

    Left out are the penalty, which evolves on its own, and z, which only divides outputs.
    """
    return [name for name in leaves(state) if name != "z" and not name.startswith("penalty.")]


def shown_name(path: str) -> str | None:
    """How the equations call a tensor of a state; None for the mass that A is the inverse of.

    >>> shown_name("penalty.inverse"), shown_name("H"), shown_name("penalty.mass")
    ('A', 'H', None)
    """
    return "A" if path == A else None if path.startswith("penalty.") else path


@dataclass
class Norms:
    """Frobenius norms of the tensors of a state over time.

    over_time  by the name in the equations, `[T, B, heads]` float64
    nonfinite  first step (counted from 1) and tensor that is not finite; None where all are
    """

    over_time: dict[str, Tensor]
    nonfinite: tuple[int, str] | None

    def mean(self, name: str) -> Tensor:
        """`[T]`, over sequences and heads."""
        return self.over_time[name].mean((1, 2))


def state_norms_over_time(recurrence: Recurrence, impl: str) -> Norms:
    """The norm of every tensor of the state after every step, in the dtype that the recurrence runs in."""
    found: dict[str, Tensor] = {}
    bad: list[tuple[int, int, str]] = []
    total, batch = recurrence.length, recurrence.batch
    with torch.no_grad():
        for visit in walk(recurrence, impl):
            after = {name: x for path, x in leaves(visit.after).items() if (name := shown_name(path)) is not None}
            for order, (name, x) in enumerate({**visit.tokens, **after, "the output": visit.output}.items()):
                rows = (~x.isfinite()).flatten(1).any(1).view(len(visit.steps), batch).any(1)
                if rows.any():
                    bad.append((visit.steps[int(rows.int().argmax())] + 1, order, name))
            for name, x in after.items():
                norm = x.double().flatten(2).norm(dim=-1)
                if name not in found:
                    found[name] = torch.zeros(total, batch, norm.shape[1], dtype=torch.float64)
                found[name][visit.steps] = norm.view(len(visit.steps), batch, -1).cpu()
    first = min(bad, default=None)
    return Norms(found, None if first is None else (first[0], first[2]))


def first_bad_token(tokens: Mapping[str, Tensor]) -> tuple[int, str] | None:
    """The first step (from 1) at which an input is not finite, and its name; None where all are."""
    steps = {name: (~x.isfinite()).transpose(0, 1).flatten(1).any(1) for name, x in tokens.items()}
    return min(((int(bad.int().argmax()) + 1, name) for name, bad in steps.items() if bad.any()), default=None)


def growth_exponent(norm: Tensor) -> float | None:
    """The exponent p of `norm ~ t^p`, by least squares in log-log over the last decade, `t = T/10 ... T`.

    norm  `[T]`, at t = 1 ... T. None where there are too few steps, or one is zero or not finite.

    >>> growth_exponent(3 * torch.arange(1, 101, dtype=torch.float64))
    1.0
    """
    total = norm.shape[0]
    first = max(1, total // 10)
    last = norm[first - 1 :].double()
    if last.shape[0] < LEAST_POINTS or not (last.isfinite().all() and (last > 0).all()):
        return None
    x = torch.arange(first, total + 1, dtype=torch.float64).log()
    x, y = x - x.mean(), last.log() - last.log().mean()
    return round(float((x * y).sum() / x.square().sum()), 9)
