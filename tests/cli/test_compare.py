"""The comparison itself: what it refuses, what it measures, and the budget it grants."""

from __future__ import annotations

import math
import re

import pytest
import torch

from linattn_cli.compare import Budget, Comparison, Scale, budget, compare

WIDE = Budget(0.01, 0.01)


def test_the_largest_error_is_relative_to_the_peak_and_its_place_is_named():
    expected = torch.tensor([[1.0, -4.0], [2.0, 0.5]], dtype=torch.float64)
    got = expected.clone()
    got[1, 0] += 0.4
    found = compare(got, expected, dtype=torch.float64)
    assert found.max_error == pytest.approx(0.1)
    assert (found.worst, found.got, found.expected) == ((1, 0), pytest.approx(2.4), 2.0)
    assert found.rms_ratio == pytest.approx(0.4 / math.sqrt(1 + 16 + 4 + 0.25))


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (None, "missing"),
        (torch.zeros(3, 2), r"shape \[3, 2\], expected \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "dtype bfloat16, expected float32"),
        (torch.tensor([[0.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0]]), "2 of 6 values not finite"),
    ],
)
def test_what_cannot_be_compared_never_passes(got, said):
    found = compare(got, torch.zeros(2, 3, dtype=torch.float64), dtype=torch.float32, scale=Scale(1.0, 1.0))
    assert found.max_error is None
    assert re.search(said, found.problem)
    assert not Budget(math.inf, math.inf).allows(found)


def test_the_place_of_the_first_value_that_is_not_finite_is_named():
    got = torch.tensor([0.0, 1.0, torch.nan])
    found = compare(got, torch.zeros(3, dtype=torch.float64), dtype=torch.float32)
    assert found.worst == (2,)
    assert found.expected == 0.0


def test_one_wrong_token_in_many_hides_from_the_rms_but_not_from_the_maximum():
    expected = torch.ones(65537, 1, dtype=torch.float64)
    got = expected.clone()
    got[40000] = 0.0
    found = compare(got, expected, dtype=torch.float64)
    assert found.rms_ratio < 0.004
    assert found.max_error == 1.0
    assert not WIDE.allows(found)


def test_an_error_everywhere_hides_behind_a_peak_but_not_from_the_rms():
    expected = torch.ones(1000, dtype=torch.float64)
    expected[0] = 1000.0
    found = compare(expected + 0.5, expected, dtype=torch.float64)
    assert found.max_error < 0.001
    assert found.rms_ratio > WIDE.rms_ratio
    assert not WIDE.allows(found)


def test_a_reference_of_zeros_allows_nothing_else():
    zeros = torch.zeros(4, dtype=torch.float64)
    assert Budget(0.0, 0.0).allows(compare(zeros, zeros, dtype=torch.float64))
    assert compare(zeros + 1e-300, zeros, dtype=torch.float64).max_error == math.inf


def test_a_bad_reference_is_an_error_of_ours():
    for bad in (torch.tensor([torch.nan]), torch.tensor([torch.inf]), torch.zeros(0)):
        with pytest.raises(ValueError, match="a scale needs"):
            compare(bad, bad.double(), dtype=torch.float32)


def test_the_budget_is_twice_the_serial_error_and_four_roundings():
    serial = Comparison(1e-6, 3e-7)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        granted = budget(dtype, serial, gradient=False)
        assert granted == budget(dtype, serial, gradient=True)
        assert granted.max_error == 2e-6 + 4 * torch.finfo(dtype).eps
        assert granted.rms_ratio == 6e-7 + 4 * torch.finfo(dtype).eps
    assert budget(torch.float64, serial, gradient=False) == Budget(1e-9, 1e-9)
    assert budget(torch.float64, serial, gradient=True) == Budget(1e-8, 1e-8)
    with pytest.raises(ValueError, match="the serial recurrence itself failed in float32: missing"):
        budget(torch.float32, Comparison(None, None, problem="missing"), gradient=False)
