"""Where a mixer overtakes softmax: from measured lengths, never beyond them.

A ratio is the mixer's time over softmax's at one length: above 1 the mixer is slower. The crossover is the
length from which on the mixer is at least as fast at every measured length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

NARROW = 1.1
"""Bisection ends once the lengths on both sides of a crossover are within this factor."""

MOST_STEPS = 5
"""Most measurements of one bisection; a doubling needs three."""


@dataclass(frozen=True)
class Point:
    """One measured length and the mixer's time over softmax's there."""

    seq_len: int
    ratio: float


@dataclass(frozen=True)
class Crossover:
    """What is known about a crossover.

    status        `confirmed`: bisected, with a measurement on each side
                  `interpolated`: between two measured lengths, not yet bisected
                  `faster throughout`, `slower throughout`, `slower at last` (faster at shorter ones): none in range
                  `not measured`: fewer than two common lengths
    tokens        the crossover, None unless between two measured lengths
    interpolated  the same from the sweep alone, before the bisection
    slower        the nearest measured length at which the mixer is slower
    faster        the nearest one from which on it is not
    crossings     how often the ratio passes 1 in the sweep; more than one is noise or a jump
    points        everything measured, in order of length
    """

    status: str
    tokens: int | None = None
    interpolated: int | None = None
    slower: Point | None = None
    faster: Point | None = None
    crossings: int = 0
    points: list[Point] = field(default_factory=list)


def locate(points: list[Point]) -> Crossover:
    """The crossover among measured points, by interpolation in log-log between the two that enclose it.

    >>> found = locate([Point(1024, 4.0), Point(4096, 1.0 / 4.0)])
    >>> found.status, found.tokens
    ('interpolated', 2048)
    >>> locate([Point(1024, 3.0), Point(4096, 1.5)]).status
    'slower throughout'
    """
    points = sorted(points, key=lambda point: point.seq_len)
    if len(points) < 2:
        return Crossover("not measured", points=points)
    slow = [point.ratio > 1 for point in points]
    crossings = sum(a != b for a, b in pairwise(slow))
    if slow[-1]:
        status = "slower throughout" if all(slow) else "slower at last"
        return Crossover(status, slower=points[-1], crossings=crossings, points=points)
    if not any(slow):
        return Crossover("faster throughout", faster=points[0], points=points)
    last = max(index for index, above in enumerate(slow) if above)
    lower, upper = points[last], points[last + 1]
    tokens = interpolate(lower, upper)
    return Crossover("interpolated", tokens, tokens, lower, upper, crossings, points)


def interpolate(slower: Point, faster: Point) -> int:
    """The length between two points at which the line through them, in log-log, has ratio 1."""
    above, below = math.log(slower.ratio), math.log(faster.ratio)
    share = above / (above - below)
    low, high = math.log(slower.seq_len), math.log(faster.seq_len)
    return round(math.exp(low + share * (high - low)))


def confirm(found: Crossover, measure: Callable[[int], float | None]) -> Crossover:
    """Bisect a crossover until measured lengths enclose it within `NARROW`.

    measure  the ratio at a length, None where it could not be measured: the bisection ends there, unconfirmed

    >>> sharp = locate([Point(1000, 2.0), Point(4000, 0.5)])
    >>> done = confirm(sharp, lambda tokens: 1500 / tokens)
    >>> done.status, abs(done.tokens - 1500) <= 20, done.faster.seq_len / done.slower.seq_len <= NARROW
    ('confirmed', True, True)
    """
    if found.status != "interpolated" or found.slower is None or found.faster is None:
        return found
    lower, upper, points = found.slower, found.faster, list(found.points)
    for _ in range(MOST_STEPS):
        if upper.seq_len <= NARROW * lower.seq_len:
            break
        tokens = middle(lower.seq_len, upper.seq_len)
        if not lower.seq_len < tokens < upper.seq_len:
            break
        ratio = measure(tokens)
        if ratio is None:
            break
        point = Point(tokens, ratio)
        points.append(point)
        lower, upper = (point, upper) if ratio > 1 else (lower, point)
    confirmed = upper.seq_len <= NARROW * lower.seq_len or upper.seq_len - lower.seq_len <= 8
    points.sort(key=lambda point: point.seq_len)
    return Crossover(
        "confirmed" if confirmed else "interpolated",
        interpolate(lower, upper),
        found.interpolated,
        lower,
        upper,
        found.crossings,
        points,
    )


def middle(low: int, high: int) -> int:
    """The geometric mean of two lengths, to a multiple of 64 (of 8 below 1024): an odd length costs every kernel.

    >>> middle(2048, 4096), middle(128, 256)
    (2880, 184)
    """
    mean = math.sqrt(low * high)
    step = 64 if mean >= 1024 else 8
    return round(mean / step) * step


def sentence(found: Crossover) -> str:
    """The crossover in words, with what was measured on each side.

    >>> sentence(locate([Point(1024, 3.0), Point(4096, 1.5)]))
    'none up to 4096 tokens, where it takes 1.5 x the time of softmax'
    """
    if found.status == "not measured":
        return "not known: fewer than two lengths measured beside softmax"
    if found.status.startswith("slower"):
        assert found.slower is not None
        text = (
            f"none up to {found.slower.seq_len} tokens, where it takes {found.slower.ratio:.3g} x the time of softmax"
        )
    elif found.status == "faster throughout":
        assert found.faster is not None
        point = found.faster
        text = f"none in range: faster than softmax from {point.seq_len} tokens on ({point.ratio:.3g} x its time there)"
    else:
        assert found.slower is not None
        assert found.faster is not None
        text = (
            f"{found.tokens} tokens, {found.status}: {found.slower.ratio:.3g} x the time of softmax at "
            f"{found.slower.seq_len}, {found.faster.ratio:.3g} x at {found.faster.seq_len}"
        )
    return text + (f"; the ratio passes 1 {found.crossings} times" if found.crossings > 1 else "")
