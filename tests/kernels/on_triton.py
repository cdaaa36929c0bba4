"""Where the tests of the Triton kernels run: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = torch.finfo(torch.float32).eps


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Kernels run in the interpreter, unless there is a GPU."""
    if not GPU:
        patch.setenv("TRITON_INTERPRET", "1")


@contextlib.contextmanager
def kernels_imported() -> Iterator[None]:
    """Around the first import of kernels, when Triton decides how they run; tests are skipped where it is not there."""
    pytest.importorskip("triton", reason="triton has no wheel for this system")  # imported by conftest.py
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        yield


def compile_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """No rehearsal of what a GPU has not compiled yet: its calls would be counted as well."""
    import triton

    patch.delattr(triton, "AsyncCompileMode", raising=False)
