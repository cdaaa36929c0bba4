"""Property tests over what a user or a stranger may hand in.

In the suite they are deterministic: the same examples every time. `LINATTN_FUZZ=50 pytest tests/fuzz` tries fifty
times as many, new ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("LINATTN_FUZZ", "1"))


def examples(count: int) -> settings:
    """Settings of a test that tries `count` examples in the suite."""
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
