"""Singular values and eigenvalues of linear maps that are only known by what they do to a vector.

A step's Jacobian on a joint state of moments has thousands of rows but few different singular values and
eigenvalues, so that a Krylov space of a handful of vectors holds the extreme ones to rounding. Each result comes
with the residual that says how far it can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Measured:
    """values and their relative residuals, both `[N]`; zero residual means an invariant space was found."""

    values: Tensor
    residuals: Tensor


class _Basis:
    """An orthonormal basis that grows, `N` of them at once, with the coefficients of the map in it."""

    def __init__(self, start: Tensor) -> None:
        self.vectors = [start / start.norm(dim=-1, keepdim=True)]
        self.columns: list[Tensor] = []

    def extend(self, image: Tensor) -> Tensor:
        """Take in the image of the last vector; returns the size of what was new in it, `[N]`."""
        rest = image
        column = torch.zeros(image.shape[0], len(self.vectors), dtype=image.dtype)
        for _ in range(2):  # a second pass removes what rounding left of the first
            for index, vector in enumerate(self.vectors):
                along = (vector * rest).sum(-1)
                column[:, index] += along.cpu()
                rest = rest - along.unsqueeze(-1) * vector
        size = rest.norm(dim=-1)
        # Where nothing is left the space is invariant: a vector of zeros adds nothing but eigenvalues of zero.
        exhausted = size <= 1e-13 * image.norm(dim=-1)
        self.vectors.append(torch.where(exhausted, 0.0, 1 / size.clamp_min(1e-300)).unsqueeze(-1) * rest)
        self.columns.append(column)
        return torch.where(exhausted, 0.0, size).cpu()

    def matrix(self) -> Tensor:
        """The map in the basis, `[N, m, m]`; below the diagonal the sizes of what was new."""
        m = len(self.columns)
        small = torch.zeros(self.columns[0].shape[0], m, m, dtype=self.columns[0].dtype)
        for j, column in enumerate(self.columns):
            small[:, : column.shape[1], j] = column
        return small


def largest_singular_value(
    apply: Map, adjoint: Map, start: Tensor, *, most: int = 24, tolerance: float = TOLERANCE
) -> Measured:
    """Spectral norms of `N` linear maps at once, by Lanczos iteration on `J^T J`.

    start  `[N, D]`, any vectors that are not orthogonal to what is looked for: random ones. `most` bounds the
    dimension of the space. The values never exceed the true norms, the residual bounds the distance to a
    singular value.

    >>> weights = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    >>> found = largest_singular_value(lambda x: weights * x, lambda x: weights * x, torch.ones_like(weights))
    >>> round(float(found.values), 9)
    3.0
    """
    basis = _Basis(start)
    for _ in range(most):
        new = basis.extend(adjoint(apply(basis.vectors[-1])))
        small = basis.matrix()
        small = torch.triu(small) + torch.triu(small, 1).mT
        squares, vectors = torch.linalg.eigh(small)
        largest = squares[:, -1].clamp_min(0.0)
        residuals = new * vectors[:, -1, -1].abs() / (2 * largest.clamp_min(1e-300))
        if not (residuals > tolerance).any():
            break
    return Measured(largest.sqrt(), residuals)


def spectral_radius(apply: Map, start: Tensor, *, most: int = 8, tolerance: float = TOLERANCE) -> Measured:
    """Spectral radii of `N` linear maps at once, by Arnoldi iteration.

    The residual is the size of the last vector that was new, relative to the map: at zero the space is
    invariant, and holds every eigenvalue that a random start does not miss, since it always reaches the degree
    of the minimal polynomial.

    >>> angle = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    >>> found = spectral_radius(lambda x: 2 * x @ angle.T, torch.tensor([[1.0, 0.5]], dtype=torch.float64))
    >>> round(float(found.values), 9)
    2.0
    """
    basis = _Basis(start)
    sizes: list[Tensor] = []
    for _ in range(most):
        sizes.append(basis.extend(apply(basis.vectors[-1])))
        small = basis.matrix()
        for index, size in enumerate(sizes[:-1]):
            small[:, index + 1, index] = size
        scale = torch.linalg.matrix_norm(small).clamp_min(1e-300)
        residuals = sizes[-1] / scale
        if not (residuals > tolerance).any():
            break
    return Measured(torch.linalg.eigvals(small).abs().amax(-1), residuals)
