"""Whatever became of the bytes of a checkpoint: what was saved comes back, or one clear line says what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linattn_cli import checkpoints
from linattn_cli.config import load_run_config
from linattn_cli.experiment import build
from linattn_cli.output import CliError
from linattn_cli.runs import RunFolder
from linattn_cli.training import Trainer
from tests.fuzz import examples

NAMES = ("model.safetensors", "state.pt", "manifest.json")
SIZES = ["model.d_model=4", "model.heads=1", "model.layers=1", "model.ffn=4", "model.d_head=4", "task.vocab_size=8"]
SETTINGS = [*SIZES, "task.n_pairs=1", "train.batch_size=1", "train.steps=2", "train.eval_examples=2"]


def trainer(run=None):
    config = load_run_config(sets=[*SETTINGS, "model.max_positions=4"])
    task, model = build(config)
    return Trainer(model, task, config.train, seed=0, device=torch.device("cpu"), run=run)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with two checkpoints, and what the newer one holds."""
    path = tmp_path_factory.mktemp("fuzz") / "run"
    with RunFolder.create(path, stem="x") as run:
        run.write_recipe("seed: 0\n")
        made = trainer(run)
        made.save()
        made.train()
    return path, checkpoints.load(path)


@st.composite
def damage(draw):
    """A function of bytes: flips, cuts, insertions and overwritten stretches."""
    kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "insert", "overwrite", "append", "replace"]))
    place = draw(st.floats(0, 1, exclude_max=True))
    noise = draw(st.binary(min_size=1, max_size=12))
    bit = draw(st.integers(0, 7))

    def apply(data: bytes) -> bytes:
        at = int(place * len(data))
        match kind:
            case "flip":
                return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            case "cut":
                return data[:at]
            case "insert":
                return data[:at] + noise + data[at:]
            case "overwrite":
                return data[:at] + noise + data[at + len(noise) :]
            case "append":
                return data + noise
        return noise

    return apply


def same(a: checkpoints.Checkpoint, b: checkpoints.Checkpoint) -> bool:
    return a.model.keys() == b.model.keys() and all(torch.equal(a.model[name], b.model[name]) for name in a.model)


def damaged_copy(path, folder, name, change):
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    file = copy / "checkpoints" / "step-2" / name
    file.write_bytes(change(file.read_bytes()))
    return copy


@examples(300)
@given(name=st.sampled_from(NAMES), change=damage())
def test_damage_is_noticed(saved, tmp_path_factory, name, change):
    path, whole = saved
    copy = damaged_copy(path, tmp_path_factory.getbasetemp(), name, change)
    changed = any(
        (copy / "checkpoints" / "step-2" / other).read_bytes() != (path / "checkpoints" / "step-2" / other).read_bytes()
        for other in NAMES[:2]
    )
    refusal = refused(lambda: checkpoints.load(copy))
    if refusal is None:
        assert not changed, "the bytes of weights or state changed and nobody noticed"
        assert same(checkpoints.load(copy), whole)
        return
    assert refusal.kind in ("damaged_checkpoint", "newer_format")
    assert "step-2" in refusal.message
    assert refusal.kind == "newer_format" or "--from-step 0" in refusal.hint


def refused(action):
    """The error that an action ends with, None where it works; any other exception passes through."""
    try:
        action()
    except CliError as error:
        return error
    return None


@examples(150)
@given(name=st.sampled_from(NAMES[:2]), change=damage())
def test_a_forger_who_seals_the_damage_gets_no_further(saved, tmp_path_factory, name, change):
    """With a manifest that fits: torch and safetensors may refuse, the trainer may, nothing else happens."""
    path, _ = saved
    copy = damaged_copy(path, tmp_path_factory.getbasetemp(), name, change)
    folder = copy / "checkpoints" / "step-2"
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / name).read_bytes()
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    before, threads = set(os.listdir(copy)), torch.get_num_threads()
    refusal = refused(lambda: trainer().restore(checkpoints.load(copy)))
    torch.set_num_threads(threads)
    assert refusal is None or refusal.exit_code == 2
    assert refusal is None or refusal.kind in ("damaged_checkpoint", "newer_format", "checkpoint")
    assert set(os.listdir(copy)) == before
