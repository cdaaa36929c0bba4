"""Random draws, vectorised over the examples of a batch.

A batch consumes one matrix of uniforms, a row per example. Everything about an example is a function of its
row, so the first k examples of a batch of n are the batch of k, and no draw depends on how a library
implements bounded integers.
"""

from __future__ import annotations

import numpy as np


def uniforms(n: int, width: int, *, seed: int, stream: int, index: int) -> np.ndarray:
    """Uniforms in [0, 1), float64 [n, width], that depend on (seed, stream, index) alone."""
    for name, value in (("n", n), ("seed", seed), ("index", index)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"{name} must be an int >= 0, got {value!r}")
    return np.random.default_rng(np.random.SeedSequence([seed, stream, index])).random((n, width))


def integers(u: np.ndarray, high: int) -> np.ndarray:
    """Integers below `high`, with replacement, one per uniform.

    >>> integers(np.array([0.0, 0.5, 0.999]), 4).tolist()
    [0, 2, 3]
    """
    return (u * high).astype(np.int64)


def distinct(u: np.ndarray, high: int) -> np.ndarray:
    """An ordered draw without replacement of `u.shape[1]` integers below `high`, one row per row of `u`.

    The first steps of a Fisher-Yates shuffle, each done for the whole batch at once.

    >>> np.sort(distinct(np.array([[0.9, 0.1, 0.5]]), 3)).tolist()
    [[0, 1, 2]]
    """
    n, count = u.shape
    rows = np.arange(n)
    pool = np.tile(np.arange(high, dtype=np.int64), (n, 1))
    for i in range(count):
        j = i + integers(u[:, i], high - i)
        pool[rows, i], pool[rows, j] = pool[rows, j], pool[rows, i].copy()
    return pool[:, :count].copy()


def weighted_distinct(u: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """An ordered weighted draw without replacement of `count` indices, per row of `u` [n, len(weights)].

    Gumbel top-k: the largest `log w_i - log(-log u_i)` come in the law of drawing one after the other with
    probability proportional to w among those left.

    >>> weighted_distinct(np.array([[0.5, 0.5, 0.5]]), np.array([1.0, 4.0, 2.0]), 2).tolist()
    [[1, 2]]
    """
    with np.errstate(divide="ignore"):  # u = 0 is the smallest possible draw, and -inf sorts so
        gumbel = np.log(weights) - np.log(-np.log(u))
    # A full sort, not argpartition: with distinct scores its result is one, whatever the CPU's vector units.
    return np.argsort(-gumbel, axis=1, kind="stable")[:, :count]
