"""Help pages: grouped options, defaults that are true, an example that parses; README shows the same."""

from __future__ import annotations

import inspect
import re
import shlex

import pytest

from linattn_cli.settings import RunConfig
from linattn_cli.sources import option_name
from tests import readme_blocks
from tests.readme_blocks import BLOCKS, commands, default_of, help_block, options_of

COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_panel_and_says_what_it_does(name):
    for option in options_of(COMMANDS[name]):
        assert option.rich_help_panel, option.opts
        assert re.match(r"\S.*[.)]$", option.help, re.S), (option.opts, option.help)
    assert inspect.cleandoc(COMMANDS[name].help).split("\n\n")[0].endswith(".")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_parses(name):
    (example,) = re.findall(r"^Example: (.*)$", inspect.cleandoc(COMMANDS[name].help), re.M)
    call = re.search(rf"linattn {name} ?([^|>)]*)", example)
    assert call is not None, example
    COMMANDS[name].make_context(name, shlex.split(call[1]))


def test_the_defaults_shown_are_those_of_a_run():
    """Options of train that set a key of the recipe show that key's default."""
    keys = ("model.name", "model.d_head", "model.impl", "task.name", "task.n_pairs", "task.protocol", "task.updates")
    keys += ("train.steps", "train.lr", "train.batch_size", "train.checkpoint_every", "train.device", "train.dtype")
    by_name = {option.opts[0]: option for option in options_of(COMMANDS["train"])}
    config = RunConfig().model_dump()
    for key in (*keys, "seed"):
        value = config
        for part in key.split("."):
            value = value[part]
        assert default_of(by_name[option_name(key)]) == str(value), key


def test_units_are_said_where_there_are_any():
    for name, command in COMMANDS.items():
        for option in options_of(command):
            if option.opts[0] in ("--seq-len", "--seq-lens"):
                assert "oken" in option.help, name
            if option.opts[0].endswith("-s"):
                assert "econds" in option.help, name


@pytest.mark.parametrize("part", BLOCKS)
def test_readme_shows_what_is_generated(part):
    text = readme_blocks.README.read_text(encoding="utf-8")
    assert readme_blocks.shown(part, text) == BLOCKS[part](), "make readme writes it anew"


def test_the_generated_help_has_every_option():
    page = help_block("train", COMMANDS["train"])
    for option in options_of(COMMANDS["train"]):
        assert f"  {option.opts[0]}" in page
    assert "[default: 3000]" in page
