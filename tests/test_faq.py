"""Every error of docs/FAQ.md is provoked, and says what is printed there, word for word.

An ellipsis in the FAQ stands for what differs from machine to machine.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from linattn_cli import checkpoints
from linattn_cli.app import main
from linattn_cli.kernels import dispatch
from linattn_cli.kernels.faults import DoesNotFit
from linattn_cli.layers import VLA
from linattn_cli.runs import RunFolder

FAQ = (Path(__file__).parent.parent / "docs" / "FAQ.md").read_text()
SECTIONS = dict(
    part.split("\n", 1) for part in re.split(r"^### ", FAQ, flags=re.MULTILINE)[1:]
)  # title: everything below it

MINE = """\
model: {name: vla, d_model: 16, heads: 2, layers: 1, ffn: 16, d_head: 8, options: {lambda0: 0.5}}
task: {name: mqar, n_pairs: 2, vocab_size: 16}
train: {steps: 4, batch_size: 4, checkpoint_every: 2, eval_examples: 16, warmup_steps: 0, device: cpu}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A working folder with a recipe of the user's own and a run of it."""
    path = tmp_path_factory.mktemp("faq")
    (path / "mine.yaml").write_text(MINE)
    words = ["train", "--recipe", str(path / "mine.yaml"), "--out", str(path / "runs" / "vla-mqar-1"), "--quiet"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert not left.value.code
    return path


RUN = Path("runs/vla-mqar-1")


def misspelt(monkeypatch):
    Path("mine.yaml").write_text("model:\n  d_heda: 64\n")


def duplicate(monkeypatch):
    Path("mine.yaml").write_text("train:\n  lr: 1e-3\n  steps: 100\n  lr: 3e-3\n")


def in_use(monkeypatch):
    folder = RunFolder.resume(RUN)  # held by this process, which is as good as another
    monkeypatch.setattr(sys, "held", folder, raising=False)


def damaged(monkeypatch):
    path = RUN / "checkpoints" / "step-4" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def newer(monkeypatch):
    path = RUN / "checkpoints" / "step-4" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2, "linattn": "0.9.0"}))


def full(monkeypatch):
    def write(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoints, "write_synced", write)


def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def theirs(monkeypatch):
    shutil.copytree(RUN, "theirs")
    recipe = Path("theirs/recipe.yaml")
    text = re.sub(r"  options:\n    .*?\n(?=\w)", "", recipe.read_text(), flags=re.DOTALL)
    recipe.write_text(text.replace("name: vla", "name: mixer.py:Theirs"))


def never_saved(monkeypatch):
    shutil.rmtree(RUN / "checkpoints")


def too_large(monkeypatch):
    needs = "impl triton was asked for, but a kernel needs 131,072 bytes of shared memory and the GPU has 101,376"

    def forward(*_, **__):
        raise DoesNotFit(needs)

    monkeypatch.setattr(dispatch, "why_not_triton", lambda operator, tensor: None)
    monkeypatch.setattr(VLA, "forward", forward)


SETUP = {
    "is not a key of model": misspelt,
    "duplicate key": duplicate,
    "is in use by process": in_use,
    "is damaged": damaged,
    "was written by a newer linattn": newer,
    "No space left on device": full,
    "was asked for, but": without_gpu,
    "a kernel needs": too_large,
    "names code to run": theirs,
    "has no checkpoint yet": never_saved,
}


def lines_of(section: str) -> tuple[str, list[str], int]:
    block = re.search(r"```console\n\$ (.*?)\n(.*?)```", section, re.DOTALL)
    code = re.search(r"[Ee]xit code (\d+)", section)
    assert block is not None
    assert code is not None
    return block[1], block[2].splitlines(), int(code[1])


def matches(expected: str, got: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), got) is not None


@pytest.mark.parametrize("title", list(SECTIONS))
def test_the_error_is_what_the_faq_says(home, title, tmp_path, monkeypatch, capsys):
    command, expected, code = lines_of(SECTIONS[title])
    shutil.copytree(home, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    for words, setup in SETUP.items():
        if any(words in line for line in expected):
            setup(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(shlex.split(command)[1:])
    if (held := getattr(sys, "held", None)) is not None:
        held.close()
    err = capsys.readouterr().err
    assert left.value.code == code, err
    got = [line for line in err.splitlines() if line.startswith(("error: ", "failed: ", "hint: "))]
    assert len(got) == len(expected), err
    for one, other in zip(expected, got, strict=True):
        assert matches(one, other), f"\nFAQ:  {one}\nreal: {other}"


def test_every_setting_up_is_of_an_entry():
    shown = [line for section in SECTIONS.values() for line in lines_of(section)[1]]
    for words in SETUP:
        assert any(words in line for line in shown), words


def test_the_check_can_fail():
    assert matches("error: … is in use", "error: run folder x is in use")
    assert not matches("error: … is in use", "error: run folder x is in use by 3")
