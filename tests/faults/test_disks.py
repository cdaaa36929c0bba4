"""Disks that are full or read-only, and machines without memory: real ones, as small as the test needs.

Full and read-only disks are tmpfs mounts in a namespace of the test's own, which needs `unshare`; as root one passes
every permission, so nothing less than the mount would refuse a write. Out of memory is a limit on the address space.
"""

from __future__ import annotations

import json
import sqlite3

import pytest

from linattn_cli.checkpoints import list_steps, load
from linattn_cli.runs import read_metrics
from tests.faults.workshop import Workshop, can_mount
from tests.sweep_cells import cut_off_a_write

pytestmark = pytest.mark.skipif(not can_mount(), reason="needs unshare --mount --map-root-user")

SMALL = [
    *("--set", "model.d_model=32", "--set", "model.heads=1", "--set", "model.layers=1", "--set", "model.ffn=32"),
    *("--set", "task.vocab_size=16", "--batch-size", "2", "--device", "cpu", "--set", "train.eval_examples=8"),
    *("--set", "train.log_every=1", "--set", "model.max_positions=16", "--quiet"),
]
TRAIN = ["train", *SMALL, "--d-head", "8", "--n-pairs", "1", "--checkpoint-every", "1"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with Workshop(tmp_path_factory.mktemp("shop"), private=True) as shop:
        yield shop


@pytest.fixture
def disk(shop, tmp_path):
    """A folder, and how to mount a disk with the given options there."""
    path = tmp_path / "disk"
    path.mkdir()
    yield path, lambda *options: shop.mount(path, *options)
    shop.sh("umount", "-l", path)


def error_of(job):
    document = json.loads(job.out)
    assert document["error"]["message"] in job.err
    return document["error"]


def test_a_disk_that_fills_up_while_training(shop, disk):
    path, mount = disk
    mount("-o", "size=300k")
    job = shop.run(*TRAIN, "--steps", 20, "--out", path / "run", "--json")
    assert job.code == 0, "two checkpoints and one being written fit"
    shop.sh("rm", "-r", path / "run")

    shop.sh("dd", "if=/dev/zero", f"of={path / 'ballast'}", "bs=1k", "count=150", "status=none")
    job = shop.run(*TRAIN, "--steps", 20, "--out", path / "run", "--json")
    assert job.code == 4, job.err
    error = error_of(job)
    assert error["type"] == "disk"
    assert f"cannot write {path / 'run'}" in error["message"]
    assert "No space left on device" in error["message"]
    assert "--resume" in error["hint"]
    seen = shop.see(path / "run")
    (kept,) = list_steps(seen)[-1:]
    assert load(seen, kept).step == kept, "the last good checkpoint is whole"
    assert read_metrics(seen)[kept - 1]["step"] == kept

    shop.sh("rm", path / "ballast")
    job = shop.run(*TRAIN, "--steps", 20, "--out", path / "run", "--resume")
    assert job.code == 0, job.err
    assert [row["step"] for row in read_metrics(seen)] == list(range(1, 21))


def test_a_disk_that_is_full_from_the_start(shop, disk):
    path, mount = disk
    mount("-o", "size=4k")
    shop.sh("dd", "if=/dev/zero", f"of={path / 'ballast'}", "bs=4k", "count=1", "status=none")
    for words in ([*TRAIN, "--steps", 1], ["capacity-sweep", *SMALL, "--models", "linear", "--workers", "1"]):
        job = shop.run(*words, "--out", path / "run")
        assert job.code == 4, job.err
        assert "No space left on device" in job.err
        shop.sh("rm", "-rf", path / "run")


def test_a_disk_that_fills_up_while_sweeping(shop, disk, tmp_path):
    path, mount = disk
    mount("-o", "size=150k")
    words = ["capacity-sweep", *SMALL, "--models", "linear", "--n-pairs", "1", "--steps", "2", "--workers", "1"]
    words += ["--d-heads", "8", "--seeds", ",".join(map(str, range(12)))]
    job = shop.run(*words, "--out", path / "sweep", "--json")
    assert job.code == 4, job.err
    assert error_of(job)["type"] == "disk"
    shop.sh("mount", "-o", "remount,size=4m", path)
    job = shop.run("capacity-sweep", "--resume", "--out", path / "sweep", "--quiet", "--json")
    assert job.code == 0, job.err
    copy = tmp_path / "sweep.sqlite"
    copy.write_bytes(shop.see(path / "sweep" / "sweep.sqlite").read_bytes())
    database = sqlite3.connect(copy)
    assert database.execute("SELECT count(*) FROM cells WHERE status = 'finished'").fetchone() == (12,)
    database.close()


def test_a_sweep_is_read_where_it_cannot_be_written(shop, disk, tmp_path):
    path, mount = disk
    words = ["capacity-sweep", *SMALL, "--models", "linear", "--n-pairs", "1", "--steps", "1", "--workers", "1"]
    job = shop.run(*words, "--d-heads", "8", "--seeds", "0", "--out", tmp_path / "sweep")
    assert job.code == 0, job.err
    mount("-o", "size=4m")
    shop.sh("cp", "-r", tmp_path / "sweep", path / "whole")
    cut_off_a_write(tmp_path / "sweep")
    shop.sh("cp", "-r", tmp_path / "sweep", path / "cut-off")
    shop.sh("mount", "-o", "remount,ro", path)
    report = ["capacity-sweep", "--report", "--quiet", "--json", "--out"]
    job = shop.run(*report, path / "whole")
    assert job.code == 0, job.err
    job = shop.run(*report, path / "cut-off")
    assert job.code == 2, job.err
    assert "a write was cut off: copy the folder to where it can be written" in error_of(job)["hint"]


def test_a_folder_that_cannot_be_written(shop, disk, tmp_path):
    path, mount = disk
    job = shop.run(*TRAIN, "--steps", 2, "--out", tmp_path / "run")
    assert job.code == 0, job.err
    mount("-o", "size=1m")
    shop.sh("cp", "-r", tmp_path / "run", path / "run")
    shop.sh("mount", "-o", "remount,ro", path)
    for words in (
        [*TRAIN, "--out", path / "new"],
        [*TRAIN, "--steps", 4, "--out", path / "run", "--resume"],
        ["capacity-sweep", *SMALL, "--models", "linear", "--workers", "1", "--out", path / "new"],
    ):
        job = shop.run(*words, "--json")
        assert job.code == 2, job.err
        error = error_of(job)
        assert error["type"] == "file"
        assert str(path) in error["message"]
        assert "Read-only file system" in error["message"]
        assert "--out" in error["hint"]
    # Reading needs no writing.
    job = shop.run("eval", path / "run", "--examples", 4, "--json")
    assert job.code == 0, job.err
    job = shop.run(*TRAIN, "--steps", 1, cwd=path)  # runs/ in the working folder
    assert job.code == 2
    assert "Read-only file system" in job.err


@pytest.mark.parametrize(
    "words",
    [
        [*TRAIN, "--steps", 1, "--set", "model.d_model=2000000"],
        [*TRAIN, "--steps", 1, "--batch-size", 100_000_000],
        [*TRAIN, "--steps", 1, "--set", "model.d_model=2147483647", "--set", "task.vocab_size=2147483647"],
        [*TRAIN, "--steps", 1, "--set", "task.vocab_size=2147483647"],
    ],
    ids=["weights", "batch", "beyond any machine", "vocabulary"],
)
def test_out_of_memory_names_the_settings_to_lower(shop, tmp_path, words):
    job = shop.run(*_last_wins(words), "--out", tmp_path / "run", "--json", memory=400 * 2**20)
    assert job.code == 4, job.err
    error = error_of(job)
    assert error["type"] == "memory"
    assert "lower the batch size, the sequence length, the vocabulary or d_model" in error["hint"]


def _last_wins(words):
    """`--set` of a key twice is refused, so an earlier one gives way."""
    found: dict[str, list] = {}
    flat = []
    pairs = iter(words)
    for word in pairs:
        if word == "--set":
            value = next(pairs)
            found[value.split("=")[0]] = [word, value]
        elif word == "--batch-size":
            found[word] = [word, next(pairs)]
        else:
            flat.append(word)
    return [*flat, *(word for pair in found.values() for word in pair)]
