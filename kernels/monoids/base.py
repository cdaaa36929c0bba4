"""What every associative operator has in common: a name, a neutral element, a combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Monoid:
    """An associative operator on segments of tokens; an element is a NamedTuple of tensors.

    The fields of an element share leading dimensions (batch, time, heads, ...), which `combine` broadcasts
    over, so that what is held once per key head has a group dimension of 1 beside one of G.

    combine   `combine(A, B)` summarises segment A followed by segment B
    identity  `identity(x)` is the summary of no token at all, shaped like the element x
    """

    name: str
    combine: Callable[[Any, Any], Any]
    identity: Callable[[Any], Any]


def outer(a: Tensor, b: Tensor) -> Tensor:
    """`a b^T`: `[..., M]`, `[..., N]` -> `[..., M, N]`."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """`a . b`, kept as a last dimension of 1: `[..., M]`, `[..., M]` -> `[..., 1]`."""
    return (a * b).sum(-1, keepdim=True)


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """`matrix^T vector`: `[..., M, N]`, `[..., M]` -> `[..., N]`; how every state is read."""
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


def scale(factor: Tensor, matrix: Tensor) -> Tensor:
    """A scalar per segment, `[...]`, times a matrix per segment, `[..., M, N]`."""
    return factor.unsqueeze(-1).unsqueeze(-1) * matrix


def decay_of(log_decay: Tensor | None, like: Tensor) -> Tensor:
    """`exp(log_decay)`, or ones, for tokens shaped `[..., D]` as `like`: `[...]`."""
    if log_decay is None:
        return torch.ones(like.shape[:-1], dtype=like.dtype, device=like.device)
    return log_decay.to(like.dtype).exp()


def neutral(element: NamedTuple, ones: tuple[str, ...]) -> Any:
    """An element of zeros, except for the decays named in `ones`, which multiply."""
    fields = {
        name: torch.ones_like(x) if name in ones else torch.zeros_like(x) for name, x in element._asdict().items()
    }
    return element._replace(**fields)
