"""Worker processes: kept over jobs, replaced when they die, and never a reason to lose a sweep."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from linattn_cli.capacity import cells_of
from linattn_cli.capacity_cell import crashed, work
from linattn_cli.capacity_run import default_workers, job_of, run_cells
from linattn_cli.capacity_workers import LocalPool
from linattn_cli.config import load_run_config
from linattn_cli.output import CliError
from linattn_cli.settings import RunConfig, SweepConfig

TINY = load_run_config(
    sets=["model={d_model: 16, heads: 2, d_head: 8, ffn: 16, name: linear}", "task={vocab_size: 16}"],
    overrides={
        "train.batch_size": 4,
        "train.steps": 3,
        "train.eval_examples": 8,
        "train.warmup_steps": 1,
        "task.n_pairs": 2,
        "train.device": "cpu",
    },
)


def cells(**lists):
    return cells_of(TINY.model_copy(update={"sweep": SweepConfig(**lists)}))


class FakePool:
    """A pool whose outcomes a test writes, by the seed of the cell; each attempt takes the next."""

    slots = 2

    def __init__(self, outcomes):
        self.outcomes = {seed: list(kinds) for seed, kinds in outcomes.items()}
        self.jobs = {}
        self.most = 0

    def submit(self, number, job):
        self.jobs[number] = job
        self.most = max(self.most, len(self.jobs))

    def wait(self, timeout=None):
        number, job = self.jobs.popitem()
        kind = self.outcomes[job["config"]["seed"]].pop(0)
        if kind == "crashed":
            return [(number, crashed("the worker process was killed by SIGKILL"))]
        error = None if kind == "finished" else {"type": kind, "message": f"it was {kind}"}
        status = "finished" if error is None else "failed"
        return [(number, {"status": status, "figures": {}, "metrics": [], "files": {}, "error": error})]


def run(outcomes):
    pool = FakePool(outcomes)
    lines = []
    done = run_cells(cells(seeds=list(outcomes)), pool, "cpu", log=lines.append)
    found = {cell.config.seed: (outcome["status"], attempts) for cell, outcome, attempts in done}
    return found, lines, pool


def test_a_crash_costs_a_retry_then_a_recorded_failure_and_nothing_else():
    found, lines, _ = run({0: ["finished"], 1: ["crashed", "finished"], 2: ["crashed", "crashed"], 3: ["finished"]})
    assert found == {0: ("finished", 1), 1: ("finished", 2), 2: ("crashed", 2), 3: ("finished", 1)}
    assert len(lines) == 2
    assert "once more: model linear n_pairs 2" in lines[0]
    assert "SIGKILL" in lines[0]


def test_what_would_fail_again_is_not_tried_again():
    found, _, _ = run({0: ["value"], 1: ["memory", "finished"]})
    assert found == {0: ("failed", 1), 1: ("finished", 2)}, "memory was perhaps another cell's"


def test_no_more_jobs_than_slots():
    _, _, pool = run({seed: ["finished"] for seed in range(5)})
    assert pool.most == 2


def test_the_longest_cells_go_first():
    class Order(FakePool):
        order: list = []  # noqa: RUF012

        def submit(self, number, job):
            self.order.append(job["config"]["task"]["n_pairs"])
            super().submit(number, job)

    pool = Order({0: ["finished"] * 3})
    list(run_cells(cells(n_pairs=[2, 4, 3]), pool, "cpu", log=print))
    assert pool.order == [4, 3, 2]


@pytest.fixture
def pool(tmp_path):
    with LocalPool(2, devices=["cpu"], threads=1, log=tmp_path / "workers.log") as pool:
        yield pool


def results(pool, count):
    found = {}
    while len(found) < count:
        found.update(pool.wait(60))
    return found


def test_real_workers_run_cells_survive_a_kill_and_are_deaf_to_ctrl_c(pool):
    first, second = cells(seeds=[0, 1])
    pool.submit(1, job_of(first, "cpu"))
    pool.submit(2, job_of(second, "cpu"))
    found = results(pool, 2)
    assert {outcome["status"] for outcome in found.values()} == {"finished"}
    alone = work(job_of(first, "cpu"))
    for name in ("accuracy", "validation_accuracy", "loss", "parameters", "state_bytes", "fingerprint", "steps"):
        assert found[1]["figures"][name] == alone["figures"][name], "a cell does not depend on who runs it"
    processes = [worker.process for worker in pool._workers]
    for process in processes:
        os.kill(process.pid, signal.SIGINT)  # the terminal sends it to every process of the group
    slow = first.config.model_copy(update={"train": first.config.train.model_copy(update={"steps": 100_000})})
    pool.submit(3, {**job_of(first, "cpu"), "config": slow.model_dump(mode="json")})
    pool.submit(4, job_of(second, "cpu"))
    assert results(pool, 1)[4]["status"] == "finished"
    assert all(process.is_alive() for process in processes), "workers are kept"
    victim = next(worker for worker in pool._workers if worker.job == 3)
    os.kill(victim.process.pid, signal.SIGKILL)
    outcome = results(pool, 1)[3]
    assert outcome["status"] == "crashed"
    assert outcome["error"] is not None
    assert outcome["error"]["message"] == "the worker process was killed by SIGKILL"
    pool.submit(5, job_of(second, "cpu"))
    assert results(pool, 1)[5]["status"] == "finished"


def test_workers_are_spread_over_the_devices(tmp_path):
    with LocalPool(3, devices=["cpu", "meta"], threads=1, log=tmp_path / "log") as pool:
        for _ in range(3):
            pool._start().job = 0
        assert [worker.device for worker in pool._workers] == ["cpu", "meta", "cpu"]


def test_workers_that_never_start_end_the_sweep_with_the_reason(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    monkeypatch.syspath_prepend(str(broken))  # spawned processes take over sys.path
    log = tmp_path / "workers.log"
    with (
        pytest.raises(CliError, match="no worker process starts") as refused,
        LocalPool(1, devices=["cpu"], threads=1, log=log) as pool,
    ):
        list(run_cells(cells(seeds=[0, 1, 2]), pool, "cpu", log=print))
    assert str(log) in refused.value.hint
    assert "no torch here" in log.read_text()


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = (
        "from pathlib import Path\n"
        "from linattn_cli.capacity_workers import LocalPool\n"
        "if __name__ == '__main__':\n"
        f"    pool = LocalPool(1, devices=['cpu'], threads=1, log=Path({str(tmp_path / 'log')!r}))\n"
        "    print(pool._start().process.pid, flush=True)\n"
        "    pool.wait(3)\n"
        "    print('waited', flush=True)\n"
        "    pool.wait(60)\n"
    )
    path = tmp_path / "parent.py"
    path.write_text(script)
    parent = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.stdout.readline()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists()


def test_a_diverged_cell_is_told_apart_from_a_broken_one():
    (cell,) = cells(lrs=[1e30])
    outcome = work(job_of(cell, "cpu"))
    assert outcome["status"] == "diverged"
    assert outcome["error"] is not None
    assert outcome["error"]["type"] == "non_finite"
    config = RunConfig().model_dump(mode="json")
    config["train"]["device"] = "cpu"
    broken = work({"kind": "train", "config": config, "device": "cuda:77", "threads": 1, "weights": False})
    assert broken["status"] == "failed"


def test_by_default_there_is_a_worker_for_the_threads_of_each_core(monkeypatch):
    monkeypatch.setattr("linattn_cli.environment.usable_cores", lambda: 32)
    assert default_workers(["cpu"], 1) == 32
    assert default_workers(["cpu"], 5) == 6
    assert default_workers(["cpu"], 64) == 1
    assert default_workers(["cuda:0", "cuda:1"], 1) == 16
