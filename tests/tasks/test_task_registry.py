"""The task registry: names, settings, and that importing it is free."""

from __future__ import annotations

import subprocess
import sys

import pytest

from linattn_cli.tasks import TASKS, make_task


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_keeps_the_contract(name):
    task = make_task(name)
    assert task.name == name == TASKS[name].name
    assert make_task(name, task.config()) == task
    batch = task.batch(3, seed=0, stream="train", index=0)
    assert batch.inputs.shape == (3, task.input_len)
    assert batch.inputs.max() < task.vocab_size
    assert ((batch.labels == -100) == (batch.distances == -1)).all()
    assert set(task.chance()) == {"chance_vocab", "chance_pairs"}
    assert len(task.fingerprint(0)) == 16
    assert [r["token"] for r in task.explain(batch, 2)] == batch.inputs[2].tolist()
    assert str(task.input_len) in task.show(batch, 2)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("mqarr", {}, "unknown task 'mqarr'; did you mean 'mqar'"),
        ("sorting", {}, "unknown task 'sorting'; there are mqar, copy"),
        ("mqar", {"n_pair": 3}, "mqar has no setting 'n_pair'; did you mean 'n_pairs'"),
        ("copy", {"zzz": 3}, "copy has no setting 'zzz'; it has seq_len, vocab_size"),
        ("copy", {"name": "mqar"}, "this is the task 'copy', the settings are for 'mqar'"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(name, config, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, config)


def test_the_registry_imports_neither_numpy_nor_torch_and_tasks_no_torch():
    code = (
        "import sys, linattn_cli.tasks as t; assert not {'numpy', 'torch'} & set(sys.modules);"
        "[t.make_task(n).batch(2, seed=0, stream=0, index=0) for n in t.TASKS];"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
