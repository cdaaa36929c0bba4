"""Real processes that are cheap to kill: a server that imported everything once, and forks a child a command.

A child runs one command line of `linattn` exactly as the entry point does, in a process group of its own, with its
streams in files. So a test can kill twenty of them in the time that starting one anew would take.

    with Workshop(tmp_path) as shop:
        job = shop.start("train", "--out", "run")
        job.kill()

`private=True` gives the server a mount namespace of its own, in which `shop.mount` puts small and read-only disks;
they are gone with it, whatever happens, and nobody else sees them. `shop.see` is how the test sees into them.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMESPACE = ["unshare", "--mount", "--map-root-user"]


def can_mount() -> bool:
    """Whether this machine lets us have a mount namespace with a small disk in it."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


@dataclass
class Job:
    """A command that was started; `code` is its exit code, minus the signal where one ended it."""

    shop: Workshop
    pid: int
    folder: Path
    code: int | None = field(default=None)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the command alone, not to what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> int:
        if self.code is None:
            self.code = self.shop.ask("wait", pid=self.pid, seconds=seconds)["code"]
        assert self.code is not None, f"still running after {seconds} s: {self.err}"
        return self.code

    @property
    def running(self) -> bool:
        if self.code is None:
            self.code = self.shop.ask("wait", pid=self.pid, seconds=0)["code"]
        return self.code is None

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")


class Workshop:
    """The server, seen from the test."""

    def __init__(self, folder: Path, *, private: bool = False) -> None:
        self.folder = folder
        self.count = 0
        # A GPU is of no use to a forked process.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [*(NAMESPACE if private else []), sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def ask(self, what: str, **message: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, **message}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the server is gone"
        return json.loads(answer)

    def start(
        self, *words: object, cwd: Path | None = None, memory: int | None = None, die_at: int | None = None
    ) -> Job:
        """Start a command.

        memory  bytes of address space it may have beyond what the server has
        die_at  kill -9 itself at the n-th time it changes something on the disk
        """
        self.count += 1
        folder = self.folder / f"job-{self.count}"
        folder.mkdir(parents=True)
        pid = self.ask(
            "start",
            words=[str(word) for word in words],
            folder=str(folder),
            cwd=str(cwd or folder),
            memory=memory,
            die_at=die_at,
        )["pid"]
        return Job(self, pid, folder)

    def run(self, *words: object, **options: Any) -> Job:
        """Start a command and wait for its end; whatever it was, no traceback was shown."""
        job = self.start(*words, **options)
        job.wait()
        assert "Traceback" not in job.err, job.err
        return job

    def mount(self, path: Path, *options: str) -> None:
        """Mount a tmpfs in the server's own namespace."""
        self.ask("sh", words=["mount", "-t", "tmpfs", *options, "tmpfs", str(path)])

    def sh(self, *words: object) -> None:
        self.ask("sh", words=[str(word) for word in words])

    def see(self, path: Path) -> Path:
        """A path of the server's namespace, as this process can open it."""
        return Path(f"/proc/{self.process.pid}/root{path}")


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    from linattn_cli import app, capacity_run, cuda_graph, evaluation, experiment, heldout, model, probes, training

    assert all((app, capacity_run, cuda_graph, evaluation, experiment, heldout, model, probes, training))
    _warm_up()
    children: dict[int, int] = {}
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        if message["what"] == "start":
            pid = os.fork()
            if pid == 0:
                _become(message)
            answer["pid"] = pid
        elif message["what"] == "wait":
            answer["code"] = _wait(children, message["pid"], message["seconds"])
        else:
            subprocess.run(message["words"], check=True)
        print(json.dumps(answer), flush=True)


def _warm_up() -> None:
    """Pay once for what the first command imports and looks up, such as the commit of the checkout."""
    sizes = {"d_model": 8, "heads": 1, "layers": 1, "ffn": 8, "d_head": 8}
    words = ["train", "--n-pairs", "1", "--steps", "1", "--batch-size", "1", "--device", "cpu", "--quiet"]
    words += [word for key, value in sizes.items() for word in ("--set", f"model.{key}={value}")]
    from linattn_cli.app import main

    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(SystemExit),
    ):
        main([*words, "--set", "train.eval_examples=2", "--out", f"{folder}/run"])


def _wait(children: dict[int, int], pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while pid not in children:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= deadline:
            return None
        else:
            time.sleep(0.005)
    return children[pid]


def _become(message: dict[str, Any]) -> None:
    """The child: never returns."""
    import multiprocessing

    code = 70
    try:
        os.setpgid(0, 0)
        folder = Path(message["folder"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(message["cwd"])
        # Workers of a sweep are forked as well; spawned ones would import torch anew.
        spawn = multiprocessing.get_context
        multiprocessing.get_context = lambda method=None: spawn("fork" if method == "spawn" else method)  # type: ignore
        if message["memory"] is not None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + message["memory"],) * 2)
        if message["die_at"] is not None:
            _die_at(message["die_at"])
        from linattn_cli.app import main

        main(message["words"])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate", "os.link"}


def _die_at(number: int) -> None:
    """Kill this process just before the n-th change of the disk that Python announces."""
    seen = 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "open":
            path, _, flags = arguments
            changing = isinstance(path, str) and bool(flags & (os.O_WRONLY | os.O_RDWR)) and "/dev/" not in path
        else:
            changing = event in CHANGES
        if changing:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)


if __name__ == "__main__":
    _serve()
