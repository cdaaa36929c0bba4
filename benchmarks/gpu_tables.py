"""Run the sweeps of the papers' tables on every GPU here for a while, or go on with them.

    python benchmarks/gpu_tables.py --seconds 540 [--out benchmarks/sweeps] [--only hla-table,copy-table]

Two sweeps at a time on a GPU, so that one computes while the next one starts; the cheapest come first. Every cell
is kept as it ends, in OUT/RECIPE/sweep.sqlite, and a further call runs what is missing. The figures in
recipes/README.md come from `linattn capacity-sweep --report --out OUT/RECIPE`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from linattn_cli.capacity_store import SweepFolder
from linattn_cli.output import CliError

COSTS = {
    "vla-table": 470,
    "vla-ablation": 350,
    "overload": 350,
    "zoology-mqar": 200,
    "retention": 130,
    "hla-table": 100,
    "copy-table": 50,
}
"""Seconds of an H200 that each recipe may take, from the first cells of each; for sharing them out only."""

TRACKS_PER_GPU = 2


def share(recipes: list[str], tracks: int) -> list[list[str]]:
    """Recipes for each track: the dearest first to the one that has least, then the cheapest first within it."""
    queues: list[list[str]] = [[] for _ in range(tracks)]
    for recipe in sorted(recipes, key=lambda name: -COSTS[name]):
        min(queues, key=lambda queue: sum(COSTS[name] for name in queue)).append(recipe)
    return [queue[::-1] for queue in queues]


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name: every GPU here, or those of them that it names already."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def count(out: Path, recipe: str) -> str:
    """Cells that are over, of all."""
    try:
        with SweepFolder.look(out / recipe) as folder:
            total = len(folder.rows())
            return f"{total - len(folder.missing())} of {total}"
    except CliError:  # there is no folder, or not all of it yet
        return "no"


class Track(threading.Thread):
    """Runs its recipes one after the other, until all are done or the time is up."""

    def __init__(self, recipes: list[str], gpu: str | None, options: argparse.Namespace) -> None:
        super().__init__()
        self.recipes, self.gpu, self.options = recipes, gpu, options
        self.process: subprocess.Popen[bytes] | None = None
        self.over = False

    def run(self) -> None:
        for recipe in self.recipes:
            if self.over:
                return
            began = time.monotonic()
            with (self.options.out / f"{recipe}.log").open("ab") as log:
                self.process = subprocess.Popen(self.command(recipe), stdout=log, stderr=log, env=self.environment())
                if self.over:  # the time was up while it started
                    self.stop()
                code = self.process.wait()
            took = time.monotonic() - began
            print(f"{recipe}: exit {code} after {took:.0f} s, {count(self.options.out, recipe)} cells", flush=True)

    def command(self, recipe: str) -> list[str]:
        options, folder = self.options, self.options.out / recipe
        command = [sys.executable, "-m", "linattn_cli", "capacity-sweep", "--recipe", recipe, "--out", str(folder)]
        command += ["--workers", str(options.workers), "--quiet", *options.more]
        command += ["--device", "cpu"] if self.gpu is None else ["--device", "cuda", "--streams", str(options.streams)]
        return command + (["--resume"] if (folder / "sweep.sqlite").exists() else [])

    def environment(self) -> dict[str, str]:
        return os.environ | ({} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu})

    def stop(self) -> None:
        self.over = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="when to stop; sweeps need some 10 s more to end")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/sweeps"))
    parser.add_argument("--only", default=",".join(COSTS), help="which recipes")
    parser.add_argument("--workers", type=int, default=4, help="processes of a sweep; two sweeps share a GPU")
    parser.add_argument("--streams", type=int, default=8, help="cells that a process trains side by side")
    parser.add_argument("more", nargs="*", help="further options of capacity-sweep, after --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    recipes, found = options.only.split(","), gpus()
    queues = share(recipes, TRACKS_PER_GPU * max(1, len(found)))
    tracks = [
        Track(queue, found[index % len(found)] if found else None, options)
        for index, queue in enumerate(queues)
        if queue
    ]
    for track in tracks:
        track.start()
    told = time.monotonic()
    while any(track.is_alive() for track in tracks) and time.monotonic() < deadline:
        time.sleep(0.5)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print("; ".join(f"{recipe} {count(options.out, recipe)}" for recipe in recipes), flush=True)
    for track in tracks:
        track.stop()
    for track in tracks:
        track.join()


if __name__ == "__main__":
    main()
