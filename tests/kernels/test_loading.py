"""What calls the kernels is prepared side by side and imported one at a time.

There is no GPU and no C compiler here: what they would do is recorded instead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.on_triton import kernels_imported

with kernels_imported():
    from linattn_cli.kernels import loading
    from linattn_cli.kernels.launch import compiled_together, launch

WAIT = 10  # seconds, for what takes none


class Watch:
    """What happens at the same time: C compilers at work, and imports."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = {"preparing": 0, "loading": 0}
        self.seen: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def doing(self, what: str):
        self._change(what, 1)
        time.sleep(0.003)
        yield
        self._change(what, -1)

    def _change(self, what: str, by: int) -> None:
        with self.lock:
            self.now[what] += by
            self.seen.add((self.now["preparing"], self.now["loading"]))


class Compiling:
    """A kernel of Triton's that is compiled already, in a thread."""

    arg_names = ("p_x",)
    specialised = ()
    src = metadata = None
    module = "on the GPU"

    def __init__(self, watch: Watch) -> None:
        self.watch, self.future = watch, Future()
        self.future.set_result(self)

    def warmup(self, *_, **__):
        return self

    def result(self):
        return self

    @property
    def run(self):
        with self.watch.doing("loading"):
            pass

    def __getitem__(self, grid):
        def first_launch(*_, **__):
            _ = self.run
            return {(*grid, 1, 1)[:3]: lambda *_: None}

        return first_launch if len(grid) == 1 else lambda *_: None


@pytest.fixture
def watch(monkeypatch) -> Watch:
    watch = Watch()

    def launcher(*_):
        with watch.doing("preparing"):
            pass

    monkeypatch.setattr(loading, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher)))
    return watch


def test_imports_that_are_used_are_alone(watch, on_a_gpu) -> None:
    """Six threads with kernels of their own, half of which compile them together."""
    x, start = torch.zeros(4), threading.Barrier(6)

    def launches(kernels):
        for kernel in kernels:
            launch(kernel, (2,), x, num_warps=4)

    def caller(together: bool) -> None:
        kernels = [Compiling(watch) for _ in range(6)]
        start.wait(WAIT)
        if together:
            compiled_together(launches, kernels)
        else:
            launches(kernels)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(caller, [True, False] * 3))
    assert (0, 1) in watch.seen
    assert all(loads <= 1 and not (preparing and loads) for preparing, loads in watch.seen)


def test_c_compilers_run_side_by_side(watch) -> None:
    both = threading.Barrier(2)
    loading.driver.active.launcher_cls = lambda *_: both.wait(WAIT)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(loading.prepare, [Compiling(watch), Compiling(watch)]))
    assert not both.broken


def test_a_kernel_is_prepared_once_it_is_compiled(watch) -> None:
    kernel = Compiling(watch)
    kernel.future = Future()
    with ThreadPoolExecutor(1) as pool:
        prepared = pool.submit(loading.prepare, kernel)
        assert not watch.seen
        kernel.future.set_result(kernel)
        prepared.result(WAIT)
    assert watch.seen == {(1, 0), (0, 0)}


def test_a_fault_is_left_to_the_load(watch) -> None:
    broken = Compiling(watch)
    broken.future = Future()
    broken.future.set_exception(ArithmeticError("ptxas failed"))
    loading.prepare(broken)
    loading.prepare(SimpleNamespace())  # compiled before: there is nothing to prepare
    assert not watch.seen
    assert loading.load(Compiling(watch)).src is None
    assert watch.seen == {(0, 1), (0, 0)}
