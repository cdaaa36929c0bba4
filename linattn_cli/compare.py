"""Comparing a tensor with what it should be, and the budget an error is allowed.

Never a hand-tuned tolerance: in low precision the budget is twice the error of the serial recurrence run in
that precision, plus four units of its rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT64_VALUES = 1e-9
"""Relative error allowed in float64 for outputs and states."""

FLOAT64_GRADIENTS = 1e-8
"""Relative error allowed in float64 for gradients."""

ROUNDINGS = 4
"""Units of rounding added to the budget of a low precision."""


@dataclass(frozen=True)
class Scale:
    """What errors are relative to: the largest magnitude and the root mean square of a reference."""

    peak: float
    rms: float

    @classmethod
    def of(cls, reference: Tensor) -> Scale:
        """The scale of a reference; `ValueError` where it is empty or not finite."""
        if reference.numel() == 0:
            raise ValueError("a scale needs at least one number, got an empty tensor")
        wide = reference.detach().double()
        if not bool(wide.isfinite().all()):
            raise ValueError("a scale needs a finite reference, got infinities or NaN")
        return cls(wide.abs().max().item(), wide.square().mean().sqrt().item())


@dataclass(frozen=True)
class Comparison:
    """How far a tensor is from its reference.

    max_error  largest absolute difference, relative to the peak of the scale; None where not comparable
    rms_ratio  root mean square of the difference, relative to that of the scale; None where not comparable
    worst      coordinate of the largest difference, () where there is none
    got        the value found there
    expected   the value that belongs there
    problem    why the tensors cannot be compared, or ""
    """

    max_error: float | None
    rms_ratio: float | None
    worst: tuple[int, ...] = ()
    got: float | None = None
    expected: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Budget:
    """The errors allowed, each in the units of a `Comparison`."""

    max_error: float
    rms_ratio: float

    def allows(self, found: Comparison) -> bool:
        """Whether both errors are within the budget; what cannot be compared never is.

        >>> Budget(1e-3, 1e-3).allows(Comparison(5e-4, 2e-3))
        False
        """
        if found.problem or found.max_error is None or found.rms_ratio is None:
            return False
        return found.max_error <= self.max_error and found.rms_ratio <= self.rms_ratio


def compare(got: Tensor | None, expected: Tensor, *, dtype: torch.dtype, scale: Scale | None = None) -> Comparison:
    """Shape, dtype and finiteness first, then the largest error and the RMS ratio.

    expected  the reference, float64
    dtype     the dtype that `got` must have
    scale     what errors are relative to, the reference itself by default

    >>> compare(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), dtype=torch.float32).max_error
    0.25
    """
    if got is None:
        return Comparison(None, None, problem="missing")
    if got.shape != expected.shape:
        return Comparison(None, None, problem=f"shape {list(got.shape)}, expected {list(expected.shape)}")
    if got.dtype != dtype:
        return Comparison(None, None, problem=f"dtype {name_of(got.dtype)}, expected {name_of(dtype)}")
    scale = scale or Scale.of(expected)
    wide = got.detach().double()
    bad = ~wide.isfinite()
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        count = int(bad.sum())
        problem = f"{count} of {wide.numel()} values not finite"
        return Comparison(None, None, at, wide[at].item(), expected[at].item(), problem)
    difference = wide - expected.double()
    flat = int(difference.abs().argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
    return Comparison(
        _relative(difference.abs().max().item(), scale.peak),
        _relative(difference.square().mean().sqrt().item(), scale.rms),
        at,
        wide[at].item(),
        expected[at].item(),
    )


def budget(dtype: torch.dtype, serial: Comparison, *, gradient: bool) -> Budget:
    """The errors allowed in a dtype, given those of the serial recurrence in it.

    >>> budget(torch.float64, Comparison(0.0, 0.0), gradient=True).max_error
    1e-08
    """
    if dtype == torch.float64:
        fixed = FLOAT64_GRADIENTS if gradient else FLOAT64_VALUES
        return Budget(fixed, fixed)
    rounding = ROUNDINGS * torch.finfo(dtype).eps
    if serial.max_error is None or serial.rms_ratio is None:
        raise ValueError(f"the serial recurrence itself failed in {name_of(dtype)}: {serial.problem}")
    return Budget(2 * serial.max_error + rounding, 2 * serial.rms_ratio + rounding)


def name_of(dtype: torch.dtype) -> str:
    """A dtype as it is spelt on the command line.

    >>> name_of(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _relative(error: float, scale: float) -> float:
    if error == 0:
        return 0.0
    return error / scale if scale > 0 else math.inf
