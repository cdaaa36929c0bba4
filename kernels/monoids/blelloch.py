"""One work-efficient scan for every associative operator: 2 T combines, depth 2 log2 T, any length."""

from __future__ import annotations

from typing import Any

import torch

from linattn_cli.kernels.monoids.base import Monoid


def _map(function: Any, *elements: Any) -> Any:
    """`function` on corresponding fields of elements, as an element."""
    return type(elements[0])(*(function(*fields) for fields in zip(*elements, strict=True)))


def _length(elements: Any, dim: int) -> int:
    return elements[0].shape[dim]


def _span(elements: Any, dim: int, start: int, stop: int, step: int = 1) -> Any:
    index = (slice(None),) * dim + (slice(start, stop, step),)
    return _map(lambda x: x[index], elements)


def _join(first: Any, second: Any, dim: int) -> Any:
    return _map(lambda x, y: torch.cat((x, y), dim), first, second)


def _interleave(even: Any, odd: Any, dim: int) -> Any:
    return _map(lambda x, y: torch.stack((x, y), dim + 1).flatten(dim, dim + 1), even, odd)


def exclusive_scan(monoid: Monoid, elements: Any, dim: int = 1) -> tuple[Any, Any]:
    """Prefixes before each element, and the total, both of them elements.

    The up-sweep combines neighbours until one element is left (an odd one out is carried up as it is); the
    down-sweep hands each pair the prefix before it: the left takes it, the right takes it combined with the
    left. Nothing is written in place, so autograd runs through it.

    elements  a NamedTuple of tensors that share the dimensions up to `dim`, time at `dim`
    returns   (prefixes, with T elements at `dim`; total, with one)

    Source: Blelloch 1990, Prefix Sums and Their Applications.

    >>> from linattn_cli.kernels.monoids.penalty import PENALTY, PenaltySegment
    >>> prefixes, total = exclusive_scan(PENALTY, PenaltySegment(torch.arange(1.0, 6.0).view(1, 5, 1, 1)))
    >>> prefixes.P.flatten().tolist(), total.P.item()
    ([0.0, 1.0, 3.0, 6.0, 10.0], 15.0)
    """
    if _length(elements, dim) < 1:
        raise ValueError("a scan needs at least one element, got none; skip the call")
    lefts = []
    lengths = []
    while (length := _length(elements, dim)) > 1:
        even = length - length % 2
        left, right = _span(elements, dim, 0, even, 2), _span(elements, dim, 1, even, 2)
        pairs = monoid.combine(left, right)
        elements = pairs if even == length else _join(pairs, _span(elements, dim, even, length), dim)
        lefts.append(left)
        lengths.append(length)
    total = elements
    prefixes = monoid.identity(total)
    for left, length in zip(reversed(lefts), reversed(lengths), strict=True):
        before = _span(prefixes, dim, 0, length // 2)
        swept = _interleave(before, monoid.combine(before, left), dim)
        last = _span(prefixes, dim, length // 2, length // 2 + 1)
        prefixes = swept if length % 2 == 0 else _join(swept, last, dim)
    return prefixes, total


def inclusive_scan(monoid: Monoid, elements: Any, dim: int = 1) -> Any:
    """Prefixes up to and including each element."""
    return monoid.combine(exclusive_scan(monoid, elements, dim)[0], elements)


def reduce(monoid: Monoid, elements: Any, dim: int = 1) -> Any:
    """The total alone: the up-sweep without the way down."""
    while (length := _length(elements, dim)) > 1:
        even = length - length % 2
        pairs = monoid.combine(_span(elements, dim, 0, even, 2), _span(elements, dim, 1, even, 2))
        elements = pairs if even == length else _join(pairs, _span(elements, dim, even, length), dim)
    return elements
