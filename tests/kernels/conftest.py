"""What the tests of the Triton kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, kernels run in the interpreter, in the tests that ask for it and in no other."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
