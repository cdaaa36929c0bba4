"""Run folders and checkpoints: nothing lost, nothing mixed up, damage named."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linattn_cli import checkpoints
from linattn_cli.output import CliError
from linattn_cli.runs import RunFolder, read_metrics, storage_errors

MODEL = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([1.0, -0.0])}
STATE = {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}, "step": 3}


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", stem="vla-mqar") as folder:
        folder.write_recipe("seed: 0\n")
        yield folder


@pytest.fixture(autouse=True)
def synced(monkeypatch):
    """Names of what was synced, without waiting for the disk."""
    names = []
    monkeypatch.setattr(os, "fsync", lambda fd: names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    return names


def save_steps(run, *steps):
    for step in steps:
        checkpoints.save(run.path, step, {name: t + step for name, t in MODEL.items()}, STATE)


def take_numbered(root, queue):
    with RunFolder.create(None, stem="vla-mqar", root=root) as folder:
        queue.put(folder.path.name)


def test_default_folders_are_numbered_upwards(tmp_path):
    (tmp_path / "vla-mqar-4").mkdir()
    (tmp_path / "vla-mqar-old").mkdir()
    names = [RunFolder.create(None, stem="vla-mqar", root=tmp_path).path.name for _ in range(2)]
    assert names == ["vla-mqar-5", "vla-mqar-6"]


def test_processes_never_get_the_same_number(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=take_numbered, args=(tmp_path, queue)) for _ in range(8)]
    for worker in workers:
        worker.start()
    names = [queue.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join()
    assert len(set(names)) == 8


def test_an_existing_run_is_not_reused(run):
    run.close()
    before = sorted(p.name for p in run.path.iterdir())
    with pytest.raises(CliError, match="exists already") as caught:
        RunFolder.create(run.path, stem="vla-mqar")
    assert caught.value.exit_code == 2
    assert f"linattn train --resume --out {run.path}" in caught.value.hint
    assert sorted(p.name for p in run.path.iterdir()) == before


def test_a_folder_of_something_else_is_not_reused(tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(CliError, match="exists already") as caught:
        RunFolder.create(tmp_path / "notes", stem="x")
    assert "--resume" not in caught.value.hint
    with pytest.raises(CliError, match=r"not a run folder: it has no recipe\.yaml"):
        RunFolder.resume(tmp_path / "notes")


def test_a_second_process_is_refused_until_the_first_is_killed(run):
    run.close()
    code = (
        "import sys, time; from pathlib import Path; from linattn_cli.runs import RunFolder\n"
        "run = RunFolder.resume(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        for attempt in (RunFolder.resume, lambda path: RunFolder.create(path, stem="x")):
            with pytest.raises(CliError, match=f"is in use by process {child.pid}") as caught:
                attempt(run.path)
            assert caught.value.exit_code == 2
        child.kill()
        child.wait()
    RunFolder.resume(run.path).close()


def test_a_missing_folder_names_its_neighbours(run):
    with pytest.raises(CliError, match="does not exist") as caught:
        RunFolder.resume(run.path.parent / "rum")
    assert "run" in caught.value.hint


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match=r"cannot use .*/file: a file is in the way") as caught:
        RunFolder.create(tmp_path / "file" / "run", stem="x")
    assert caught.value.exit_code == 2
    assert "--out" in caught.value.hint
    with pytest.raises(CliError, match="exists and is not a folder"):
        RunFolder.create(tmp_path / "file", stem="x")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_exit_4(run):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(CliError, match="No space left on device") as caught:
        run.append_metrics({"step": 1})
    assert caught.value.exit_code == 4


def test_a_full_disk_while_saving_leaves_the_last_checkpoint_alone(run, monkeypatch):
    save_steps(run, 1)

    def full(path, data):
        Path(path).write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoints, "write_synced", full)
    with pytest.raises(CliError) as caught:
        save_steps(run, 2)
    assert caught.value.exit_code == 4
    assert os.listdir(run.path / "checkpoints") == ["step-1"]
    assert checkpoints.load(run.path).step == 1


def test_metrics_are_cut_back_to_the_checkpoint_and_a_torn_line_dropped(run):
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": 0.1 + step})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2, 3]
    assert run.cut_metrics(2) == 2
    run.append_metrics({"step": 3, "loss": 9.0})
    assert [row["loss"] for row in read_metrics(run.path)] == [1.1, 2.1, 9.0]


def test_a_checkpoint_comes_back_bit_for_bit_and_two_are_kept(run):
    save_steps(run, 1, 2, 10)
    assert checkpoints.list_steps(run.path) == [2, 10]
    found = checkpoints.load(run.path)
    assert found.step == 10
    assert torch.equal(found.model["weight"], MODEL["weight"] + 10)
    assert found.state["optimizer"]["param_groups"] == [{"lr": 0.1}]
    assert checkpoints.load(run.path, 2).step == 2
    assert sorted(os.listdir(run.path / "checkpoints" / "step-2")) == [
        "manifest.json",
        "model.safetensors",
        "state.pt",
    ]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(run, synced, monkeypatch):
    rename = os.rename

    def renamed(source, target):
        assert synced == ["model.safetensors", "state.pt", "manifest.json", Path(source).name]
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    synced.clear()
    save_steps(run, 1)
    assert synced[-1] == "checkpoints"


def test_no_checkpoint_yet_is_none_and_an_unknown_step_lists_the_others(run):
    assert checkpoints.load(run.path) is None
    save_steps(run, 5)
    with pytest.raises(CliError, match="no checkpoint of step 4") as caught:
        checkpoints.load(run.path, 4)
    assert "5" in caught.value.hint


def test_saving_a_step_again_replaces_it(run):
    save_steps(run, 5)
    checkpoints.save(run.path, 5, {"weight": torch.zeros(1)}, STATE)
    assert list(checkpoints.load(run.path).model) == ["weight"]


def test_what_a_killed_process_left_half_written_is_not_a_checkpoint(run):
    save_steps(run, 1)
    (run.path / "checkpoints" / ".step-2.77.tmp").mkdir()
    assert checkpoints.list_steps(run.path) == [1]
    save_steps(run, 3)
    assert sorted(os.listdir(run.path / "checkpoints")) == ["step-1", "step-3"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=["truncated", "flipped", "missing"])
def test_damage_is_named_and_the_previous_checkpoint_offered(run, name, damage):
    save_steps(run, 1, 2)
    damage(run.path / "checkpoints" / "step-2" / name)
    with pytest.raises(CliError, match="step-2 is damaged: ") as caught:
        checkpoints.load(run.path)
    # One bit of the manifest may just as well accuse a file that it describes.
    assert name in caught.value.message or (name == "manifest.json" and damage is flip)
    assert caught.value.exit_code == 2
    assert f"--resume --out {run.path} --from-step 1" in caught.value.hint
    assert checkpoints.load(run.path, 1).step == 1


def test_a_damaged_checkpoint_is_not_offered(run):
    save_steps(run, 1, 2)
    truncate(run.path / "checkpoints" / "step-1" / "state.pt")
    truncate(run.path / "checkpoints" / "step-2" / "state.pt")
    with pytest.raises(CliError, match="step-2 is damaged") as caught:
        checkpoints.load(run.path)
    assert "no earlier checkpoint is whole" in caught.value.hint


def test_a_newer_format_is_refused_with_the_remedy(run):
    save_steps(run, 1)
    path = run.path / "checkpoints" / "step-1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(CliError, match="newer linattn") as caught:
        checkpoints.load(run.path)
    assert caught.value.exit_code == 2
    assert "update" in caught.value.hint


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_strangers_checkpoint_cannot_run_code(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    checkpoints.save(run.path, 1, MODEL, {"optimizer": Bomb()})
    with pytest.raises(CliError, match="cannot be read"):
        checkpoints.load(run.path)
    assert not Path("exploded").exists()


def test_discard_after_removes_only_what_is_newer(run):
    save_steps(run, 1, 2)
    assert checkpoints.discard_after(run.path, 1) == [2]
    assert checkpoints.list_steps(run.path) == [1]


def test_storage_errors_leave_other_exceptions_alone():
    with pytest.raises(KeyError), storage_errors(Path("x")):
        raise KeyError("x")
