"""Kernels onto the GPU, each with what calls it, from several threads at a time.

What calls a kernel is a C extension that Triton writes, has compiled, and imports; all of them have one name. Where
Python imports one for the second time, it fills the module that bears the name at the moment: of two imports at a time
one may find the other's function there, and would call its kernel by it for good. So an import that is used is made
alone. What takes long is the C compiler, 0.1 s each, and it can run side by side: an import that is thrown away leaves
the compiled extension in Triton's cache.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from triton.runtime import driver

_turn = threading.Condition()
_preparing = 0


@contextlib.contextmanager
def _beside_others() -> Iterator[None]:
    global _preparing
    with _turn:
        _preparing += 1
    try:
        yield
    finally:
        with _turn:
            _preparing -= 1
            _turn.notify_all()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nothing else is imported meanwhile, here or in another thread."""
    with _turn:
        _turn.wait_for(lambda: _preparing == 0)
        yield


def prepare(kernel: Any) -> None:
    """Have what calls a kernel compiled, as soon as the kernel is; nothing where that is done, or fails."""
    future = getattr(kernel, "future", None)
    if future is None:
        return
    with contextlib.suppress(Exception):  # a fault of the compiler's comes again where the kernel is loaded
        compiled = future.result()
        with _beside_others():
            driver.active.launcher_cls(compiled.src, compiled.metadata)


def load(kernel: Any) -> Any:
    """The kernel once it is compiled, on the GPU, and with what calls it: Triton leaves both to the first launch."""
    compiled = getattr(kernel, "result", lambda: kernel)()
    with alone():
        call = compiled.run  # a property that loads
    if compiled.module is None:  # it has failed before, and Triton keeps what raises that again
        call()
    return compiled
