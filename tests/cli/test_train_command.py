"""`linattn train` and `linattn eval` as a user meets them: real processes, real folders, real damage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from linattn_cli import experiment
from linattn_cli.app import main
from linattn_cli.runs import RunFolder, read_metrics
from linattn_cli.training import TIMING_KEYS

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--d-head", "8", "--set", "model.ffn=16"),
    *("--n-pairs", "2", "--batch-size", "4", "--set", "task.vocab_size=16", "--device", "cpu"),
    *("--set", "train.log_every=1", "--set", "train.eval_examples=64", "--set", "train.warmup_steps=5"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The number of threads is part of what makes two runs equal bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of twelve steps; tests that change it copy nothing, so they must not."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.raises(SystemExit) as left:
        main(["train", *TINY, "--steps", "12", "--checkpoint-every", "5", "--out", str(path), "--quiet"])
    assert not left.value.code
    return path


def start(*words, **options):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "linattn_cli", *map(str, words)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)


def deterministic(path):
    return [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in read_metrics(path)]


def test_a_run_leaves_what_it_promises(trained):
    files = sorted(str(p.relative_to(trained)) for p in trained.rglob("*") if p.is_file())
    names = ["manifest.json", "model.safetensors", "state.pt"]
    assert files == [
        ".lock",
        *(f"checkpoints/step-{step}/{name}" for step in (10, 12) for name in names),
        "metrics.jsonl",
        "recipe.yaml",
        "result.json",
    ]
    result = json.loads((trained / "result.json").read_text())
    assert result["command"] == "train"
    assert result["status"] == "ok"
    assert result["config"] == yaml.safe_load((trained / "recipe.yaml").read_text()) | {"sweep": None}
    summary = result["summary"]
    assert summary["steps"] == 12
    assert summary["stopped_by"] == "steps"
    assert summary["chance_vocab"] == 1 / 16
    assert summary["chance_pairs"] == 1 / 2
    assert 0 <= summary["accuracy"] <= 1
    assert summary["tokens_per_s"] > 0
    # S and the penalty of 2 layers and 2 heads: S 8x8, P 8x8, A 8x8, z 8, four bytes each
    assert summary["state_bytes"] == 2 * 2 * (3 * 64 + 8) * 4
    assert summary["state_norm_max_S"] > 0
    assert summary["state_norm_max_A"] > 0
    assert 1.0 <= summary["jacobian_norm_max"] <= (1 + 5**0.5) / 2 + 1e-6
    assert len(summary["fingerprint"]) == 16
    assert [row["step"] for row in read_metrics(trained)] == list(range(1, 13))


def test_its_recipe_repeats_it(trained, tmp_path, linattn):
    code, out, _ = linattn("train", "--recipe", trained / "recipe.yaml", "--out", tmp_path / "again", "--json")
    assert code == 0
    document = json.loads(out)
    assert deterministic(tmp_path / "again") == deterministic(trained)
    first = json.loads((trained / "result.json").read_text())["summary"]
    timing = {"tokens_per_s", "train_s", "run"}
    assert {k: v for k, v in document["summary"].items() if k not in timing} == {
        k: v for k, v in first.items() if k not in timing
    }


def test_the_table_ends_with_where_and_what_next(tmp_path, linattn):
    out = tmp_path / "with space"
    code, table, err = linattn("train", *TINY, "--steps", 2, "--model", "softmax", "--out", out)
    assert code == 0
    lines = dict(line.split(None, 1) for line in table.splitlines() if len(line.split(None, 1)) == 2)
    assert lines["jacobian_norm_max"] == "-"
    assert lines["jacobian"].strip() == "none: softmax has no state of fixed size"
    assert not any(name.startswith("state_norm") for name in lines)
    assert err.splitlines()[0].startswith("linattn ")
    assert f"saved in {out}" in err
    assert err.splitlines()[-1] == f"next: linattn eval '{out}' --n-pairs 1,2,4"


def test_linear_attention_has_the_identity_as_its_jacobian(tmp_path, linattn):
    code, out, _ = linattn("train", *TINY, "--steps", 1, "--model", "linear", "--out", tmp_path / "r", "--json")
    assert code == 0
    assert json.loads(out)["summary"]["jacobian_norm_max"] == 1.0


def test_kill_9_then_resume_repeats_the_unbroken_losses_bit_for_bit(tmp_path, linattn):
    settings = ["train", *TINY, "--steps", "160", "--checkpoint-every", "40", "--quiet"]
    killed = start(*settings, "--out", tmp_path / "killed")
    wait_for(tmp_path / "killed" / "checkpoints" / "step-40", killed)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    steps_done = read_metrics(tmp_path / "killed")[-1]["step"]
    assert 40 <= steps_done < 160

    assert linattn(*settings, "--out", tmp_path / "killed", "--resume")[0] == 0
    assert linattn(*settings, "--out", tmp_path / "whole")[0] == 0
    assert deterministic(tmp_path / "killed") == deterministic(tmp_path / "whole")
    assert [row["step"] for row in read_metrics(tmp_path / "killed")] == list(range(1, 161))
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("killed", "whole")]
    assert results[0]["summary"]["loss"] == results[1]["summary"]["loss"]


def test_a_second_process_is_refused_and_sigterm_saves_a_checkpoint(tmp_path, linattn):
    run = tmp_path / "run"
    first = start("train", *TINY, "--steps", "100000", "--checkpoint-every", "20", "--out", run)
    wait_for(run / "checkpoints" / "step-20", first)
    for words in (["--resume"], []):
        code, _, err = linattn("train", *TINY, "--out", run, *words)
        assert code == 2
        assert f"run folder {run} is in use by process {first.pid}" in err
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 143
    assert "SIGTERM at step" in err
    assert f"linattn train --resume --out {run}" in err.splitlines()[-1]
    saved = max(int(p.name.removeprefix("step-")) for p in (run / "checkpoints").iterdir())
    assert f"SIGTERM at step {saved}:" in err


def copy(trained, tmp_path):
    subprocess.run(["cp", "-r", trained, tmp_path / "copy"], check=True)
    return tmp_path / "copy"


def test_a_truncated_checkpoint_is_named_and_the_previous_one_resumes(trained, tmp_path, linattn):
    run = copy(trained, tmp_path)
    path = run / "checkpoints" / "step-12" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    for words in (["train", "--resume", "--out", run], ["eval", run]):
        code, _, err = linattn(*words)
        assert code == 2
        assert f"error: checkpoint {path.parent} is damaged: model.safetensors has 100 bytes" in err
        assert f"linattn train --resume --out {run} --from-step 10" in err
    assert linattn("eval", run, "--step", 10, "--examples", 8)[0] == 0
    code, _, err = linattn("train", "--resume", "--out", run, "--from-step", 10)
    assert code == 0
    assert "dropped the checkpoint of step 12" in err
    assert deterministic(run) == deterministic(trained)


def test_a_finished_run_resumes_to_the_same_result_or_goes_further(trained, tmp_path, linattn):
    run = copy(trained, tmp_path)
    code, out, _ = linattn("train", "--resume", "--out", run, "--json")
    assert code == 0
    assert json.loads(out)["summary"]["steps"] == 12
    assert deterministic(run) == deterministic(trained)
    code, out, err = linattn("train", "--resume", "--out", run, "--steps", 14, "--json")
    assert code == 0
    assert json.loads(out)["summary"]["steps"] == 14
    assert "train.steps changed from 12 to 14" in err
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["steps"] == 14


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "0.5"], "was started with train.lr = 0.0003, not 0.5"),
        (["--model", "linear"], "vla"),
        (["--steps", "3"], "is at step 12 already, past --steps 3"),
        (["--from-step", "7"], "has no checkpoint of step 7"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused(trained, tmp_path, linattn, words, message):
    run = copy(trained, tmp_path)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    code, _, err = linattn("train", "--resume", "--out", run, *words)
    assert code == 2
    assert message in err
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_resume_on_a_device_that_is_not_there_changes_nothing(trained, tmp_path, linattn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = copy(trained, tmp_path)
    words = ("train", "--resume", "--out", run, "--from-step", 10, "--device")
    assert linattn(*words, "cuda")[0] == 3
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-10", "step-12"]
    assert deterministic(run) == deterministic(trained)
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["device"] == "cpu"
    code, _, err = linattn(*words, "auto")
    assert code == 0
    assert "train.device changed from cpu to auto" in err


def test_a_run_killed_before_its_first_checkpoint_starts_again(trained, tmp_path, linattn):
    run = copy(trained, tmp_path)
    subprocess.run(["rm", "-r", run / "checkpoints", run / "result.json"], check=True)
    code, _, err = linattn("train", "--resume", "--out", run)
    assert code == 0
    assert "no checkpoint yet: starting from the first step" in err
    assert deterministic(run) == deterministic(trained)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--resume"], "--resume needs the run folder", "linattn train --resume --out"),
        (["--from-step", "3"], "--from-step belongs to --resume", "--resume"),
        (["--resume", "--out", "nowhere"], "run folder nowhere does not exist", "linattn train"),
        (["--out", "file/run"], "cannot use file: a file is in the way", "--out"),
        (["--seq-len", "6"], "needs seq_len >= 3*n_pairs + 2*updates + 1 = 7, got 6", ""),
        (["--model", "vlaa"], "there is no model 'vlaa' (did you mean 'vla'?)", ""),
        (["--set", "model.d_heda=3"], "did you mean 'd_head'?", ""),
        (["--impl", "scam"], "impl", ""),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy(tmp_path, monkeypatch, linattn, words, message, hint):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    code, out, err = linattn("train", *TINY, "--steps", 1, *words)
    assert code == 2
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert hint in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_gpu_that_is_not_there_is_exit_3(tmp_path, linattn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = linattn("train", *TINY, "--device", "cuda", "--out", tmp_path / "run")
    assert code == 3
    assert "--device cpu" in err
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_is_exit_1_in_json_too(tmp_path, linattn):
    code, out, err = linattn("train", *TINY, "--steps", 40, "--lr", "1e30", "--out", tmp_path / "run", "--json")
    assert code == 1
    document = json.loads(out)
    assert document["status"] == "failed"
    assert document["error"]["type"] == "non_finite"
    assert "training is not finite at step" in document["error"]["message"]
    assert "--lr" in document["error"]["hint"]
    assert "failed: training is not finite" in err


def test_a_full_disk_is_exit_4(tmp_path, linattn, monkeypatch):
    def full(self, row):
        from linattn_cli.runs import storage_errors

        with storage_errors(self.path), open("/dev/full", "w") as file:
            file.write("x" * 10)
            file.flush()

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    code, _, err = linattn("train", *TINY, "--steps", 2, "--out", tmp_path / "run")
    assert code == 4
    assert "No space left on device" in err


def test_the_default_folder_is_numbered(tmp_path, monkeypatch, linattn):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert linattn("train", *TINY, "--steps", 1)[0] == 0
    assert sorted(os.listdir("runs")) == ["vla-mqar-1", "vla-mqar-2"]


def test_eval_has_a_row_a_size_and_a_row_a_distance(trained, linattn):
    code, out, err = linattn("eval", trained, "--n-pairs", "2,4", "--json")
    assert code == 0
    rows = json.loads(out)["results"]
    whole = [row for row in rows if row["distance"] == "all"]
    assert [(row["n_pairs"], row["seq_len"], row["beyond_training"]) for row in whole] == [
        (2, 7, False),
        (4, 13, True),
    ]
    assert whole[0]["chance_pairs"] == 0.5
    assert whole[1]["answers"] == 64 * 4
    for row in whole:
        parts = [r for r in rows if r["n_pairs"] == row["n_pairs"] and r["distance"] != "all"]
        assert sum(part["answers"] for part in parts) == row["answers"]
    assert "positions 8 to 13 were never trained" in err
    # The trained size on the test stream is what training itself reported.
    assert whole[0]["accuracy"] == json.loads((trained / "result.json").read_text())["summary"]["accuracy"]


def test_eval_reads_and_writes_nothing(trained, linattn):
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("*")}
    assert linattn("eval", trained, "--updates", 1, "--seq-lens", "9,16", "--examples", 8)[0] == 0
    assert before == {p: p.stat().st_mtime_ns for p in trained.rglob("*")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seq-lens", "600"], "do not fit this model: it has 512 positions"),
        (["--n-pairs", "16"], "needs n_pairs <= vocab_size - 1 = 15"),
        (["--n-pairs", "two"], "'two' is not a whole number"),
        (["--step", "3"], "has no checkpoint of step 3"),
    ],
)
def test_eval_refuses_what_cannot_be(trained, linattn, words, message):
    code, out, err = linattn("eval", trained, *words)
    assert code == 2
    assert out == ""
    assert message in err


def test_eval_of_no_run_lists_its_neighbours(trained, tmp_path, linattn):
    code, _, err = linattn("eval", trained.parent / "tinny")
    assert code == 2
    assert "hint: runs in" in err
    assert "tiny" in err.splitlines()[-1]
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")
    code, _, err = linattn("eval", tmp_path)
    assert code == 2
    assert "has no checkpoint yet" in err


def test_weights_of_another_recipe_are_refused(trained, tmp_path, linattn):
    run = copy(trained, tmp_path)
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("ffn: 16", "ffn: 32"))
    for words in (["eval", run], ["train", "--resume", "--out", run]):
        code, _, err = linattn(*words)
        assert code == 2
        assert "does not fit" in err


def test_the_same_seed_builds_the_same_model_and_another_does_not():
    from linattn_cli.config import load_run_config

    def weights(seed):
        config = load_run_config(sets=["model.d_model=16", "model.heads=2", f"seed={seed}"])
        return experiment.build(config)[1].head.weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
