"""Every packaged recipe: complete, commented truthfully, listed with what it measured, and trainable."""

import re
from importlib import resources
from typing import Any

import pytest

from linattn_cli.app import main
from linattn_cli.capacity import cells_of
from linattn_cli.config import load_run_config
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.recipe import parse_value, recipe_names, recipe_summary
from linattn_cli.settings import RunConfig, SweepConfig

FILES = resources.files("linattn_cli.recipes")
LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value> [^#]*)?(#(?P<comment>.*))?$")
DEFAULT = re.compile(r"\bdefault (\[[^]]*\]|\S+?)(?=[,;.]?(?:\s|$))")


def keys_with_comments(name: str) -> dict[str, str]:
    """Dotted key -> comment, for every key of a recipe."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (FILES / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if path and path[0][1] == "sweep" and line.startswith("    "):
            continue  # what the lists of a sweep hold
        match = LINE.match(line)
        if match is None:
            assert not line.strip() or line.startswith("#"), line
            continue
        indent = len(match["indent"])
        path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match["key"])]
        found[".".join(key for _, key in path)] = (match["comment"] or "").strip()
    return found


def leaves(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key; what a sweep varies is a value of its own, however deep it is."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value and prefix != "sweep.":
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


@pytest.mark.parametrize("name", recipe_names())
def test_every_key_is_written_and_its_comment_tells_the_true_default(name):
    config = load_run_config(name)
    mixer = config.model.name
    task = type(config.task)()
    defaults = leaves(
        {
            "model": type(config.model)(name=mixer).model_dump() | {"name": "vla"},
            "task": task.model_dump() | {"name": "mqar"},
            "train": type(config.train)().model_dump(),
            "seed": RunConfig().seed,
            **({} if config.sweep is None else {"sweep": SweepConfig().model_dump()}),
        }
    )
    for key, option in MIXERS[mixer].options.items():
        defaults[f"model.options.{key}"] = option.default
    comments = keys_with_comments(name)
    resolved = config.model_dump(mode="json", exclude={"sweep"} if config.sweep is None else set())
    assert set(leaves(resolved)) - set(comments) == set(), "every key is written out"
    for key, default in defaults.items():
        told = DEFAULT.search(comments[key])
        assert told, f"{key}: the comment must say the default"
        value = parse_value(told[1])
        assert value == (list(default) if isinstance(default, tuple) else default), key
        assert len(comments[key].split()) >= 4, f"{key}: the comment must say what it means"


@pytest.mark.parametrize("name", recipe_names())
def test_it_says_what_it_is_for_and_has_a_measured_row(name):
    assert len(recipe_summary(name)) > 20
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (FILES / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    header = rows[0]
    mine = [dict(zip(header, row, strict=True)) for row in rows if row[0] == f"`{name}`"]
    assert mine, f"recipes/README.md needs a row for {name}"
    for row in mine:
        command = "train" if load_run_config(name).sweep is None else "capacity-sweep"
        assert f"linattn {command} --recipe {name}" in row["command"]
        assert all(row.values()), row
        assert re.search(r"\d\.\d", row["measured"]), row
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", row["date"]), row


@pytest.mark.parametrize("name", recipe_names())
def test_it_trains(name, tmp_path):
    with pytest.raises(SystemExit) as left:
        main(
            [
                *("train", "--recipe", name, "--steps", "2", "--batch-size", "2", "--device", "cpu"),
                *("--set", "train.eval_every=2", "--set", "train.eval_examples=4"),
                *("--out", str(tmp_path / "run"), "--quiet"),
            ]
        )
    assert not left.value.code


@pytest.mark.parametrize("name", [name for name in recipe_names() if load_run_config(name).sweep is not None])
def test_every_cell_of_a_sweep_is_possible_and_the_first_of_each_model_trains(name):
    from linattn_cli.capacity_cell import job_of, work

    cells = cells_of(load_run_config(name, overrides={"train.steps": 1, "train.batch_size": 2}))
    first = {cell.arm: cell for cell in reversed(cells)}
    for cell in first.values():
        job = job_of(cell, "cpu")
        job["config"]["train"] |= {"eval_examples": 2, "device": "cpu"}
        outcome = work(job)
        assert outcome["status"] == "finished", outcome["error"]
