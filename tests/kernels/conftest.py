"""What the tests of the Triton kernels share."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.kernels.on_triton import interpret


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, kernels run in the interpreter, in the tests that ask for it and in no other."""
    interpret(monkeypatch)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch` takes the way it takes on a GPU, with no kernel compiled yet; the kernels are the tests' own."""
    from linattn_cli.kernels import launch  # the tests that ask for this have imported it

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU tensor's device
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
