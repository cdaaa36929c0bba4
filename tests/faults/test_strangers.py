"""Run folders that were damaged, written by another version, moved, or sent by somebody with bad intentions."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from linattn_cli import __version__, checkpoints
from linattn_cli.app import main
from linattn_cli.runs import read_metrics
from linattn_cli.training import STATE_VERSION, TIMING_KEYS

TINY = [
    *("--set", "model.d_model=8", "--set", "model.heads=1", "--set", "model.layers=1", "--set", "model.ffn=8"),
    *("--set", "task.vocab_size=8", "--set", "task.n_pairs=1", "--batch-size", "2", "--device", "cpu"),
    *("--set", "train.log_every=1", "--set", "train.eval_examples=8", "--quiet"),
]
TRAIN = ["train", *TINY, "--d-head", "8", "--checkpoint-every", "2"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.raises(SystemExit) as left:
        main([*TRAIN, "--steps", "4", "--out", str(path)])
    assert not left.value.code
    return path


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweeps") / "tiny"
    words = ["capacity-sweep", *TINY, "--d-heads", "8", "--models", "linear", "--steps", "1", "--workers", "1"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--keep-weights", "--out", str(path)])
    assert not left.value.code
    return path


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def figures(path):
    return [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in read_metrics(path)]


class Bomb:
    """Unpickled, it makes a folder called `exploded` in the working folder."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def bombs() -> list[bytes]:
    saved = io.BytesIO()
    torch.save({"optimizer": Bomb()}, saved)
    legacy = io.BytesIO()
    torch.save(Bomb(), legacy, _use_new_zipfile_serialization=False)
    yaml = b"!!python/object/apply:os.mkdir [exploded]\n"
    return [pickle.dumps(Bomb()), saved.getvalue(), legacy.getvalue(), yaml]


def resealed(run: Path, step: int) -> None:
    """Write the manifest anew, as somebody who means harm would."""
    import hashlib

    folder = run / "checkpoints" / f"step-{step}"
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_bombs_are_real(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickled, saved, legacy, _ = bombs()
    for explode in (
        lambda: pickle.loads(pickled),
        lambda: torch.load(io.BytesIO(saved), weights_only=False),
        lambda: torch.load(io.BytesIO(legacy), weights_only=False),
    ):
        explode()
        Path("exploded").rmdir()


def test_no_file_of_a_strangers_run_can_run_code(trained, tmp_path, monkeypatch, linattn):
    monkeypatch.chdir(tmp_path)
    for name in files_of(trained):
        of_torch = name.endswith("state.pt")
        for number, bomb in enumerate(bombs() if of_torch else bombs()[:1] + bombs()[3:]):
            run = Path(shutil.copytree(trained, tmp_path / f"{name.replace('/', '-')}-{number}"))
            (run / name).write_bytes(bomb)
            if name.startswith("checkpoints/") and not name.endswith("manifest.json"):
                resealed(run, int(name.split("/")[1].removeprefix("step-")))
            readers = [["compare", run, trained], ["report", run, "-o", f"{run}.html"], ["probe-norm", "--run", run]]
            for words in (
                ["eval", run, "--quiet"],
                ["eval", run, "--step", 2, "--quiet"],
                *([*words, "--quiet"] for words in readers if number == 0 and "step-2" not in name),
                ["train", "--resume", "--out", run, "--quiet"],
            ):
                code, _, err = linattn(*words)
                assert code in (0, 2), (name, words, err)
                assert not Path("exploded").exists(), (name, words)


def test_no_file_of_a_strangers_sweep_can_run_code(swept, tmp_path, monkeypatch, linattn):
    monkeypatch.chdir(tmp_path)
    for name in files_of(swept):
        bomb = bombs()[1]
        path = Path(shutil.copytree(swept, tmp_path / name.replace("/", "-")))
        (path / name).write_bytes(bomb)
        cell = next((path / "runs").iterdir())
        for words in (["capacity-sweep", "--resume", "--out", path, "--quiet"], ["eval", cell]):
            code, _, err = linattn(*words)
            assert code in (0, 2), (name, words, err)
            assert not Path("exploded").exists(), (name, words)


def test_a_sweep_does_not_run_the_code_its_cells_name(swept, tmp_path, monkeypatch, linattn):
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("import os\nos.mkdir('exploded')\n")
    path = Path(shutil.copytree(swept, tmp_path / "sweep"))
    with sqlite3.connect(path / "sweep.sqlite") as database:
        (text,) = database.execute("SELECT config FROM cells").fetchone()
        config = json.loads(text)
        config["model"] |= {"name": "evil.py:Evil", "options": {}}
        database.execute("UPDATE cells SET config = ?, status = 'pending'", (json.dumps(config),))
    database.close()
    code, _, err = linattn("capacity-sweep", "--resume", "--out", path, "--quiet")
    assert code == 2
    assert "names code to run" in err
    assert not Path("exploded").exists()


@pytest.mark.parametrize("config", ["[]", "{", '{"model": {"name": "vlaa"}}', "[" * 100_000, "x"])
def test_a_damaged_cell_of_a_sweep_is_named(swept, tmp_path, linattn, config):
    path = Path(shutil.copytree(swept, tmp_path / "sweep"))
    with sqlite3.connect(path / "sweep.sqlite") as database:
        database.execute("UPDATE cells SET config = ?, status = 'pending'", (config,))
    database.close()
    code, _, err = linattn("capacity-sweep", "--resume", "--out", path, "--quiet")
    assert code == 2
    assert f"error: {path / 'sweep.sqlite'} is damaged: the cell " in err


def edit_state(run: Path, step: int, **changes) -> None:
    path = run / "checkpoints" / f"step-{step}" / "state.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, **changes}, path)
    resealed(run, step)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"threads": 10**9}, "threads is 1000000000, expected 1 to 1024"),
        ({"threads": "many"}, "threads is 'many'"),
        ({"rng": {"cpu": torch.zeros(3)}}, "does not fit this recipe"),
        ({"optimizer": 7}, "does not fit this recipe"),
        ({"optimizer": {"state": [], "param_groups": [{}]}}, "does not fit this recipe"),
        ({"train_s": None}, "does not fit this recipe"),
        ({"version": STATE_VERSION + 1}, f"(format {STATE_VERSION + 1}); this is linattn {__version__}"),
    ],
)
def test_a_forged_state_is_refused(run, linattn, changes, said):
    edit_state(run, 4, **changes)
    before = figures(run)
    code, _, err = linattn("train", "--resume", "--out", run, "--steps", 6, "--quiet")
    assert code == 2
    assert said in err
    assert figures(run) == before


def test_a_state_that_is_no_dictionary_is_refused(run, linattn):
    torch.save([1, 2], run / "checkpoints" / "step-4" / "state.pt")
    resealed(run, 4)
    code, _, err = linattn("train", "--resume", "--out", run, "--quiet")
    assert code == 2
    assert "state.pt holds a list, not a state" in err
    assert "--from-step 2" in err


@pytest.mark.parametrize(
    "manifest",
    ["", "[]", "null", "{}", '{"schema_version": Infinity, "files": {}, "step": 4}', "[" * 100_000, "\xff", "7"],
)
def test_a_manifest_of_anything_is_damage(run, linattn, manifest):
    path = run / "checkpoints" / "step-4" / "manifest.json"
    path.write_bytes(manifest.encode("latin-1"))
    code, _, err = linattn("eval", run)
    assert code == 2
    assert f"checkpoint {path.parent} is damaged: manifest.json cannot be read" in err
    assert "step 2 is whole" in err


def test_what_a_newer_version_wrote_says_which(run, swept, tmp_path, linattn):
    path = run / "checkpoints" / "step-4" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["linattn"] == __version__
    path.write_text(json.dumps(manifest | {"schema_version": 7, "linattn": "9.3.1"}))
    for words in (["eval", run], ["train", "--resume", "--out", run]):
        code, _, err = linattn(*words)
        assert code == 2
        assert f"a newer linattn, 9.3.1 (format 7); this is linattn {__version__}, which reads format 1" in err
        assert "hint: update linattn" in err

    recipe = run / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text.replace(__version__, "9.3.1", 1).replace("seed:", "momentum: 3\nseed:"))
    code, _, err = linattn("eval", run)
    assert code == 2
    assert "momentum is not a key of a recipe; the recipe was written by a newer linattn, 9.3.1, this is" in err
    recipe.write_text(text.replace("seed:", "momentum: 3\nseed:"))
    assert "newer linattn" not in linattn("eval", run)[2], "only a newer version's keys are another version's"

    sweep = Path(shutil.copytree(swept, tmp_path / "sweep"))
    (sweep / "sweep.yaml").write_text((sweep / "sweep.yaml").read_text().replace(__version__, "9.3.1", 1))
    sqlite3.connect(sweep / "sweep.sqlite").executescript("PRAGMA user_version = 9").connection.close()
    code, _, err = linattn("capacity-sweep", "--resume", "--out", sweep)
    assert code == 2
    assert "a newer linattn, 9.3.1 (format 9)" in err


def test_the_clock_goes_backwards(tmp_path, monkeypatch, linattn):
    """Nothing that is measured or decided hangs on the time of day."""
    now = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    monkeypatch.setattr(time, "time_ns", lambda: next(now) * 10**9)
    run = tmp_path / "run"
    assert linattn(*TRAIN, "--steps", 4, "--out", run)[0] == 0
    os.utime(run / "checkpoints" / "step-4", (1, 1))  # "older" than step 2
    os.utime(run / "recipe.yaml", (2**31, 2**31))
    code, out, err = linattn("train", "--resume", "--out", run, "--steps", 6, "--json")
    assert code == 0, err
    assert f"continuing from {run / 'checkpoints' / 'step-4'}" in err
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(a["elapsed_s"] < b["elapsed_s"] for a, b in itertools.pairwise(rows))
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert json.loads(out)["summary"]["train_s"] > 0


@pytest.mark.parametrize(
    "name", ["with  two spaces", "Größe 日本 🙂", 'quote\'s "n" $HOME; `x`', os.fsdecode(b"r\xff")]
)
def test_paths_of_any_kind(tmp_path, linattn, name):
    folder = tmp_path / name
    folder.mkdir()
    run = folder / "run"
    code, out, err = linattn(*TRAIN, "--steps", 2, "--out", run, "--json")
    assert code == 0, err
    assert json.loads(out)["summary"]["run"] == str(run)
    assert json.loads((run / "result.json").read_text())["summary"]["run"] == str(run)
    assert linattn("eval", run, "--format", "table")[0] == 0
    code, _, err = linattn("train", "--recipe", run / "recipe.yaml", "--out", folder / "again", "--quiet")
    assert code == 0, err
    assert figures(folder / "again") == figures(run)
    # The printed command is one that a shell takes as it is.
    code, _, err = linattn(*TRAIN, "--out", run)
    assert code == 2
    command = err.partition("continue it: ")[2].partition("; or choose")[0]
    if "\\udc" not in command:
        said = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
        assert said.stdout.splitlines() == ["linattn", "train", "--resume", "--out", str(run)]


def test_a_sweep_in_a_folder_of_any_name(tmp_path, linattn):
    path = tmp_path / "Größe 日本 🙂'  two" / "sweep"
    words = ["capacity-sweep", *TINY, "--d-heads", "8", "--models", "linear", "--steps", "1", "--workers", "1"]
    assert linattn(*words, "--out", path)[0] == 0
    code, out, _ = linattn("capacity-sweep", "--resume", "--out", path, "--seeds", "0", "--quiet", "--json")
    assert code == 0
    assert json.loads(out)["summary"]["sweep"] == str(path)


def test_every_stream_takes_a_name_that_is_no_text(tmp_path):
    name = os.fsdecode(b"r\xff")
    words = [sys.executable, "-m", "linattn_cli", "eval", name]
    for form in ("table", "json"):
        done = subprocess.run([*words, "--format", form], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 2, done.stderr
        assert b"run folder r\\udcff does not exist" in done.stderr
        assert b"Traceback" not in done.stderr


WITHOUT_TRITON = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Absent())
import importlib.metadata
version = importlib.metadata.version
def without(name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = without
from linattn_cli.app import main
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as left:
        print("exit", left.code or 0, file=sys.stderr)
"""


def test_triton_is_absent(tmp_path):
    run = str(tmp_path / "run")
    commands = [
        [*TRAIN, "--steps", "2", "--out", run, "--json"],
        ["eval", run, "--examples", "4", "--quiet"],
        [*TRAIN, "--impl", "triton", "--out", f"{run}-2"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON.format(commands=[list(map(str, words)) for words in commands])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("exit")] == ["exit 0", "exit 0", "exit 3"], done.stderr
    assert any(line.startswith("error: impl triton was asked for, but") and "triton" in line for line in lines)
    assert "hint: use --impl chunk, or --impl auto" in lines
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout[: done.stdout.index("\n}") + 2])
    assert (document["env"]["triton"], document["env"]["impl"]) == (None, "chunk")
    assert not Path(f"{run}-2").exists()


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path, linattn):
    run = tmp_path / "run"
    code, out, err = linattn(
        *TRAIN, "--steps", 50, "--lr", "1e20", "--set", "train.warmup_steps=0", "--out", run, "--json"
    )
    assert code == 1
    error = json.loads(out)["error"]
    assert error["type"] == "non_finite"
    steps = checkpoints.list_steps(run)
    assert steps
    assert f"the checkpoint of step {steps[-1]} is kept" in error["message"]
    assert f"training is not finite at step {steps[-1] + 1}: first in " in error["message"]
    kept = checkpoints.load(run, steps[-1])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept.model.values())
    assert "try a lower --lr" in err
