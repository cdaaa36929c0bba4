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


@pytest.fixture
def linattn(capsys, monkeypatch):
    """Run a command line in this process, which trusts no code as it begins: its exit code, stdout and stderr."""
    from linattn_cli import own_mixer
    from linattn_cli.app import main

    monkeypatch.setattr(own_mixer, "_allowed", set())

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return left.value.code or 0, captured.out, captured.err

    return run
