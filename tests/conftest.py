"""Settings of every test run."""

from __future__ import annotations

import contextlib
import signal

import pytest

from linattn_cli.threads import share_the_cores

share_the_cores()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a run in the background; the commands under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402 - OpenMP reads its settings when torch is imported

if not torch.cuda.is_available():
    # Triton decides when it is first imported whether its own library can be interpreted; only the tests of the
    # kernels (test_triton.py) then turn the interpreter on.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with contextlib.suppress(ImportError):
            import triton.language  # noqa: F401
