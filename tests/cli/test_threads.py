"""OpenMP's wait policy follows the load of the machine and never overrides the user's."""

from __future__ import annotations

import os

import pytest

from linattn_cli import threads


@pytest.mark.parametrize(("load", "policy"), [(0.1, None), (3.0, "passive")])
def test_the_policy_follows_the_load(monkeypatch, load, policy):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    threads.share_the_cores()
    assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_the_users_choice_stays(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    threads.share_the_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_no_load_average_is_no_load(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delattr(os, "getloadavg")
    threads.share_the_cores()
    assert "OMP_WAIT_POLICY" not in os.environ
