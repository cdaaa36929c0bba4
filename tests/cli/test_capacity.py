"""The grid of a sweep: which cells a recipe means, and what is refused before anything runs."""

import re
from pathlib import Path

import pytest

from linattn_cli.capacity import Cell, cells_of, parse_arm
from linattn_cli.capacity_run import Request, _load
from linattn_cli.config import dump_recipe, load_run_config
from linattn_cli.output import CliError
from linattn_cli.settings import RunConfig, SweepConfig


def grid(**lists):
    return cells_of(RunConfig(sweep=SweepConfig(**lists)))


def test_the_cells_are_every_combination_in_the_order_written():
    cells = grid(models=["linear", "vla"], n_pairs=[2, 4], d_heads=[8, 16], lrs=[1e-3, 3e-3], seeds=[0, 1])
    assert len(cells) == len({cell.key for cell in cells}) == 32
    assert [cell.arm for cell in cells] == ["linear"] * 16 + ["vla"] * 16
    assert cells[1].place == {"model": "linear", "n_pairs": 2, "d_head": 8, "seq_len": 7, "lr": 1e-3, "seed": 1}


def test_without_lists_the_recipe_itself_is_the_only_cell():
    (cell,) = cells_of(RunConfig(seed=3))
    assert cell.arm == "vla"
    assert cell.config == RunConfig(seed=3)


def test_options_of_the_recipes_mixer_stay_with_it():
    """A recipe for VLA does not refuse a linear arm, and its options do not leak into other mixers."""
    config = load_run_config(
        sets=["model.options={lambda0: 0.5, readout: raw}"], overrides={"sweep.models": ["vla", "linear", "hla2"]}
    )
    vla, linear, hla2 = cells_of(config)
    assert vla.config.model.options["lambda0"] == 0.5
    assert linear.config.model.options == {"feature_map": "elu1", "readout": "ratio"}
    assert hla2.config.model.options["readout"] == "raw", "HLA2's own default"


def test_an_arm_may_carry_settings():
    control, raw = grid(models=["vla:penalty=none", "vla:readout=raw:model.short_conv=4"])
    assert control.config.model.options["penalty"] == "none"
    assert (raw.config.model.options["readout"], raw.config.model.short_conv) == ("raw", 4)
    assert [control.arm, raw.arm] == ["vla:penalty=none", "vla:readout=raw:model.short_conv=4"]


def test_variants_name_settings():
    variants = {"control": {"model.name": "vla", "model.options.penalty": "none"}, "deep": {"model.layers": 4}}
    control, deep = grid(variants=variants)
    assert (control.arm, control.config.model.options["penalty"]) == ("control", "none")
    assert (deep.arm, deep.config.model.layers, deep.config.model.name) == ("deep", 4, "vla")
    (chosen,) = grid(variants=variants, models=["deep:model.layers=3"])
    assert chosen.config.model.layers == 3


def test_points_change_keys_together():
    cells = grid(
        points=[{"task.n_pairs": 2, "task.seq_len": 20}, {"task.n_pairs": 4, "task.seq_len": 30}], seeds=[0, 1]
    )
    assert [(cell.place["n_pairs"], cell.place["seq_len"]) for cell in cells] == [(2, 20), (2, 20), (4, 30), (4, 30)]


def test_the_grid_reaches_any_key():
    cells = grid(grid={"model.short_conv": [0, 4], "task.updates": [0, 2]})
    found = [(cell.config.model.short_conv, cell.settings["task.updates"]) for cell in cells]
    assert found == [(0, 0), (0, 2), (4, 0), (4, 2)]


def test_another_task_takes_none_of_the_settings_of_the_first():
    mqar, copy = grid(points=[{"task.name": "mqar", "task.n_pairs": 4}, {"task.name": "copy", "task.seq_len": 8}])
    assert mqar.config.task.n_pairs == 4
    assert copy.config.task.model_dump() == {"name": "copy", "seq_len": 8, "vocab_size": 32}
    assert copy.place["n_pairs"] is None


def test_further_grids_keep_what_they_do_not_say_and_count_no_cell_twice():
    cells = grid(
        models=["linear", "vla"],
        n_pairs=[2, 4, 8],
        seeds=[0],
        more=[{"n_pairs": [8], "seeds": [0, 1, 2]}],
    )
    assert len(cells) == 6 + 4
    assert {cell.place["seed"] for cell in cells if cell.place["n_pairs"] == 8} == {0, 1, 2}
    assert {cell.place["seed"] for cell in cells if cell.place["n_pairs"] == 4} == {0}


def test_a_list_on_the_command_line_also_replaces_that_of_further_grids(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("sweep:\n  n_pairs: [2, 4]\n  seeds: [0]\n  more: [{n_pairs: [4], seeds: [1, 2]}]\n")
    assert len(cells_of(_load(Request(recipe=str(path))))) == 4
    request = Request(recipe=str(path), overrides={"sweep.seeds": [7], "sweep.models": None})
    assert [(c.place["n_pairs"], c.place["seed"]) for c in cells_of(_load(request))] == [(2, 7), (4, 7)]


def test_a_sweep_survives_the_round_trip(tmp_path):
    config = load_run_config(
        sets=[
            "sweep={models: [vla, control], points: [{task.n_pairs: 2}], grid: {model.short_conv: [0, 4]},"
            " variants: {control: {model.options.penalty: none}}, more: [{seeds: [1]}], threads: 2}"
        ]
    )
    (tmp_path / "again.yaml").write_text(dump_recipe(config))
    again = load_run_config(str(tmp_path / "again.yaml"))
    assert [cell.key for cell in cells_of(again)] == [cell.key for cell in cells_of(config)]
    assert len(cells_of(config)) == 8


class TestKeys:
    def cell(self, threads=1, **overrides):
        return Cell("vla", load_run_config(overrides=dict(overrides)), threads)

    @pytest.mark.parametrize("key", ["train.device", "train.log_every", "train.checkpoint_every"])
    def test_settings_that_decide_nothing_do_not_change_it(self, key):
        value = "cpu" if key == "train.device" else 7
        assert self.cell(**{key: value}).key == self.cell().key

    @pytest.mark.parametrize("key", ["train.lr", "seed", "model.d_head", "train.steps", "task.n_pairs"])
    def test_settings_that_decide_something_do(self, key):
        assert self.cell(**{key: 5}).key != self.cell().key

    def test_the_shortest_length_is_the_same_written_out(self):
        assert self.cell(**{"task.seq_len": 25}).key == self.cell().key
        assert self.cell(**{"task.seq_len": 26}).key != self.cell().key

    def test_threads_decide_roundings(self):
        assert self.cell(threads=2).key != self.cell().key

    def test_two_cells_never_share_a_folder(self):
        cells = grid(models=["vla", "vla:penalty=none"], grid={"model.short_conv": [0, 4]}, seeds=[0, 1])
        assert len({cell.folder for cell in cells}) == 8
        assert all("/" not in cell.folder and ":" not in cell.folder for cell in cells)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"n_pairs": [2], "points": [{"task.n_pairs": 4}]}, "sweep: task.n_pairs is set by n_pairs and by points"),
        ({"seeds": [2], "grid": {"seed": [4]}}, "sweep: seed is set by seeds and by grid"),
        ({"models": ["vla:train.lr=0.1"], "lrs": [0.2]}, "sweep: train.lr is set by lrs and by vla:train.lr=0.1"),
        ({"models": ["vla", "vla:penalty=learned"]}, "vla and vla:penalty=learned are the same model"),
        ({"models": ["vla:penalty="]}, "model vla:penalty=: 'penalty=' is no setting"),
        (
            {"models": ["linear:penalty=none"]},
            "the cell of linear:penalty=none: linear has no option 'penalty'",
        ),
        (
            {"grid": {"model.d_heda": [8]}},
            "the cell of vla with model.d_heda = 8: model.d_heda is not a key of model (did you mean 'd_head'?)",
        ),
        (
            {"n_pairs": [8, 200]},
            "the cell of vla with task.n_pairs = 200: mqar (vla protocol) needs n_pairs <= vocab_size - 1 = 127 "
            "distinct keys, got 200; raise vocab_size or lower n_pairs",
        ),
        ({"grid": {"task.updates": ["two"]}}, "the cell of vla with task.updates = two: task.updates: input should be"),
    ],
)
def test_what_is_impossible_is_refused_and_named(lists, message):
    with pytest.raises(CliError) as refused:
        grid(**lists)
    assert refused.value.message.startswith(message)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [vlaa]", "line 2: there is no model 'vlaa' (did you mean 'vla'?)"),
        ("models: ['vla:penalty']", "line 2: there is no model 'vla:penalty'"),
        ("more: [{models: [nothing]}]", "there is no model 'nothing'"),
        ("variants: {vla: {model.layers: 3}}", "'vla' cannot name a variant"),
        ("variants: {'a,b': {model.layers: 3}}", "'a,b' cannot name a variant"),
        ("grid: {model.d_head: []}", "sweep.grid.model.d_head: list should have at least 1 item"),
        ("nparis: [2]", "line 2: sweep.nparis is not a key of sweep (did you mean 'n_pairs'?)"),
        ("more: [{threads: 2}]", "threads is not a key"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"sweep:\n  {text}\n")
    with pytest.raises(CliError) as refused:
        load_run_config(str(path))
    assert message in refused.value.message


def test_a_mixer_of_the_users_own_keeps_the_colon_of_its_path():
    from linattn_cli.settings import split_arm

    assert split_arm("mine.py:Mine:gain=2") == ("mine.py:Mine", ["gain=2"])


def test_the_sweep_of_the_readme_is_a_recipe(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(sweep:.*?)```", readme, re.S)
    (tmp_path / "mine.yaml").write_text(block)
    assert len(cells_of(load_run_config(str(tmp_path / "mine.yaml")))) == 3 * 2 * 2 + 2 * 2 * 2


def test_an_arm_has_the_yaml_types_of_its_settings():
    assert parse_arm("vla:lambda0=1e-2:normalise_gate=false").changes == {
        "model.name": "vla",
        "model.options.lambda0": 0.01,
        "model.options.normalise_gate": False,
    }


def test_what_the_recipe_left_open_is_resolved_for_each_cell():
    """Warm-up is clamped to the steps of the cell, not to those of the recipe."""
    config = load_run_config(sets=["sweep.grid={train.steps: [50, 1000]}"], overrides={"train.steps": 10})
    assert [cell.config.train.warmup_steps for cell in cells_of(config)] == [50, 300]
