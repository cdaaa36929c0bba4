"""Products of Jacobians over 1, 2, 4, ..., T steps, and the gradient that flows through them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn_cli.probe_jacobians import Layout, Step, matrix_norm, pull_back
from linattn_cli.probe_krylov import largest_singular_value
from linattn_cli.probe_states import Recurrence, leaves, memory, select, with_leaves

CHAIN = 2048
"""Steps up to which the gradient of a joint state is also pulled back one Jacobian at a time."""

SVDS = 4096
"""Matrices of 32 x 32 decomposed for one length; larger ones get fewer."""


def lengths(total: int) -> list[int]:
    """1, 2, 4, ... and T itself.

    >>> lengths(10)
    [1, 2, 4, 8, 10]
    """
    powers = [2**i for i in range(total.bit_length()) if 2**i <= total]
    return powers if powers[-1] == total else [*powers, total]


@dataclass(frozen=True)
class Products:
    """Spectral norms of products of n Jacobians over windows that start at 0, n, 2n, ...

    largest, median  log10, by n; over windows, heads and sequences
    smallest_whole   log10 of the least norm of the product of all T, over heads and sequences
    """

    largest: dict[int, float]
    median: dict[int, float]
    smallest_whole: float


def matrix_products(J: Tensor) -> Products:
    """Of J `[T, B, H, K, K]`, by a binary tree; sizes are kept as logarithms, so nothing overflows."""
    total, key_dim = J.shape[0], J.shape[-1]
    found: dict[int, Tensor] = {}
    tail: tuple[Tensor, Tensor] | None = None
    level = (J, torch.zeros(J.shape[:-2], dtype=J.dtype))
    length = 1
    affordable = max(1, int(SVDS * (32 / key_dim) ** 3 / (J.shape[1] * J.shape[2])))
    while True:
        M, log = level
        windows = spread(M.shape[0], affordable)
        found[length] = matrix_norm(M[windows]).clamp_min(1e-300).log10() + log[windows]
        if M.shape[0] % 2:  # the last window is of no pair: it comes right before the tail
            last = (M[-1], log[-1])
            tail = last if tail is None else _compose(tail, last)
        if M.shape[0] < 2:
            break
        even = M.shape[0] - M.shape[0] % 2
        level = _compose((M[1:even:2], log[1:even:2]), (M[0:even:2], log[0:even:2]))
        length *= 2
    assert tail is not None
    found[total] = (matrix_norm(tail[0]).clamp_min(1e-300).log10() + tail[1]).unsqueeze(0)
    return _summary(found, total)


def _compose(later: tuple[Tensor, Tensor], earlier: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    product = later[0] @ earlier[0]
    size = torch.linalg.matrix_norm(product, keepdim=True).clamp_min(1e-300)
    return product / size, later[1] + earlier[1] + size[..., 0, 0].log10()


def _summary(found: Mapping[int, Tensor], total: int) -> Products:
    return Products(
        {n: float(x.max()) for n, x in found.items()},
        {n: float(x.median()) for n, x in found.items()},
        float(found[total].min()),
    )


def power(log10: float) -> float:
    """`10^log10`, infinite where a double cannot hold it.

    >>> power(2.0), power(400.0)
    (100.0, inf)
    """
    return 10.0**log10 if log10 < 308 else math.inf


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spread, the first and the last among them.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


class Window:
    """Many tokens as one map of the memory of a state, for a batch of windows.

    Forward products are central differences, exact for a state that is at most quadratic in an earlier one, as all
    are here; reverse products are autograd's, through the implementation.
    """

    def __init__(self, recurrence: Recurrence, tokens: Mapping[str, Tensor], before: Any, impl: str) -> None:
        self.recurrence, self.tokens, self.before, self.impl = recurrence, tokens, before, impl
        self.names = memory(before)
        self.layout = Layout.of(before, self.names)

    def _after(self, memories: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = with_leaves(self.before, memories)
        return leaves(self.recurrence.run(self.tokens, state, impl=self.impl).state)

    def apply(self, x: Tensor) -> Tensor:
        have, change = leaves(self.before), self.layout.unflatten(x)
        with torch.no_grad():
            up, down = (
                self.layout.flatten(self._after({name: have[name] + sign * change[name] for name in self.names}))
                for sign in (1, -1)
            )
        return (up - down) / 2

    def adjoint(self, y: Tensor) -> Tensor:
        inputs = {name: leaves(self.before)[name].detach().requires_grad_() for name in self.names}
        with torch.enable_grad():
            after = self._after(inputs)
        return self.layout.flatten(pull_back(after, self.layout.unflatten(y), inputs))


def window_products(
    recurrence: Recurrence,
    states: Any,
    rows_of: Mapping[int, list[int]],
    starts: Mapping[int, list[int]],
    impl: str,
    single: Tensor,
) -> Products:
    """The same for a joint state, by Lanczos iteration on windows of the recurrence.

    starts   by length, the first steps of the windows
    states   states before these steps, stacked; `rows_of[step]` are the rows of one
    single   the norms of single steps, which are measured already
    """
    found = {1: single.clamp_min(1e-300).log10()}
    for length, firsts in starts.items():
        before = select(states, [row for step in firsts for row in rows_of[step]])
        window = Window(recurrence, recurrence.windows(firsts, length), before, impl)
        shape = (len(firsts) * recurrence.batch * window.layout.heads, -1)
        width = window.layout.flatten(leaves(before)).shape[1]
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(shape[0], width, generator=generator, dtype=torch.float64)
        device = next(iter(leaves(before).values())).device
        # Three digits do: products differ by powers of ten.
        norm = largest_singular_value(window.apply, window.adjoint, start.to(device), most=16, tolerance=1e-3)
        found[length] = norm.values.clamp_min(1e-300).log10()
    return _summary(found, recurrence.length)


@dataclass(frozen=True)
class GradientFlow:
    """The gradient of `w . o_T`, w a random unit vector a head, in the state n tokens before the end.

    norms  by n, the largest over sequences and heads, through the whole implementation by autograd
    error  largest relative difference from pulling the gradient back one Jacobian at a time, where both are finite
    """

    norms: dict[int, float]
    error: float


def gradient_flow(recurrence: Recurrence, impl: str, matrices: Tensor | None) -> GradientFlow:
    """Gradients by autograd, and the same as products of Jacobians.

    matrices  J `[T, B, H, K, K]` where the state is one matrix; None pulls back through the steps
    """
    total = recurrence.length
    counts = lengths(total)
    boundaries = [total - n for n in reversed(counts)]
    names = memory(recurrence.empty())
    state, held = recurrence.empty(), {}
    with torch.enable_grad():
        for start, stop in zip(boundaries, [*boundaries[1:], total], strict=True):
            have = leaves(state)
            # Slices of a graph: a view of each boundary is what the gradient is asked for.
            held[total - start] = {
                name: have[name].requires_grad_() if start == 0 else have[name].view_as(have[name]) for name in names
            }
            state = with_leaves(state, held[total - start])
            out = recurrence.run(recurrence.slice(start, stop), state, impl=impl)
            state = out.state
        last = out.o[:, -1]
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(last.shape, generator=generator, dtype=last.dtype).to(last.device)
        loss = (last * w / w.norm(dim=-1, keepdim=True)).sum()
        flat = [x for tensors in held.values() for x in tensors.values()]
        grads = torch.autograd.grad(loss, flat, allow_unused=True)
    layout = Layout.of(state, names)
    by_count: dict[int, dict[str, Tensor]] = {}
    remaining = iter(grads)
    for n, tensors in held.items():
        by_count[n] = {
            name: torch.zeros_like(x) if (grad := next(remaining)) is None else grad for name, x in tensors.items()
        }
    flows = {n: layout.flatten(by_count[n]) for n in counts}
    norms = {n: float(_norm(x).max()) for n, x in flows.items()}
    pulled = _by_matrices(by_count[1], names, matrices) if matrices is not None else _by_steps(recurrence, by_count[1])
    error = 0.0
    for n, tensors in pulled:
        if flows[n].isfinite().all():  # an overflow is reported as one, not compared
            difference = _norm(layout.flatten(tensors) - flows[n]) / _norm(flows[n]).clamp_min(1e-300)
            error = max(error, float(difference.nan_to_num(float("inf")).max()))
    return GradientFlow(norms, error)


def _norm(x: Tensor) -> Tensor:
    """Euclidean norms of `[N, D]`, also of numbers whose squares a double cannot hold."""
    largest = x.abs().amax(1, keepdim=True).clamp_min(1e-300)
    return (x / largest).norm(dim=1) * largest[:, 0]


def _by_matrices(gradient: dict[str, Tensor], names: list[str], J: Tensor) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The gradient before the last token, pulled back by `J_t^T` one step at a time, where a length ends."""
    (name,) = names
    G, total = gradient[name], J.shape[0]
    J = J.to(G.device)
    wanted = set(lengths(total))
    yield 1, {name: G}
    for n in range(2, total + 1):
        G = J[total - n].mT @ G
        if n in wanted:
            yield n, {name: G}


def _by_steps(recurrence: Recurrence, gradient: dict[str, Tensor]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The same through the serial step, for a joint state; the last `CHAIN` steps."""
    total = recurrence.length
    depth = min(total, CHAIN)
    first = total - depth
    steps: list[Step] = []
    names = list(gradient)
    state = recurrence.empty()
    with torch.no_grad():
        if first:
            state = recurrence.run(recurrence.slice(0, first), state, impl="chunk").state
        for t in range(first, total - 1):
            steps.append(Step(recurrence, recurrence.slice(t, t + 1), state, names))
            state = steps[-1].run(state).state
    wanted = set(lengths(total))
    yield 1, gradient
    for n, step in enumerate(reversed(steps), start=2):
        gradient = step.reverse(gradient)
        if n in wanted:
            yield n, gradient
