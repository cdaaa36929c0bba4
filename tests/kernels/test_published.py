"""The papers' printed formulas differ from the truth; what this library computes instead does not."""

from __future__ import annotations

import pytest
import torch

from linattn_cli import brute_force
from linattn_cli.kernels.forms.published import CLAIMS, ahla_decayed_operator, hla2_decayed_serial


def draw(claim, tokens=13, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, tokens, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    if claim.name == "vla proposition 2":
        return torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    if claim.decayed:
        return q, k, v, torch.full(q.shape[:3], 0.9, dtype=torch.float64).log()
    return q, k, v


def relative(a, b):
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_printed_formula_differs_and_the_corrected_one_does_not(claim):
    result = claim.compare(*draw(claim))
    assert relative(result.published, result.exact) > 1e-3
    truth = result.exact if result.truth is None else result.truth
    assert relative(result.corrected, truth) < 1e-9
    assert "\n" not in result.why


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.decayed], ids=lambda claim: claim.name)
def test_without_decay_they_are_right(claim):
    q, k, v, log_decay = draw(claim)
    result = claim.compare(q, k, v, torch.zeros_like(log_decay))
    assert relative(result.published, result.exact) < 1e-9


def test_the_exact_results_are_the_explicit_sums():
    q, k, v, log_decay = draw(CLAIMS[0])
    exact = hla2_decayed_serial(q, k, v, log_decay).exact
    assert relative(exact, brute_force.hla2(q, k, v, log_decay=log_decay, decay="moment")) < 1e-9
    exact = ahla_decayed_operator(q, k, v, log_decay).exact
    assert relative(exact, brute_force.ahla(q, k, v, log_decay=log_decay)[:, -1]) < 1e-9
