"""Run the sweeps of the papers' tables on every GPU here for a while, or go on with them.

    python benchmarks/gpu_tables.py --seconds 540 [--out benchmarks/sweeps] [--only hla-table,copy-table]

Two sweeps at a time over all GPUs, so that one computes while the next one starts or the other one's last cells run
alone. Every cell is kept as it ends, in OUT/RECIPE/sweep.sqlite, and a further call runs what is missing. The figures
in recipes/README.md come from `linattn capacity-sweep --report --out OUT/RECIPE`.
"""

from __future__ import annotations

import argparse
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from linattn_cli.capacity_store import SweepFolder
from linattn_cli.output import CliError

RECIPES = ("vla-table", "vla-ablation", "overload", "hla-table", "zoology-mqar", "retention", "copy-table")
"""The dearest first, so that what ends last is small."""

LONG = ("overload", "zoology-mqar", "retention")
"""Recipes of up to 769 tokens: half as many of their cells at once fill the GPU, and its memory."""

AT_ONCE = 2


def count(out: Path, recipe: str) -> str:
    """Cells that are over, of all."""
    try:
        with SweepFolder.look(out / recipe) as folder:
            total = len(folder.rows())
            return f"{total - len(folder.missing())} of {total}"
    except CliError:  # there is no folder, or not all of it yet
        return "no"


class Lane(threading.Thread):
    """Runs one recipe after the other, until none is left or the time is up."""

    def __init__(self, recipes: queue.SimpleQueue[str], options: argparse.Namespace) -> None:
        super().__init__()
        self.recipes, self.options = recipes, options
        self.process: subprocess.Popen[bytes] | None = None
        self.over = False

    def run(self) -> None:
        while not self.over:
            try:
                recipe = self.recipes.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            with (self.options.out / f"{recipe}.log").open("ab") as log:
                self.process = subprocess.Popen(self.command(recipe), stdout=log, stderr=log)
                if self.over:  # the time was up while it started
                    self.stop()
                code = self.process.wait()
            took = time.monotonic() - began
            print(f"{recipe}: exit {code} after {took:.0f} s, {count(self.options.out, recipe)} cells", flush=True)

    def command(self, recipe: str) -> list[str]:
        options, folder = self.options, self.options.out / recipe
        streams = options.streams // 2 if recipe in LONG else options.streams
        command = [sys.executable, "-m", "linattn_cli", "capacity-sweep", "--recipe", recipe, "--out", str(folder)]
        command += ["--workers", str(options.workers), "--quiet", *options.more]
        command += ["--device", "cpu"] if options.cpu else ["--device", "cuda", "--streams", str(streams)]
        return command + (["--resume"] if (folder / "sweep.sqlite").exists() else [])

    def stop(self) -> None:
        self.over = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="when to stop; sweeps need some 10 s more to end")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/sweeps"))
    parser.add_argument("--only", default=",".join(RECIPES), help="which recipes, in which order")
    parser.add_argument("--workers", type=int, default=4, help="processes of a sweep, spread over the GPUs")
    parser.add_argument("--streams", type=int, default=8, help="cells that a process trains side by side")
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("more", nargs="*", help="further options of capacity-sweep, after --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    recipes: queue.SimpleQueue[str] = queue.SimpleQueue()
    for recipe in options.only.split(","):
        recipes.put(recipe)
    lanes = [Lane(recipes, options) for _ in range(AT_ONCE)]
    for lane in lanes:
        lane.start()
    told = time.monotonic()
    while any(lane.is_alive() for lane in lanes) and time.monotonic() < deadline:
        time.sleep(0.5)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print("; ".join(f"{recipe} {count(options.out, recipe)}" for recipe in options.only.split(",")), flush=True)
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        lane.join()


if __name__ == "__main__":
    main()
