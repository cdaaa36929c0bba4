"""Jacobians of a step, `J_t = dS_t/dS_{t-1}`, measured on the step itself by forward and reverse differentiation.

The step is one token of the mixer's own serial recurrence, in float64, with what evolves without S (a
penalty, the sum of features that a ratio divides by) held fixed. Where S is one matrix and the step treats all of
its columns alike, J_t is the K x K matrix of that, built column by column; for the moments of a higher order it is
the map of all of them jointly, known by its products with vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from linattn_cli.kernels.types import FormOutput
from linattn_cli.probe_krylov import Measured, largest_singular_value, spectral_radius
from linattn_cli.probe_states import A, Recurrence, leaves, memory, with_leaves

TINY = 1e-300


@dataclass
class Step:
    """One step for a batch of tokens and states, differentiable in some tensors of the state.

    names      the tensors it is differentiated in
    symmetric  of these, the symmetric ones: only symmetric changes count
    """

    recurrence: Recurrence
    tokens: Mapping[str, Tensor]
    before: Any
    names: list[str]
    symmetric: tuple[str, ...] = ()

    def run(self, state: Any) -> FormOutput:
        return self.recurrence.run(self.tokens, state, impl="reference")

    def forward(self, tangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`J X`, by forward differentiation."""
        have = leaves(self.before)
        with torch.no_grad(), forward.dual_level():
            dual = {name: forward.make_dual(have[name], x) for name, x in tangents.items()}
            after = leaves(self.run(with_leaves(self.before, dual)).state)
            found = {name: forward.unpack_dual(after[name]).tangent for name in self.names}
            return {name: torch.zeros_like(have[name]) if x is None else x for name, x in found.items()}

    def reverse(self, cotangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`J^T Y`, by reverse differentiation."""
        have = leaves(self.before)
        inputs = {name: have[name].detach().requires_grad_() for name in self.names}
        with torch.enable_grad():
            after = leaves(self.run(with_leaves(self.before, inputs)).state)
        return pull_back(after, cotangents, inputs)

    def flat(self) -> FlatStep:
        return FlatStep(self, Layout.of(self.before, self.names))


def pull_back(
    after: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    reached = [name for name in cotangents if after[name].requires_grad]
    found = torch.autograd.grad(
        [after[name] for name in reached],
        list(inputs.values()),
        [cotangents[name] for name in reached],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), found, strict=True)
    }


@dataclass(frozen=True)
class Layout:
    """Tensors of a state as vectors `[N, D]`, one for each sequence and key head, and back."""

    shapes: dict[str, torch.Size]
    heads: int

    @classmethod
    def of(cls, state: Any, names: list[str]) -> Layout:
        shapes = {name: leaves(state)[name].shape for name in names}
        # Moments may be held once per query head; these belong to the key head they read.
        return cls(shapes, min(shape[1] for shape in shapes.values()))

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [tensors[name].reshape(shape[0] * self.heads, -1) for name, shape in self.shapes.items()]
        return torch.cat(parts, dim=1)

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        sizes = [shape.numel() // (shape[0] * self.heads) for shape in self.shapes.values()]
        parts = x.split(sizes, dim=1)
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def sizes(self, state: Any) -> Tensor:
        """The norm of the tensor that each entry belongs to, `[N, D]`; the largest of them for one that is zero."""
        parts = {name: leaves(state)[name].reshape(shape[0] * self.heads, -1) for name, shape in self.shapes.items()}
        sizes = torch.cat([x.norm(dim=1, keepdim=True).expand_as(x) for x in parts.values()], dim=1)
        largest = sizes.amax(1, keepdim=True)
        return torch.where(sizes > 0, sizes, torch.where(largest > 0, largest, 1.0))


@dataclass(frozen=True)
class FlatStep:
    """A step's Jacobian on vectors `[N, D]`."""

    step: Step
    layout: Layout

    def apply(self, x: Tensor) -> Tensor:
        return self._of(self.step.forward(self._symmetric(self.layout.unflatten(x))))

    def adjoint(self, x: Tensor) -> Tensor:
        return self._of(self.step.reverse(self._symmetric(self.layout.unflatten(x))))

    def _of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.layout.flatten(self._symmetric(tensors))

    def _symmetric(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: (x + x.mT) / 2 if name in self.step.symmetric else x for name, x in tensors.items()}

    def start(self, seed: int = 0) -> Tensor:
        rows = sum(shape.numel() for shape in self.layout.shapes.values())
        like = next(iter(leaves(self.step.before).values()))
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, generator=generator, dtype=torch.float64).to(like.device)
        shapes = self.layout.shapes
        parts = x.split([shape.numel() for shape in shapes.values()])
        return self._of({name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)})

    def norm(self, *, most: int = 24, tolerance: float = 1e-9) -> Measured:
        """Spectral norms, `[N]`."""
        return largest_singular_value(self.apply, self.adjoint, self.start(), most=most, tolerance=tolerance)

    def radius(self) -> Measured:
        """Spectral radii, `[N]`; in units of the size of each moment, which changes no eigenvalue.

        In other units one moment would dwarf the others, and an eigenvalue that is there twice would cost half the
        digits of that ratio.
        """
        with torch.no_grad():
            scale = self.layout.sizes(self.step.run(self.step.before).state)
        return spectral_radius(lambda x: self.apply(x * scale) / scale, self.start())

    def adjoint_error(self) -> float:
        """Largest `|<y, J x> - <J^T y, x>|` relative to `|J x| |y|`: forward against reverse differentiation."""
        x, y = self.start(1), self.start(2)
        image = self.apply(x)
        difference = (y * image).sum(1) - (self.adjoint(y) * x).sum(1)
        size = image.norm(dim=1) * y.norm(dim=1)
        return float((difference.abs() / size.clamp_min(TINY)).max())


def acts_on_columns(step: Step) -> bool:
    """Whether the state is one matrix of which a step treats every column alike, so that a K x K matrix says all."""
    if len(step.names) != 1:
        return False
    (name,) = step.names
    S = leaves(step.before)[name]
    if S.dim() != 4:
        return False
    return matrix_error(step, build_matrix(step)) < 1e-6


def build_matrix(step: Step) -> Tensor:
    """J_t as `[N, H, K, K]`, from what the step does to every unit vector."""
    (name,) = step.names
    S = leaves(step.before)[name]
    key_dim, value_dim = S.shape[2:]
    eye = torch.eye(key_dim, dtype=S.dtype, device=S.device)
    blocks = []
    for start in range(0, key_dim, value_dim):
        block = eye[:, start : start + value_dim]
        tangent = torch.nn.functional.pad(block, (0, value_dim - block.shape[1])).expand_as(S).contiguous()
        blocks.append(step.forward({name: tangent})[name][..., : block.shape[1]])
    return torch.cat(blocks, dim=-1)


def matrix_error(step: Step, J: Tensor) -> float:
    """How far `J X` is from what the step makes of a random X, and `J^T Y` from its reverse, relative."""
    (name,) = step.names
    S = leaves(step.before)[name]
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(S.shape, generator=generator, dtype=S.dtype).to(S.device) for _ in range(2))
    pairs = ((J @ X, step.forward({name: X})[name]), (J.mT @ Y, step.reverse({name: Y})[name]))
    size = torch.linalg.matrix_norm(J).amax().clamp_min(1.0) * X.shape[-2] ** 0.5
    errors = [(ours - theirs).flatten(2).norm(dim=-1).max() / size for ours, theirs in pairs]
    return float(torch.stack(errors).nan_to_num(float("inf")).max())


def matrix_radius(J: Tensor) -> Tensor:
    """Spectral radii of `[..., K, K]`, by all eigenvalues."""
    return torch.linalg.eigvals(J).abs().amax(-1)


def matrix_norm(J: Tensor) -> Tensor:
    """Spectral norms of `[..., K, K]`, by singular value decomposition."""
    return torch.linalg.svdvals(J)[..., 0]


def joint_with_penalty(recurrence: Recurrence, tokens: Mapping[str, Tensor], before: Any) -> Step:
    """The step of A and S together: A moves on its own, S with it.

    A young inverse is updated by Sherman-Morrison as in the paper, and not taken from its mass anew.
    """
    young = _zero_counters(before)
    return Step(recurrence, tokens, young, [A, *memory(before)], symmetric=(A,))


def _zero_counters(state: Any) -> Any:
    if isinstance(state, int):
        return 0
    fields = getattr(state, "_fields", ())
    return type(state)(*(_zero_counters(getattr(state, name)) for name in fields)) if fields else state


def closed_form(cosine: Tensor) -> Tensor:
    """The norm of `I - a k^T` for unit a and k with `a.k = cosine`; what measured norms are set beside.

    >>> closed_form(torch.tensor([1.0, -1.0])).tolist()
    [1.0, 2.0]
    """
    return (1 + (5 - 4 * cosine).clamp_min(0).sqrt()) / 2
