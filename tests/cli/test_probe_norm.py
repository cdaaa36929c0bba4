"""`linattn probe-norm`: rows, verdicts that can go either way, and checks that a planted error trips."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
import torch

from linattn_cli import probe_measure, probe_source
from linattn_cli.app import main
from linattn_cli.kernels import dispatch
from linattn_cli.kernels.delta.chunk import delta_scan_chunk
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.probe_blowup import PUBLISHED_LOG10, blow_up
from linattn_cli.probe_jacobians import Step, build_matrix

SMALL = ("--heads", "2", "--d-head", "8", "--device", "cpu", "-q")
STATES = {"hla2": ["S", "H"], "ahla": ["P", "E"], "hla3": ["SK", "P", "H"]}


def call(capsys, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["probe-norm", *words])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def document(capsys, *words: str, code: int = 0) -> dict:
    got, out, err = call(capsys, *words, *SMALL, "--json")
    assert got == code, err
    return json.loads(out)


def claims(found: dict) -> dict[str, bool | None]:
    verdicts = {key: value for key, value in found["summary"].items() if isinstance(value, dict) and "holds" in value}
    return {key: value["holds"] for key, value in verdicts.items()}


def test_every_mixer_has_a_row(capsys):
    found = document(capsys, "--seq-len", "40")
    rows = {row["model"]: row for row in found["results"]}
    assert list(rows) == list(MIXERS)
    assert rows["softmax"]["jacobian"] == "none: its cache grows with T"
    assert "jacobian_norm_max" not in rows["softmax"]
    for name, row in rows.items():
        if name == "softmax":
            continue
        assert row["jacobian"] == ", ".join(STATES.get(name, ["S"]))
        assert row["jacobian_steps"] == 40
        assert row["jacobian_norm_max"] >= row["jacobian_norm_mean"] > 0
        assert row["spectral_radius_max"] <= row["jacobian_norm_max"] + 1e-7
        assert row["gradient_error"] < 1e-9
        assert row["jacobian_error"] < 1e-12
        assert (row["nonfinite_step"], row["nonfinite_tensor"]) == (None, None)
        for n in (1, 2, 4, 8, 16, 32, 40):
            assert row[f"product_norm_{n}"] > 0
            assert row[f"gradient_norm_{n}"] > 0
        for tensor in row["jacobian"].split(", "):
            assert row[f"state_norm_max_{tensor}"] >= row[f"state_norm_{tensor}"] > 0
            assert len(row["series"]["state_norm"][tensor]) == len(row["series"]["steps"]) == 40
    assert {name for name in rows if "condition_A_max" in rows[name]} == {"vla", "rls", "mesa"}
    assert {name for name in rows if rows[name].get("closed_form_error") is not None} == {"vla"}
    assert rows["vla"]["joint_jacobian_norm_max"] > rows["vla"]["jacobian_norm_max"]
    assert rows["linear"]["jacobian_norm_max"] == pytest.approx(1)
    assert rows["mesa"]["product_norm_40"] == pytest.approx(1)


def test_what_the_paper_claims_and_what_is_true(capsys):
    found = document(capsys, "--models", "vla,linear", "--seq-len", "400")
    assert claims(found) == {
        "vla_prop1": True,
        "vla_prop2_norm": False,
        "vla_prop2_radius": True,
        "vla_closed_form": True,
        "vla_no_explosion": True,
        "vla_no_vanishing": False,
        "linear_unbounded": True,
    }
    summary, row = found["summary"], found["results"][0]
    assert summary["vla_prop2_norm"]["value"] == row["jacobian_norm_max"] > 1.01
    assert summary["vla_closed_form"]["value"] == row["closed_form_error"] < 1e-12
    assert row["cosine_min"] == pytest.approx((5 - (2 * row["jacobian_norm_max"] - 1) ** 2) / 4, abs=1e-9)
    assert "up to 1." in summary["vla_prop2_norm"]["text"]


def test_a_control_and_a_short_sequence_are_judged_otherwise(capsys):
    found = document(capsys, "--models", "vla", "--seq-len", "20")
    assert claims(found)["vla_prop1"] is None
    assert "longer --seq-len" in found["summary"]["vla_prop1"]["text"]
    control = document(capsys, "--models", "vla:penalty=none", "--seq-len", "20")
    assert claims(control) == {}
    assert control["results"][0]["jacobian_norm_max"] == pytest.approx(1, abs=1e-7)
    key = claims(document(capsys, "--models", "vla:penalty=key:lambda0=1", "--seq-len", "20"))
    assert key["vla_prop2_norm"] is False
    assert key["vla_closed_form"] is True


def test_gates_that_are_not_normalised_blow_up(capsys):
    found = document(capsys, "--models", "vla", "--seq-len", "200", "--no-normalise-gate")
    assert claims(found) == {
        "vla_unnormalised_gate": True,
        "vla_unnormalised_gradients": True,
        "vla_unnormalised_state": True,
    }
    assert len(found["summary"]["unnormalised_log10_by_step"]["repeated_key"]) == 25
    summary = found["summary"]
    assert summary["unnormalised_repeated_key_log10"] == pytest.approx(25 * math.log10(18.2), abs=1e-9)
    assert summary["unnormalised_random_keys_log10"] < 10
    assert pytest.approx(32.08, abs=0.01) == PUBLISHED_LOG10
    assert found["results"][0]["jacobian_norm_max"] > 5


def test_the_blow_up_is_of_a_power():
    found = blow_up()
    steps = torch.arange(1, 26, dtype=torch.float64)
    torch.testing.assert_close(found.repeated, steps * math.log10(18.2), rtol=1e-10, atol=1e-10)
    assert (found.random[1:] < found.repeated[1:]).all()


def test_an_overflow_is_named_and_no_failure(capsys):
    unstable = "vla:normalise_gate=false:penalty=none:lambda0=0.001"
    code, out, err = call(capsys, "--models", unstable, "--seq-len", "60", *SMALL, "--json")
    assert code == 0, err
    row = json.loads(out)["results"][0]
    assert row["gradient_norm_60"] > 1e150
    longer = document(capsys, "--models", unstable, "--seq-len", "400")["results"][0]
    assert longer["product_norm_400"] is None
    assert longer["product_norm_400_is_inf"]
    assert longer["product_norm_log10"] > 900
    assert longer["jacobian_norm_max"] == pytest.approx(999, abs=1e-6)
    assert row["nonfinite_step"] > 1
    assert f"{row['nonfinite_tensor']} is not finite from step {row['nonfinite_step']} on" in err
    assert row["product_norm_60"] > 1e150


def test_inputs_that_are_not_finite_are_named(capsys, monkeypatch):
    right = probe_source._draw

    def broken(*given):
        made = right(*given)
        made["k"][0, 4] = float("nan")
        return made

    monkeypatch.setattr(probe_source, "_draw", broken)
    for row in document(capsys, "--seq-len", "10", "--models", "vla,rls,hla3")["results"]:
        assert row["jacobian"] == "none: the input k is not finite"
        assert (row["nonfinite_step"], row["nonfinite_tensor"]) == (5, "k")


def test_a_wrong_matrix_is_noticed(capsys, monkeypatch):
    monkeypatch.setattr(probe_measure, "build_matrix", lambda step: build_matrix(step) * (1 + 1e-6))
    found = document(capsys, "--models", "deltanet", "--seq-len", "12", code=1)
    assert found["status"] == "failed"
    assert "deltanet (seed 0): the Jacobian is off from the step it is of by" in found["error"]["message"]


def test_a_wrong_direction_is_noticed(capsys, monkeypatch):
    """The closed form is in the a and k of the forward pass; here they are not those of the step."""
    right = probe_source.vla_directions

    def wrong(*tensors, **options):
        key, write, state = right(*tensors, **options)
        return key, torch.nn.functional.normalize(write + 0.01 * key, dim=-1), state

    monkeypatch.setattr(probe_source, "vla_directions", wrong)
    found = document(capsys, "--models", "vla", "--seq-len", "12", code=1)
    assert claims(found)["vla_closed_form"] is False
    assert found["results"][0]["closed_form_error"] > 1e-5


def test_a_wrong_product_with_vectors_is_noticed(capsys, monkeypatch):
    right = Step.reverse

    def wrong(self, cotangents):
        return {name: x * (1.001 if name == "H" else 1) for name, x in right(self, cotangents).items()}

    monkeypatch.setattr(Step, "reverse", wrong)
    found = document(capsys, "--models", "hla2", "--seq-len", "12", code=1)
    assert "hla2 (seed 0)" in found["error"]["message"]


def test_a_wrong_backward_is_noticed(capsys):
    def leaking(q, p, a, v, *, initial_state, **options):
        o, state, residual = delta_scan_chunk(q, p, a, v, initial_state=initial_state, **options)
        leak = 0 if initial_state is None else 1e-3 * (initial_state - initial_state.detach())
        return o, state + leak, residual

    with dispatch.override("delta_scan", "chunk", leaking):
        found = document(capsys, "--models", "deltanet", "--seq-len", "30", code=1)
    assert "gradients by autograd and by products of Jacobians differ" in found["error"]["message"]


def test_an_untrained_model_has_a_row_a_layer(capsys):
    found = document(capsys, "--models", "vla,hla2:decay=cascade", "--seq-len", "20", "--source", "model")
    rows = [(row["model"], row["source"], row["layer"]) for row in found["results"]]
    assert rows == [(name, "model", layer) for name in ("vla", "hla2:decay=cascade") for layer in (0, 1)]
    assert claims(found)["vla_closed_form"] is True
    assert max(row["spectral_radius_max"] for row in found["results"][2:]) < 1


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    words = ["--set", "model.d_model=16", "--set", "model.heads=2", "--d-head", "8", "--n-pairs", "2"]
    more = ["--batch-size", "4", "--set", "train.eval_examples=16", "--steps", "3", "--device", "cpu", "-q"]
    with pytest.raises(SystemExit) as left:
        main(["train", *words, *more, "--out", str(path)])
    assert not left.value.code
    return path


def test_a_trained_run(capsys, run):
    code, out, err = call(capsys, "--run", str(run), "--device", "cpu", "-q", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert json.loads(call(capsys, str(run), "--device", "cpu", "-q", "--json")[1])["results"] == found["results"]
    assert [(row["source"], row["layer"], row["seq_len"]) for row in found["results"]] == [
        (str(run), layer, 7) for layer in (0, 1)
    ]
    assert claims(found)["vla_closed_form"] is True
    code, out, _ = call(capsys, "--run", str(run), "--seq-len", "30", "--dtype", "bfloat16", "-q", "--json")
    assert code == 0
    assert json.loads(out)["results"][0]["seq_len"] == 30


def test_the_norms_of_a_run_are_those_that_training_printed(capsys, run):
    """`train` takes the largest norm from a and k as the layers give them, here it is measured on the step."""
    from linattn_cli import checkpoints, experiment
    from linattn_cli.config import load_run_config
    from linattn_cli.probes import jacobian_norms

    config = load_run_config(str(run / "recipe.yaml"))
    task, model = experiment.build(config)
    experiment.load_weights(model, checkpoints.load(run))
    batch = task.batch(probe_source.RUN_SEQUENCES, seed=config.seed, stream="test", index=0)
    norms = jacobian_norms(model, torch.from_numpy(batch.inputs))
    _, out, _ = call(capsys, "--run", str(run), "-q", "--json")
    for row, layer in zip(json.loads(out)["results"], norms, strict=True):
        assert row["jacobian_norm_max"] == pytest.approx(layer.largest, rel=1e-5)


def test_seeds_and_dtypes(capsys):
    found = document(capsys, "--models", "rls,mesa", "--seq-len", "20", "--seeds", "0,4", "--dtype", "float64")
    assert [(row["model"], row["seed"]) for row in found["results"]] == [
        (name, seed) for name in ("rls", "mesa") for seed in (0, 4)
    ]
    assert found["results"][0]["jacobian_norm_max"] != found["results"][1]["jacobian_norm_max"]
    half = document(capsys, "--models", "vla", "--seq-len", "20", "--dtype", "bfloat16")
    assert half["results"][0]["closed_form_error"] < 1e-5


def test_every_format_says_the_same(capsys):
    words = ("--models", "vla,softmax", "--seq-len", "20", *SMALL)
    (row, softmax) = document(capsys, "--models", "vla,softmax", "--seq-len", "20")["results"]
    _, text, _ = call(capsys, *words, "--format", "csv")
    first, second = csv.DictReader(io.StringIO(text))
    assert float(first["jacobian_norm_max"]) == row["jacobian_norm_max"]
    assert "series" not in first
    assert second["jacobian"] == softmax["jacobian"]
    _, table, _ = call(capsys, *words)
    _, markdown, _ = call(capsys, *words, "--format", "markdown")
    for text in (table, markdown):
        assert f"{row['jacobian_norm_max']:.4g}" in text
        assert "VLA Prop. 2: the spectral norm of J_t is 1" in text
        assert "does not hold: up to 1." in text
    for title in ("Jacobian of a step", "product of n Jacobians", "d(output at T)", "Frobenius norm of the state"):
        assert title in table


@pytest.mark.parametrize(("name", "magic"), [("norms.png", b"\x89PNG"), ("norms.svg", b"<?xml")])
def test_a_plot_is_written(capsys, tmp_path, name, magic):
    path = tmp_path / name
    words = ("--models", "vla,hla3,softmax", "--seq-len", "20", "--no-normalise-gate", "--plot", str(path))
    assert call(capsys, *words, *SMALL)[0] == 0
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--models", "vlaa"), "there is no model 'vlaa' (did you mean 'vla'?)"),
        (("--models", "vla:penlty=none"), "vla has no option 'penlty' (did you mean 'penalty'?)"),
        (("--models", "vla:seed=1"), "--models: vla:seed=1 sets a seed"),
        (("--source", "modle"), "--source must be one of operator, model; got 'modle' (did you mean 'model'?)"),
        (("--seq-len", "0"), "--seq-len must be at least 1, got 0"),
        (("--d-head", "300"), "model.d_head"),
        (("--seeds", "x"), "--seeds: 'x' is not a whole number"),
        (("--dtype", "float16"), "train.dtype"),
        (("--impl", "chunkk"), "model.impl"),
        (("--plot", "norms.pdf"), "--plot must end in .png or .svg"),
        (("--run", "no-such-run"), "run folder no-such-run does not exist"),
        (("no-such-run",), "run folder no-such-run does not exist"),
        (("--run", "no-such-run", "--models", "vla"), "--models does not go with --run"),
        (("--run", "no-such-run", "--heads", "2"), "--heads does not go with --run"),
        (("--step", "3"), "--step belongs to --run"),
        (("--models", "hla2", "--no-normalise-gate"), "--no-normalise-gate is an option of vla"),
        (("--models", "softmax", "--impl", "scan"), "softmax has no impl 'scan'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_one_line_and_exit_2(capsys, words, said):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    first, *rest = err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert all(line.startswith("hint: ") for line in rest)


def test_all_models_by_an_implementation_are_those_that_have_it(capsys):
    found = document(capsys, "--seq-len", "10", "--impl", "scan")
    assert [row["model"] for row in found["results"]] == [name for name in MIXERS if name != "softmax"]


def test_a_triton_that_cannot_run_is_exit_3(capsys):
    code, _, err = call(capsys, "--models", "vla", "--impl", "triton", "--device", "cpu")
    assert code == 3
    assert "use --impl chunk" in err


@pytest.mark.slow
def test_vla_settles_and_linear_attention_does_not(capsys):
    """The paper's length: norms of S after 1000 tokens."""
    words = ("--models", "linear,vla,decay_delta", "--d-head", "32", "--heads", "4", "--device", "cpu", "-q")
    code, out, _ = call(capsys, *words, "--json")
    assert code == 0
    found = json.loads(out)
    rows = {row["model"]: row for row in found["results"]}
    assert found["config"]["seq_len"] == 1000
    assert rows["linear"]["growth_exponent_S"] == pytest.approx(0.5, abs=0.1)
    assert abs(rows["vla"]["growth_exponent_S"]) < 0.1
    assert 20 * rows["vla"]["state_norm_S"] < rows["linear"]["state_norm_S"]
    assert found["summary"]["vla_paper_norms"]["holds"] is False
