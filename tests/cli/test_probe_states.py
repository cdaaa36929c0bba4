"""States over time: every prefix as the serial recurrence has it, norms, growth and what is not finite."""

from __future__ import annotations

import pytest
import torch

from linattn_cli.config import load_run_config
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.probe_source import operator_subject
from linattn_cli.probe_states import Recurrence, growth_exponent, leaves, memory, state_norms_over_time, walk

CPU = torch.device("cpu")
UNSTABLE = {"normalise_gate": False, "lambda0": 1e-3, "penalty": "none"}
WITH_STATE = [name for name in MIXERS if name != "softmax"]


def subject(name: str, tokens: int = 23, **overrides):
    settings = {"model.name": name, "model.heads": 2, "model.d_head": 5}
    config = load_run_config(overrides=settings | overrides)
    return operator_subject(config, seq_len=tokens, seed=3, device=CPU, dtype=torch.float64)


@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.parametrize("tokens", [1, 2, 16, 23])
def test_a_walk_visits_every_step_with_the_states_around_it(name, tokens):
    exact = subject(name, tokens).exact
    seen = []
    for visit in walk(exact, "chunk"):
        after = leaves(visit.after)
        for row, step in enumerate(visit.steps):
            serial = leaves(exact.run(exact.slice(0, step + 1), None, impl="reference").state)
            for path, x in serial.items():
                torch.testing.assert_close(after[path][row : row + 1], x, rtol=1e-9, atol=1e-11)
            if step:
                before = leaves(exact.run(exact.slice(0, step), None, impl="reference").state)
                torch.testing.assert_close(
                    leaves(visit.before)[memory(visit.before)[0]][row : row + 1], before[memory(visit.before)[0]]
                )
        seen += visit.steps
    assert sorted(seen) == list(range(tokens))


def test_only_a_cache_is_no_fixed_state():
    for tokens in (1, 5):
        fixed = {name: subject(name, tokens).exact.has_fixed_state() for name in MIXERS}
        assert fixed == {name: name != "softmax" for name in MIXERS}


def test_the_memory_is_what_values_are_kept_in():
    names = {name: memory(subject(name).exact.empty()) for name in WITH_STATE}
    assert {name for name, tensors in names.items() if tensors != ["S"]} == {"hla2", "ahla", "hla3"}
    assert names["hla2"] == ["S", "H"]
    assert names["ahla"] == ["P", "E"]
    assert names["hla3"] == ["SK", "P", "H"]


def test_norms_are_those_of_the_equations():
    found = state_norms_over_time(subject("vla").recurrence, "chunk")
    assert list(found.over_time) == ["S", "A", "z"]
    last = subject("vla").exact
    state = last.run(last.tokens, None, impl="reference").state
    assert found.over_time["S"][-1, 0].tolist() == pytest.approx(state.S[0].flatten(1).norm(dim=1).tolist(), rel=1e-9)
    inverse = state.penalty.inverse[0].flatten(1).norm(dim=1)
    assert found.over_time["A"][-1, 0].tolist() == pytest.approx(inverse.tolist(), rel=1e-9)
    assert found.nonfinite is None


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 1.5])
def test_a_known_growth(power):
    t = torch.arange(1, 1001, dtype=torch.float64)
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert growth_exponent(7 * t**power) == pytest.approx(power, abs=1e-8)
    assert growth_exponent(7 * t**power * (1 + 0.01 * noise)) == pytest.approx(power, abs=0.01)


def test_only_the_last_decade_counts():
    t = torch.arange(1, 1001, dtype=torch.float64)
    settled = torch.where(t < 100, t, 100.0)
    assert growth_exponent(settled) == pytest.approx(0.0, abs=1e-9)
    assert growth_exponent(settled.flip(0)) < -0.1


def test_linear_attention_grows_like_t_where_values_agree():
    made = subject("linear", 400)
    tokens = dict(made.recurrence.tokens) | {"v": torch.ones_like(made.recurrence.tokens["v"])}
    found = state_norms_over_time(Recurrence(tokens, made.recurrence.run), "chunk")
    assert growth_exponent(found.mean("S")) == pytest.approx(1.0, abs=0.02)
    apart = state_norms_over_time(made.recurrence, "chunk")
    assert growth_exponent(apart.mean("S")) == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("values", [torch.ones(5), torch.zeros(100), torch.full((100,), float("inf"))])
def test_no_trend_without_points(values):
    assert growth_exponent(values.double()) is None


@pytest.mark.parametrize(("step", "name"), [(1, "k"), (7, "v"), (19, "k"), (23, "q")])
def test_the_first_tensor_that_is_not_finite(step, name):
    made = subject("deltanet")
    tokens = {key: x.clone() for key, x in made.recurrence.tokens.items()}
    tokens[name][0, step - 1, 0, 0] = float("nan")
    assert state_norms_over_time(Recurrence(tokens, made.recurrence.run), "chunk").nonfinite == (step, name)


def test_a_state_that_overflows_is_named():
    made = subject("vla", 200, **{f"model.options.{k}": v for k, v in UNSTABLE.items()})
    single = {name: x.float() for name, x in made.recurrence.tokens.items()}
    step, name = state_norms_over_time(Recurrence(single, made.recurrence.run), "reference").nonfinite
    assert 3 < step < 60
    assert name in ("S", "the output")
