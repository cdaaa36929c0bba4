"""What the README says about the project is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from linattn_cli.kernels.registry import MIXERS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def linattn(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "linattn_cli", *arguments], capture_output=True, text=True, check=False
    )


def test_the_table_of_mixers_is_the_registry():
    shown = README.split("<!-- models -->")[1].split("<!-- /models -->")[0].strip()
    done = linattn("list", "models", "--format", "markdown")
    assert done.returncode == 0, done.stderr
    assert shown == done.stdout.strip()
    for name in MIXERS:
        assert re.search(rf"^\| model +\| {name} ", shown, re.MULTILINE), name


def test_the_tree_exists():
    block = README.split("## The tree")[1].split("```")[1]
    folder = ROOT
    for line in block.strip().splitlines():
        names = re.split(r"\s{4,}|   ", line.strip())[0].split("  ")
        if not line.startswith(" "):
            folder = ROOT / names[0]
            assert folder.is_dir(), names[0]
            continue
        for name in names:
            assert (folder / name.strip()).exists(), f"{folder.name}/{name}"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_the_commands_of_the_console_blocks_exist():
    commands = set(
        re.findall(r"linattn ((?:task )?[a-z-]+)", "\n".join(re.findall(r"```console(.*?)```", README, re.S)))
    )
    commands.discard("task")
    assert {"train", "eval", "verify-scan", "task show", "list", "doctor"} <= commands
    for command in commands:
        done = linattn(*command.split(), "--help")
        assert done.returncode == 0, f"linattn {command}: {done.stderr}"


def test_the_python_example_runs():
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(compile(block, "README.md", "exec"), {})
