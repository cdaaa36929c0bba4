"""`--model path/to/mine.py:MyMixer`: a user's own layer through every command."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml

from linattn_cli import own_mixer
from linattn_cli.config import load_run_config
from linattn_cli.model import build_mixer
from linattn_cli.output import CliError
from linattn_cli.runs import read_metrics
from linattn_cli.settings import ModelConfig, RunConfig
from linattn_cli.training import TIMING_KEYS
from tests.cli.own_mixers import AVERAGE, EXAMPLE, PLAIN, RETENTION, TINY, WHOLE


@pytest.fixture
def mine(tmp_path):
    """Writes a file with a class `Mine` and gives its name."""

    def write(body: str = WHOLE, arguments: str = "", text: str | None = None, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(PLAIN.format(body=body, arguments=arguments) if text is None else text)
        own_mixer.allow(str(path))
        return f"{path}:Mine"

    return write


def config(name: str, **changes) -> ModelConfig:
    return ModelConfig(name=name, d_model=16, heads=2, d_head=8, **changes)


def deterministic(path):
    return [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in read_metrics(path)]


@pytest.mark.parametrize("name", [RETENTION, AVERAGE])
def test_it_trains_evaluates_resumes_and_is_repeated(name, linattn, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    code, out, err = linattn("train", "--model", name, *TINY, "--out", run, "--json")
    assert code == 0
    summary, recorded = json.loads(out)["summary"], json.loads(out)["config"]["model"]
    assert summary["state_bytes"] == (2 * 2 * 8 * 8 * 4 if name == RETENTION else 2 * 16 * 4)
    assert (summary["jacobian_norm_max"] is not None) == (name == RETENTION)
    assert ("MovingAverage has no form" in err) == (name == AVERAGE)
    assert f"next: linattn eval {run} --n-pairs 1,2,4 --trust" in err

    assert (run / "mixer.py").read_bytes() == EXAMPLE.read_bytes()
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe["model"]["name"] == f"mixer.py:{name.rpartition(':')[2]}"
    assert recipe["model"]["code_sha256"] == recorded["code_sha256"] == own_mixer.load(name).sha256

    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved)  # the run needs nothing outside its folder
    _, evaluated, _ = linattn("eval", moved, "--trust", "--json")
    assert json.loads(evaluated)["summary"]["accuracy"] == summary["accuracy"]
    _, evaluated, err = linattn("eval", run, "--model", name, "--json")
    assert json.loads(evaluated)["summary"]["accuracy"] == summary["accuracy"]
    assert "warning" not in err

    assert linattn("train", "--recipe", run / "recipe.yaml", "--trust", "--out", again)[0] == 0
    assert deterministic(again) == deterministic(run)
    assert (again / "recipe.yaml").read_text() == (run / "recipe.yaml").read_text()
    assert linattn("train", "--resume", "--out", again, "--steps", "4", "--trust")[0] == 0
    assert linattn("train", "--resume", "--out", again, "--steps", "5", "--model", name)[0] == 0
    assert yaml.safe_load((again / "recipe.yaml").read_text())["model"]["name"].startswith("mixer.py:")


def test_a_strangers_code_is_not_run(linattn, tmp_path):
    """Neither by a run folder nor by a recipe nor by a sweep, wherever they name it."""
    run, flag = tmp_path / "run", tmp_path / "it was run"
    assert linattn("train", "--model", RETENTION, *TINY, "--out", run)[0] == 0
    evil = EXAMPLE.read_text() + f"\nopen({str(flag)!r}, 'w').close()\n"
    (run / "mixer.py").write_text(evil)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    del recipe["model"]["code_sha256"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    hidden = [
        {"model": {"name": f"{run}/mixer.py:Retention"}},
        {"sweep": {"models": [f"{run}/mixer.py:Retention:slowest=4"]}},
        {"sweep": {"variants": {"a": {"model.name": "run/mixer.py:Retention"}}}},
        {"sweep": {"grid": {"model.name": ["run/mixer.py:Retention"]}}},
        {"sweep": {"more": [{"models": ["run/mixer.py:Retention"]}]}},
    ]
    lines = [("eval", run), ("train", "--resume", "--out", run), ("train", "--recipe", run / "recipe.yaml")]
    lines += [("probe-norm", "--run", run)]
    for number, data in enumerate(hidden):
        path = tmp_path / f"recipe-{number}.yaml"
        path.write_text(yaml.safe_dump(data))
        lines += [("train", "--recipe", path), ("capacity-sweep", "--recipe", path)]
        lines += [("capacity-sweep", "--recipe", path, "--lrs", "1e-3", "--n-pairs", "2")]
    for words in lines:
        code, out, err = linattn(*words)
        assert (code, out) == (2, ""), words
        assert "names code to run, " in err.splitlines()[0]
        assert "--trust" in err
        assert not flag.exists(), words
    assert linattn("eval", run, "--model", RETENTION)[0] == 0  # the weights are data, the code is ours
    assert not flag.exists()
    assert linattn("eval", run, "--trust")[0] == 0
    assert flag.exists()


def test_a_configuration_from_anywhere_loads_nothing_by_itself(monkeypatch):
    monkeypatch.setattr(own_mixer, "_allowed", set())
    with pytest.raises(CliError, match="names code to run") as refused:
        RunConfig.model_validate({"model": {"name": RETENTION}})
    assert refused.value.kind == "untrusted_code"
    assert load_run_config(overrides={"model.name": RETENTION}).model.options == {"slowest": 8}


def test_code_that_changed_is_noticed(linattn, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "mine.py"
    shutil.copy(EXAMPLE, copy)
    assert linattn("train", "--model", f"{copy}:Retention", *TINY, "--out", run)[0] == 0
    copy.write_text(copy.read_text() + "# changed\n")
    code, _, err = linattn("eval", run, "--model", f"{copy}:Retention")
    assert code == 0
    assert "warning: this run was trained with another Retention: its SHA-256 was " in err
    code, _, err = linattn("train", "--resume", "--out", run, "--steps", "9", "--model", f"{copy}:Retention")
    assert code == 2
    assert "was started with another Retention" in err
    (run / "mixer.py").write_text(copy.read_text())
    code, _, err = linattn("eval", run, "--trust")
    assert code == 2
    assert "mixer.py:Retention is not the code that this recipe was written for" in err


def test_eval_takes_the_class_that_was_trained(linattn, tmp_path):
    run = tmp_path / "run"
    assert linattn("train", "--model", RETENTION, *TINY, "--out", run)[0] == 0
    assert "was trained with mixer.py:Retention, not with " in linattn("eval", run, "--model", AVERAGE)[2]
    assert "not with vla" in linattn("eval", run, "--model", "vla")[2]
    assert linattn("train", *TINY, "--out", tmp_path / "vla")[0] == 0
    code, _, err = linattn("eval", tmp_path / "vla", "--model", RETENTION)
    assert code == 2
    assert "was trained with vla" in err


def test_its_parameters_are_options(linattn, tmp_path, mine):
    own = config(mine(), options={"scale": 2.0})
    assert build_mixer(own).scale == 2.0
    assert config(mine()).options == {"scale": 1.0}
    code, _, err = linattn("train", "--model", RETENTION, *TINY, "--set", "model.options.slowst=3")
    assert code == 2
    assert "has no option 'slowst' (did you mean 'slowest'?)" in err
    code, _, err = linattn("train", "--model", RETENTION, *TINY, "--set", "model.options.slowest=fast")
    assert "option slowest must be a whole number; got 'fast'" in err


def test_its_weights_load_into_the_bare_class():
    own_mixer.allow(RETENTION)
    built = build_mixer(config(RETENTION))
    bare = own_mixer.load(RETENTION).layer(16, 2, 8)
    bare.load_state_dict(built.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(bare(x), built(x))


def test_verify_scan_proves_what_it_can(linattn):
    words = ("verify-scan", "--models", f"{RETENTION},{AVERAGE}", "--quick", "--device", "cpu", "--json")
    code, out, err = linattn(*words)
    assert code == 0
    rows = json.loads(out)["results"]
    assert {row["form"] for row in rows if row["model"] == RETENTION and row["passed"]} >= {"chunk", "chunk-decode"}
    for name in (RETENTION, AVERAGE):
        passed = {row["form"] for row in rows if row["model"] == name and row["passed"]}
        assert passed >= {
            *("layer-again", "layer-future", "layer-prefix", "layer-alone", "layer-split", "layer-decode", "layer")
        }
    (padding,) = [row for row in rows if row["form"] == "layer-padding" and row["model"] == AVERAGE]
    assert (padding["status"], padding["passed"]) == ("not run", None)
    assert "takes no padding_mask" in padding["reason"]
    assert "MovingAverage has no form" in err


@pytest.mark.parametrize(
    ("body", "arguments", "form", "quantity"),
    [
        ("return self.linear(x).flip(1).cumsum(1)", "", "layer-future", "o"),
        ("return self.linear(x).cumsum(1) / x.shape[1]", "", "layer-prefix", "o"),
        ("return self.linear(x).cumsum(1) + x.mean(0)", "", "layer-alone", "o"),
        ("return self.linear(x).cumsum(1) * torch.nan", "", "layer", "o"),
        ("return self.linear(x).cumsum(1) + torch.rand(())", "", "layer-again", "o"),
        ("return (x * self.linear.weight[0]).abs().sqrt()[..., :1] * x * 0 + self.linear(x).abs().sqrt() * 0 + "
         "(self.linear(x) * 0).sqrt()", "", "layer-again", "grad x"),
        ("y = self.linear(x).cumsum(1) + (0 if state is None else 0.99 * state); "
         "return (y, y[:, -1:]) if return_state else y", ", state=None, return_state=False", "layer-decode", "o"),
        ("y = self.linear(x).cumsum(1) + (0 if state is None else state); "
         "return (y, y[:, -1:].detach()) if return_state else y", ", state=None, return_state=False", "layer-split",
         "grad x"),
        ("return self.linear(x).cumsum(1)", ", padding_mask=None", "layer-padding", "o"),
    ],
    ids=["future", "length", "batch", "nan", "random", "gradient", "carried", "detached", "padding"],
)  # fmt: skip
def test_verify_scan_catches_what_is_wrong(linattn, mine, body, arguments, form, quantity):
    words = ("verify-scan", "--models", mine(body, arguments), "--quick", "--device", "cpu", "--json")
    code, out, err = linattn(*words)
    assert code == 1, err
    failed = [row for row in json.loads(out)["results"] if row["passed"] is False]
    assert (form, quantity) in {(row["form"], row["quantity"]) for row in failed}


def test_latency_times_it(linattn):
    shape = ("--seq-lens", "16", "--d-head", "8", "--heads", "2", "--budget-s", "0.05", "--device", "cpu", "--json")
    for mode in ("forward", "train", "decode"):
        code, out, err = linattn("latency", "--models", f"{RETENTION},{AVERAGE}", "--mode", mode, *shape)
        assert code == 0
        rows = {row["model"]: row for row in json.loads(out)["results"]}
        assert rows[RETENTION]["impl"] == "chunk"
        assert rows[AVERAGE]["impl"] == "layer"
        assert all(row["latency_ms_p50"] > 0 for row in rows.values())
        assert "MovingAverage is timed as a layer: with its projections" in err
    code, out, _ = linattn("latency", "--models", AVERAGE, "--impl", "chunk,auto", *shape)
    (refused,) = [row for row in json.loads(out)["results"] if row["status"] == "not run"]
    assert refused["reason"] == "MovingAverage has no impl 'chunk'; it has auto"


def test_latency_does_not_time_a_layer_that_is_wrong(linattn, mine):
    name = mine("return self.linear(x).cumsum(1) / x.shape[1]")
    shape = ("--seq-lens", "128", "--d-head", "8", "--heads", "2", "--budget-s", "0.05", "--device", "cpu", "--json")
    state = ", state=None, return_state=False"
    looks_ahead = mine(
        "y = self.linear(x).cumsum(1) + x.sum(1, keepdim=True) + (0 if state is None else state); "
        "return (y, y[:, -1:]) if return_state else y",
        state,
        name="ahead.py",
    )
    code, out, _ = linattn("latency", "--models", f"{name},{looks_ahead}", *shape)
    assert code == 1
    rows = {row["model"]: row for row in json.loads(out)["results"]}
    assert rows[looks_ahead]["status"] == "check failed"
    assert rows[looks_ahead]["latency_ms_p50"] is None


def test_probe_norm_probes_it(linattn):
    words = ("probe-norm", "--d-head", "4", "--heads", "1", "--seq-len", "16", "--device", "cpu")
    code, out, _ = linattn(*words, "--models", RETENTION, "--json")
    assert code == 0
    assert RETENTION in out
    assert linattn(*words, "--models", RETENTION, "--source", "model", "--json")[0] == 0
    code, _, err = linattn(*words, "--models", AVERAGE)
    assert code == 2
    assert "MovingAverage has no form with a serial oracle to probe" in err
    assert "is no subclass of Mixer" in linattn(*words, "--models", AVERAGE, "--source", "model")[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"short_conv": 4}, "Mine does not take short_conv, and short_conv 4 was asked for"),
        ({"kv_heads": 1}, "Mine does not take kv_heads, and kv_heads 1 was asked for"),
        ({"positions": "rotary"}, "Mine does not take rotary, and positions rotary was asked for"),
        ({"chunk_size": 8}, "Mine does not take chunk_size, and chunk_size 8 was asked for"),
    ],
)
def test_a_setting_of_the_backbone_is_not_lost_without_a_word(mine, changes, said):
    with pytest.raises(CliError, match=said):
        build_mixer(config(mine(), **changes))


def test_a_sweep_takes_it(linattn, tmp_path):
    sweep = tmp_path / "sweep"
    tiny = [word for word in TINY if word not in ("--d-head", "8", "--steps", "3")]
    words = ("capacity-sweep", *tiny, "--d-heads", "8", "--steps", "2", "--workers", "1", "--out", sweep, "--json")
    models = f"{RETENTION},{RETENTION}:slowest=4,{AVERAGE}"
    code, out, err = linattn(*words, "--models", models, "--lrs", "1e-3")
    assert code == 0, err
    rows = json.loads(out)["results"]
    assert [row["status"] for row in rows] == ["finished"] * 3
    assert [row["model"] for row in rows] == models.split(",")
    assert rows[2]["impl"] == "own code"
    for row in rows:
        assert linattn("train", "--recipe", sweep / row["run"] / "recipe.yaml", "--out", tmp_path / row["key"])[0] == 2
    recipe = sweep / rows[1]["run"] / "recipe.yaml"
    assert linattn("train", "--recipe", recipe, "--trust", "--out", tmp_path / "again")[0] == 0
    assert deterministic(tmp_path / "again")[-1]["loss"] == deterministic(recipe.parent)[-1]["loss"]
    assert "names code to run" in linattn("capacity-sweep", "--resume", "--out", sweep)[2]
    code, _, err = linattn("capacity-sweep", "--resume", "--out", sweep, "--trust")
    assert code == 0
    assert "every cell is there already" in err


def test_a_layer_without_a_state_trains_and_says_so(linattn, mine, tmp_path):
    code, out, err = linattn("train", "--model", mine(), *TINY, "--out", tmp_path / "run", "--json")
    assert code == 0
    summary = json.loads(out)["summary"]
    assert summary["state_bytes"] is None
    assert "Mine has no state: it is run on whole sequences" in err
    assert json.loads(out)["env"]["impl"] == "own code"


def test_paths_with_spaces_and_unicode(linattn, tmp_path):
    folder = tmp_path / "mein Ordner ü"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "meine Schicht.py")
    name = f"{folder}/meine Schicht.py:Retention"
    run = folder / "ein Lauf"
    assert linattn("train", "--model", name, *TINY, "--out", run)[0] == 0
    assert linattn("eval", run, "--trust")[0] == 0
    assert own_mixer.short_name(name) == "Retention"
