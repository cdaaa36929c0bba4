"""Every kernel compiles for real GPUs, fits them, and Triton's own launchers take what `launch` gives them.

The interpreter shows none of that. No kernel runs here: the driver library does nothing (without_gpu.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from linattn_cli.kernels.registry import MIXERS

pytest.importorskip("triton", reason="triton has no wheel for this system")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="Triton's launchers need a C compiler")

ROOT = Path(__file__).parents[2]
LINEAR = [name for name in MIXERS if name != "softmax"]


@pytest.mark.parametrize(
    ("capability", "shared"), [(90, 232_448), (86, 101_376)], ids=["data center, Hopper", "consumer, Ampere"]
)
def test_kernels_compile_fit_and_launch(tmp_path, capability, shared) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.without_gpu", tmp_path, str(capability), str(shared), ",".join(LINEAR)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    launched = json.loads(ran.stdout)
    assert list(launched) == LINEAR
    assert min(launched.values()) >= 3, "a forward, a backward and a decoding step"
