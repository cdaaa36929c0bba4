"""Shell completion: the scripts, and what a shell is offered."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from linattn_cli.app import main
from linattn_cli.commands.completion import SCRIPTS
from linattn_cli.commands.verify_scan import BUGS
from linattn_cli.completions import complete_run
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.recipe import recipe_names
from linattn_cli.runs import RECIPE


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """A PATH on which this very package is `linattn`."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "linattn"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m linattn_cli "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


BASH = """
source <(linattn completion bash --quiet)
complete -p linattn >&2
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_linattn_completion linattn
printf '%s\\n' "${COMPREPLY[@]}"
"""


def in_bash(environment: dict[str, str], *words: str, folder: Path | None = None) -> list[str]:
    """What bash would offer for the last word, through the script as it is printed."""
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
        cwd=folder,
    )
    assert done.stderr == "complete -o default -F _linattn_completion linattn\n"
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("linattn", "tr"), ["train"]),
        (("linattn", "train", "--mo"), ["--model"]),
        (("linattn", "train", "--model", ""), list(MIXERS)),
        (("linattn", "train", "--recipe", ""), recipe_names()),
        (("linattn", "train", "--task", ""), ["mqar", "copy"]),
        (("linattn", "train", "--set", "model.d_h"), ["model.d_head="]),
        (("linattn", "latency", "--models", "vla,ahl"), ["vla,ahla"]),
        (("linattn", "task", "show", "m"), ["mqar"]),
        (("linattn", "schema", "task", ""), ["show"]),
        (("linattn", "train", "--out", "x"), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_bash_offers(environment, words, offered):
    assert in_bash(environment, *words) == offered


def test_runs_are_offered_where_there_are_some(environment, tmp_path):
    for name in ("runs/a", "runs/b c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / RECIPE).touch()
    (tmp_path / "runs" / "no-run").mkdir()
    assert set(in_bash(environment, "linattn", "eval", "runs/", folder=tmp_path)) == {"runs/a", "runs/b", "c"}


@pytest.mark.parametrize(("shell", "said"), [("zsh", '"vla":"variational'), ("fish", "vla\tvariational")])
def test_what_zsh_and_fish_are_answered(environment, shell, said):
    """Neither need be installed: the variables are those that their scripts set."""
    asked = {
        f"_{name}": value
        for name, value in {
            "LINATTN_COMPLETE": f"complete_{shell}",
            "TYPER_COMPLETE_ARGS": "linattn train --model vl",
            "TYPER_COMPLETE_FISH_ACTION": "get-args",
        }.items()
    }
    for name in asked:
        assert name in SCRIPTS[shell] or shell == "zsh"
    done = subprocess.run(["linattn"], capture_output=True, text=True, timeout=120, check=True, env=environment | asked)
    assert said in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_scripts_are_of_their_shell(shell, tmp_path):
    script = SCRIPTS[shell]
    if shutil.which(shell):  # bash is there wherever these tests run
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)
    assert script.startswith({"bash": "_linattn_completion()", "zsh": "#compdef linattn", "fish": "function"}[shell])


def test_the_command_says_where_to_put_it(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "zsh"])
    out, err = capsys.readouterr()
    assert out == SCRIPTS["zsh"]
    assert "~/.zshrc" in err
    with pytest.raises(SystemExit) as left:
        main(["completion", "bsh"])
    assert left.value.code == 2
    assert "(did you mean 'bash'?)" in capsys.readouterr().err


def test_completing_imports_nothing_that_computes(environment):
    code = (
        "import sys\nfrom linattn_cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sorted({'torch', 'triton', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    asked = {"_LINATTN_COMPLETE": "complete_bash", "COMP_WORDS": "linattn train --set model.", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=environment | asked
    )
    assert "model.options.lambda0=" in done.stdout.split()
    assert done.stderr.strip() == ""


def test_bugs_to_inject_are_those_there_are(monkeypatch, tmp_path):
    from linattn_cli.verify_bugs import BUGS as planted

    assert list(BUGS) == list(planted)
    monkeypatch.chdir(tmp_path)
    assert complete_run("") == []
