"""A terminal for tests."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import textwrap


def at_terminal(code: str, columns: int = 60, **env: str) -> str:
    """What code prints when its stdout and stderr are a terminal."""
    main, sub = pty.openpty()
    fcntl.ioctl(sub, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=sub,
        stderr=sub,
        stdin=sub,
        env={**{k: v for k, v in os.environ.items() if k != "COLUMNS"}, "TERM": "xterm", **env},
    )
    os.close(sub)
    chunks = []
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # EIO: how Linux says that the other end was closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(main)
    assert process.wait(timeout=60) == 0
    return b"".join(chunks).decode()
