"""Worker processes: kept over jobs, replaced when they die, and never a reason to lose a sweep."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from linattn_cli import capacity_run, experiment
from linattn_cli.capacity import cells_of
from linattn_cli.capacity_cell import crashed, job_of, work
from linattn_cli.capacity_run import Request, choose_streams, default_workers, make_pool, run_cells
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
        self.alone = []
        self.most = 0

    def can_be_alone(self):
        return True

    def submit(self, number, job, *, alone=False):
        self.jobs[number] = job
        self.alone.append(alone)
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


def test_a_second_try_is_alone():
    _, _, pool = run({0: ["crashed", "finished"], 1: ["memory", "finished"], 2: ["finished"]})
    assert sorted(pool.alone) == [False, False, False, True, True]


def test_a_second_try_waits_until_it_can_be_alone():
    class Crowded(FakePool):
        slots = 3
        lone = 0

        def can_be_alone(self):
            return self.lone == 0

        def submit(self, number, job, *, alone=False):
            assert not alone or self.can_be_alone()
            self.lone += alone
            super().submit(number, job, alone=alone)

        def wait(self, timeout=None):
            self.lone = 0
            return super().wait(timeout)

    pool = Crowded({seed: ["crashed", "finished"] for seed in range(3)})
    done = list(run_cells(cells(seeds=[0, 1, 2]), pool, "cpu", log=lambda line: None))
    assert [(outcome["status"], attempts) for _, outcome, attempts in done] == [("finished", 2)] * 3


def test_what_would_fail_again_is_not_tried_again():
    found, _, _ = run({0: ["value"], 1: ["memory", "finished"]})
    assert found == {0: ("failed", 1), 1: ("finished", 2)}, "memory was perhaps another cell's"


def test_no_more_jobs_than_slots():
    _, _, pool = run({seed: ["finished"] for seed in range(5)})
    assert pool.most == 2


def test_the_longest_cells_go_first():
    class Order(FakePool):
        order: list = []  # noqa: RUF012

        def submit(self, number, job, *, alone=False):
            self.order.append(job["config"]["task"]["n_pairs"])
            super().submit(number, job, alone=alone)

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
    victim = next(worker for worker in pool._workers if worker.jobs == {3})
    os.kill(victim.process.pid, signal.SIGKILL)
    outcome = results(pool, 1)[3]
    assert outcome["status"] == "crashed"
    assert outcome["error"] is not None
    assert outcome["error"]["message"] == "the worker process was killed by SIGKILL"
    pool.submit(5, job_of(second, "cpu"))
    assert results(pool, 1)[5]["status"] == "finished"


FIGURES = ("accuracy", "loss", "validation_accuracy", "validation_loss", "parameters", "state_bytes", "fingerprint")


def longer(cell, steps):
    train = cell.config.train.model_copy(update={"steps": steps})
    return {**job_of(cell, "cpu"), "config": cell.config.model_copy(update={"train": train}).model_dump(mode="json")}


def test_cells_side_by_side_reach_what_they_reach_alone(tmp_path):
    grid = cells(seeds=[0, 1], models=["linear", "vla"])
    with LocalPool(1, devices=["cpu"], threads=1, log=tmp_path / "log", streams=4) as pool:
        assert pool.slots == 4
        for number, cell in enumerate(grid):
            pool.submit(number, longer(cell, 20))
        assert [worker.jobs for worker in pool._workers] == [{0, 1, 2, 3}]
        found = results(pool, 4)
    for number, cell in enumerate(grid):
        alone = work(longer(cell, 20))
        assert {name: found[number]["figures"][name] for name in FIGURES} == {
            name: alone["figures"][name] for name in FIGURES
        }
        assert [row["loss"] for row in found[number]["metrics"]] == [row["loss"] for row in alone["metrics"]]


def test_a_killed_worker_gives_all_its_jobs_back(tmp_path):
    (cell,) = cells(seeds=[0])
    with LocalPool(2, devices=["cpu"], threads=1, log=tmp_path / "log", streams=2) as pool:
        for number in range(4):
            pool.submit(number, longer(cell, 100_000))
        first, second = pool._workers
        assert [first.jobs, second.jobs] == [{0, 2}, {1, 3}], "workers are started before they share"
        os.kill(first.process.pid, signal.SIGKILL)
        found = pool.wait(60)
        assert [number for number, _ in found] == [0, 2]
        assert {outcome["status"] for _, outcome in found} == {"crashed"}
        assert second.jobs == {1, 3}
        second.process.kill()
        assert set(results(pool, 2)) == {1, 3}


def test_a_job_alone_shares_with_none_and_leaves_no_worker_behind(tmp_path):
    (cell,) = cells(seeds=[0])
    with LocalPool(1, devices=["cpu"], threads=1, log=tmp_path / "log", streams=3) as pool:
        pool.submit(1, longer(cell, 100_000))
        assert pool.can_be_alone()
        pool.submit(2, longer(cell, 3), alone=True)
        assert not pool.can_be_alone(), "one more than its workers, and no more than that"
        pool.submit(3, longer(cell, 3))
        assert [worker.jobs for worker in pool._workers] == [{1, 3}, {2}]
        results(pool, 2)
        assert [worker.jobs for worker in pool._workers] == [{1}]
        pool._workers[0].process.kill()
        results(pool, 1)
        pool.submit(4, longer(cell, 100_000), alone=True)
        pool.submit(5, longer(cell, 3))
        assert [worker.jobs for worker in pool._workers] == [{4}, {5}]
        assert results(pool, 1)[5]["status"] == "finished"
        for worker in pool._workers:
            worker.process.kill()


KILLER = """
import time
from torch import nn

class Killer(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x):
        time.sleep(1)
        raise SystemExit("this mixer ends its worker")
"""


def test_a_cell_that_kills_its_worker_takes_no_neighbour_along(tmp_path):
    path = tmp_path / "killer.py"
    path.write_text(KILLER)
    model = load_run_config(overrides={"model.name": f"{path}:Killer", "model.d_head": 8}).model
    killers = cells_of(TINY.model_copy(update={"model": model.model_copy(update={"d_model": 16, "heads": 2})}))
    slow = TINY.model_copy(update={"train": TINY.train.model_copy(update={"steps": 600})})
    neighbours = cells_of(slow.model_copy(update={"sweep": SweepConfig(seeds=[0, 1])}))
    lines = []
    with LocalPool(1, devices=["cpu"], threads=1, log=tmp_path / "log", streams=3) as pool:
        done = list(run_cells([*killers, *neighbours], pool, "cpu", log=lines.append))
    found = {cell.label: (outcome["status"], attempts) for cell, outcome, attempts in done}
    assert found[killers[0].label] == ("crashed", 2)
    assert [found[cell.label] for cell in neighbours] == [("finished", 2)] * 2
    assert all("left with exit code 1" in line for line in lines)
    assert "SystemExit: this mixer ends its worker" in (tmp_path / "log").read_text()


def test_models_built_in_threads_have_the_weights_of_their_seeds():
    configs = [TINY.model_copy(update={"seed": seed}) for seed in range(4)] * 8
    serial = [experiment.build(config)[1].state_dict() for config in configs]
    together = threading.Barrier(4)

    def build(config):
        together.wait()
        return experiment.build(config)[1].state_dict()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            built = list(threads.map(build, configs))
    finally:
        sys.setswitchinterval(interval)
    for one, other in zip(serial, built, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_streams_are_for_cells_that_are_recorded_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("linattn_cli.cuda_graph.resolve_impl", lambda impl, *_: impl.replace("auto", "triton"))
    gpu = torch.device("cuda", 0)
    grid = cells(models=["softmax", "linear", "vla"])
    lines = []

    def chosen(cells, streams=None, device=gpu, **more):
        return choose_streams(cells, device, Request(streams=streams, **more), lines.append)

    assert chosen(grid) == capacity_run.STREAMS
    assert [chosen(grid, 1), chosen(grid, 2)] == [1, 2]
    assert chosen(grid, device=torch.device("cpu")) == chosen(grid, ray="local") == 1
    for key, value in (("train.cuda_graph", False), ("model.impl", "chunk")):
        (eager,) = cells_of(load_run_config(overrides={key: value, "train.device": "cuda", "model.name": "linear"}))
        assert chosen([*grid, eager]) == 1
        assert lines == []
        assert chosen([*grid, eager], 2) == 1
        assert lines.pop() == f"one cell at a time in a worker, not 2: no CUDA graph for {eager.label}"
    with make_pool(TINY, torch.device("cpu"), Request(workers=8), 12, streams=4, log=tmp_path / "log") as pool:
        assert pool.slots == 16, "no more than there are jobs for"


def test_workers_are_spread_over_the_devices(tmp_path):
    with LocalPool(3, devices=["cpu", "meta"], threads=1, log=tmp_path / "log") as pool:
        for _ in range(3):
            pool._start().jobs.add(0)
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
