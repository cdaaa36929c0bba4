"""Recipes and configuration: strict, with errors that name file, line, key and the nearest valid key."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from linattn_cli.config import dump_recipe, load_run_config
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.output import CliError
from linattn_cli.recipe import dump_yaml, parse_recipe, parse_value, read_recipe, recipe_names
from linattn_cli.settings import TASK_CONFIGS, RunConfig
from linattn_cli.tasks import TASKS


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe and return its path."""

    def write(text: str, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refused(*arguments, **options) -> CliError:
    with pytest.raises(CliError) as caught:
        load_run_config(*arguments, **options)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    return caught.value


def test_defaults_are_the_papers_run():
    config = load_run_config()
    assert (config.model.name, config.model.layers, config.model.d_model, config.model.d_head) == (
        "vla",
        2,
        128,
        32,
    )
    assert (config.train.lr, config.train.steps, config.train.warmup_steps) == (3e-4, 3000, 300)
    assert config == RunConfig()


def test_precedence_is_command_line_over_recipe_over_defaults(recipe):
    path = recipe("model:\n  d_head: 16\n  heads: 2\ntrain:\n  lr: 1e-3\n  steps: 10\n")
    config = load_run_config(path, ["train.steps=20"], {"model.d_head": 64, "train.lr": None})
    assert config.model.d_head == 64
    assert config.model.heads == 2
    assert config.train.lr == 1e-3
    assert config.train.steps == 20
    assert config.model.layers == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3E4", 3e4),
        (".5", 0.5),
        ("010", 10),
        ("1_000", 1000),
        ("-7", -7),
        ("true", True),
        ("no", "no"),
        ("none", "none"),
        ("null", None),
        ("", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ("[1, 2]", [1, 2]),
        ("{name: copy}", {"name": "copy"}),
    ],
)
def test_values_are_typed_as_yaml_1_2(text, value):
    got = parse_value(text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("word", ["1e-3", "no", "true", "null", "", "010", "a: b", "é", "12:30", "- x", "#x", "~"])
def test_dumped_strings_stay_strings(word):
    assert parse_recipe(dump_yaml({"key": word}), "x").data == {"key": word}


@pytest.mark.parametrize("name", MIXERS)
def test_a_resolved_recipe_is_accepted_back_unchanged(recipe, name):
    config = load_run_config(overrides={"model.name": name, "train.betas": [0.9, 0.95], "seed": 3, "train.lr": 1e-05})
    text = dump_recipe(config)
    again = load_run_config(recipe(text))
    assert again == config
    assert dump_recipe(again) == text
    assert set(again.model.options) == set(MIXERS[name].options)


def test_a_sweep_survives_the_round_trip(recipe):
    config = load_run_config(recipe("sweep:\n  models: [vla, linear]\n  lrs: [1e-3, 3e-4]\n  seeds: [0, 1]\n"))
    assert config.sweep is not None
    assert config.sweep.lrs == [1e-3, 3e-4]
    assert load_run_config(recipe(dump_recipe(config), "again.yaml")) == config


def test_misspelt_key_names_file_line_key_and_nearest(recipe):
    path = recipe("model:\n  name: vla\n  d_heda: 3\n")
    error = refused(path)
    assert error.message == f"{path}, line 3: model.d_heda is not a key of model (did you mean 'd_head'?)"
    assert "d_head" in error.hint


def test_misspelt_section(recipe):
    path = recipe("seed: 1\nmodle:\n  name: vla\n")
    assert f"{path}, line 2: modle is not a key of a recipe (did you mean 'model'?)" in refused(path).message


def test_misspelt_task_key_names_the_task(recipe):
    path = recipe("task:\n  n_piars: 3\n")
    assert f"{path}, line 2: task.n_piars is not a key of task mqar (did you mean 'n_pairs'?)" in refused(path).message


def test_duplicate_key_is_refused_with_both_lines(recipe):
    path = recipe("train:\n  lr: 1e-3\n  steps: 10\n  lr: 1e-4\n")
    assert refused(path).message == f"{path}, line 4: duplicate key train.lr, first given on line 2"


def test_quoted_duplicate_and_repeated_section_are_duplicates(recipe):
    assert "duplicate key seed" in refused(recipe('seed: 1\n"seed": 2\n')).message
    assert "duplicate key model" in refused(recipe("model:\n  layers: 1\nmodel:\n  heads: 1\n")).message


LAUGHS = "a: &a [0, 0]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- vla\n", "a recipe is a mapping of sections, got list"),
        ("vla\n", "a recipe is a mapping of sections, got str"),
        ("model: [\n", "not valid YAML"),
        ("model:\n\tname: vla\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("1: 2\n", "a key must be a word, got 1"),
        ("? [a]\n: 1\n", "a key must be a word"),
        ("model: 3\n", "model: input should be"),
        ("model: &m\n  a: *m\n", "not valid YAML: an alias that holds itself"),
        ("sweep:\n  models: &m [*m]\n", "line 2, column 11: not valid YAML: an alias that holds itself"),
        ("[" * 40 + "]" * 40 + "\n", "not valid YAML: nested deeper than 32 levels"),
        ("[" * 5000 + "]" * 5000 + "\n", "nested too deeply"),
        (LAUGHS, "not valid YAML: its aliases make more than 100000 values"),
        ("seed: !!bool maybe\n", "line 1, column 7: not valid YAML: 'maybe' is no bool"),
        ("seed: !!timestamp then\n", "line 1, column 7: not valid YAML: the tag !!timestamp is not for recipes"),
        ("seed: " + "9" * 5000 + "\n", "is no int to read"),
        ("seed: \0\n", "not valid YAML: special characters are not allowed"),
        ("seed: 9223372036854775808\n", "seed: input should be less than or equal to 9223372036854775807"),
        ("model:\n  layers: 2147483648\n", "less than or equal to 2147483647"),
        ("seed: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("model:\n  layers: true\n", "got True"),
        ("model:\n  layers: '2'\n", "got '2'"),
        ("model:\n  layers: 0\n", "greater than or equal to 1, got 0"),
        ("model:\n  d_head: 257\n", "less than or equal to 256"),
        ("train:\n  lr: .nan\n", "finite"),
        ("train:\n  betas: [0.9]\n", "betas"),
        ("model:\n  kv_heads: 3\n", "heads = 4 must be a multiple of kv_heads = 3"),
    ],
)
def test_broken_recipes_are_one_line(recipe, text, said):
    path = recipe(text)
    error = refused(path)
    assert said in error.message
    assert path in error.message


def test_an_empty_section_means_its_defaults(recipe):
    assert load_run_config(recipe("model:\ntrain:\n  steps: 5\n")).train.steps == 5


def test_anchors_and_merges_work_without_being_duplicates(recipe):
    text = "model: &m\n  name: vla\n  options:\n    lambda0: 0.2\ntrain:\n  steps: 5\n"
    assert load_run_config(recipe(text)).model.options["lambda0"] == 0.2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{lambd0: 1.0}", "vla has no option 'lambd0' (did you mean 'lambda0'?)"),
        ("{penalty: non}", "must be one of learned, none, key; got 'non' (did you mean 'none'?)"),
        ("{normalise_gate: 1}", "normalise_gate must be true or false; got 1"),
        ("{lambda0: yes}", "lambda0 must be a finite number; got 'yes'"),
        ("{lambda0: true}", "lambda0 must be a finite number; got True"),
    ],
)
def test_mixer_options_are_checked_against_the_registry(recipe, options, said):
    path = recipe(f"model:\n  name: vla\n  options: {options}\n")
    message = refused(path).message
    assert said in message
    assert message.startswith(f"{path}, line 3: ")


def test_a_mixer_without_options_says_so():
    error = refused(sets=["model.options.lambda0=0.1"], overrides={"model.name": "deltanet"})
    assert "deltanet has no option 'lambda0'" in error.message
    assert "no options of its own" in error.hint


def test_another_model_keeps_the_backbone(recipe):
    path = recipe("model:\n  name: vla\n  d_model: 64\n  heads: 2\n")
    config = load_run_config(path, overrides={"model.name": "linear"})
    assert (config.model.name, config.model.d_model, config.model.heads) == ("linear", 64, 2)


def test_another_model_refuses_the_recipes_options_with_the_remedy(recipe):
    path = recipe("model:\n  name: vla\n  options:\n    lambda0: 0.2\n    readout: raw\n")
    error = refused(path, overrides={"model.name": "linear"})
    keys = "model.options.lambda0, model.options.readout"
    assert error.message == f"{path}, line 4: {keys} was written for model vla, not for linear"
    assert error.hint == "drop them with --set model.options={}"
    config = load_run_config(path, ["model.options={}"], {"model.name": "linear"})
    assert config.model.options["readout"] == "ratio"


def test_another_task_refuses_the_recipes_settings(recipe):
    path = recipe("task:\n  name: mqar\n  n_pairs: 4\n  vocab_size: 16\n")
    error = refused(path, overrides={"task.name": "copy"})
    assert f"{path}, line 3: task.n_pairs was written for task mqar, not for copy" in error.message
    assert error.hint == "replace the section: --set 'task={name: copy}'"
    assert load_run_config(path, ["task={name: copy}"]).task.vocab_size == 32


def test_unknown_model_and_task_name_the_nearest_and_where_it_was_said(recipe):
    assert refused(overrides={"model.name": "vlaa"}).message == (
        "--model: there is no model 'vlaa' (did you mean 'vla'?)"
    )
    assert refused(overrides={"task.name": "mqra"}).message == "--task: there is no task 'mqra' (did you mean 'mqar'?)"
    path = recipe("task:\n  name: mqra\n")
    assert refused(path).message.startswith(f"{path}, line 2: there is no task 'mqra'")


def test_an_impl_the_mixer_lacks_is_refused():
    for name, mixer in MIXERS.items():
        for impl in ("reference", "scan", "chunk", "triton"):
            if impl not in mixer.impls:
                message = refused(overrides={"model.name": name, "model.impl": impl}).message
                assert f"--impl: {name} has no impl {impl!r}" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model.d_head", "--set takes section.key=value"),
        ("=3", "--set takes section.key=value"),
        ("model..d_head=3", "--set takes section.key=value"),
        ("model.d_head=[3", "the value is not valid YAML"),
        ("seed=!!bool maybe", "the value is not valid YAML: 'maybe' is no bool"),
        ("seed=" + "[" * 5000, "the value is not valid YAML: nested deeper than 32 levels"),
        ("seed=\x07", "the value is not valid YAML: special characters are not allowed"),
        (
            "model.d_heda=3",
            "--set model.d_heda=3: model.d_heda is not a key of model (did you mean 'd_head'?)",
        ),
        ("seed.x=3", "--set seed.x=3: seed: input should be a valid integer"),
    ],
)
def test_bad_set(text, said):
    assert said in refused(sets=[text]).message


def test_set_takes_nested_options_and_whole_sections():
    config = load_run_config(sets=["model={name: vla, layers: 1}", "model.options.penalty=key", "seed=7"])
    assert (config.model.layers, config.model.options["penalty"], config.seed) == (1, "key", 7)


def test_contradictions_on_the_command_line_are_refused():
    assert "contradicts --d-head 4" in refused(sets=["model.d_head=3"], overrides={"model.d_head": 4}).message
    assert load_run_config(sets=["model.d_head=4"], overrides={"model.d_head": 4}).model.d_head == 4
    assert "would undo --set model.d_head=3" in refused(sets=["model.d_head=3", "model={}"]).message
    assert "would undo --set seed=1" in refused(sets=["seed=1", "seed=2"]).message


def test_impossible_task_settings_show_the_arithmetic_and_their_source(recipe):
    message = refused(overrides={"task.n_pairs": 8, "task.seq_len": 20}).message
    assert message.startswith("--n-pairs, --seq-len: ")
    assert "3*n_pairs + 2*updates + 1 = 25, got 20" in message
    path = recipe("task:\n  n_pairs: 200\n")
    assert refused(path).message.startswith(f"{path}, line 1: ")


def test_settings_are_resolved():
    assert load_run_config(sets=["train.steps=10"]).train.warmup_steps == 10
    assert load_run_config(sets=["train.target_accuracy=0.99", "train.log_every=25"]).train.eval_every == 25
    assert load_run_config(sets=["train.target_accuracy=0.99", "train.eval_every=7"]).train.eval_every == 7


def test_recipe_lookup(recipe, tmp_path, monkeypatch):
    assert "there is no recipe 'no-such'" in refused("no-such").message
    assert "linattn list recipes" in refused("no-such").hint
    recipe("seed: 1\n", "mine.yaml")
    missing = refused(str(tmp_path / "mine.yml"))
    assert "does not exist (did you mean 'mine.yaml'?)" in missing.message
    assert "is a folder" in refused(f"{tmp_path}/").message
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused(str(tmp_path / "binary.yaml")).message
    monkeypatch.chdir(tmp_path)
    assert load_run_config("mine.yaml").seed == 1


def test_every_packaged_recipe_is_valid():
    for name in recipe_names():
        config = load_run_config(name)
        assert read_recipe(name).data
        assert config.model.name in MIXERS


@pytest.mark.parametrize("name", TASKS)
def test_the_schema_of_a_task_is_the_tasks_own(name):
    model = TASK_CONFIGS[name]
    own = {field.name: field.default for field in dataclasses.fields(TASKS[name].load())}
    schema = {key: field.default for key, field in model.model_fields.items() if key != "name"}
    assert schema == own


def test_sections_cannot_be_changed_after_they_were_checked():
    config = load_run_config()
    with pytest.raises(ValueError, match="frozen"):
        config.model.d_head = 7  # type: ignore[misc]
