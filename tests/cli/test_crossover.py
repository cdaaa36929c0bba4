"""Where a mixer overtakes softmax: exact on power laws, honest where there is nothing to find."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linattn_cli.crossover import MOST_STEPS, NARROW, Point, confirm, locate, middle, sentence

LENGTHS = [1024 * 2**i for i in range(6)]


def power_law(crossing: float, exponent: float = 1.0):
    return lambda tokens: (crossing / tokens) ** exponent


def sweep(ratio, lengths=LENGTHS) -> list[Point]:
    return [Point(n, ratio(n)) for n in lengths]


@given(st.floats(1100, 32_000), st.floats(0.2, 3.0))
def test_a_power_law_is_located_exactly_and_confirmed_on_both_sides(crossing, exponent):
    ratio, asked = power_law(crossing, exponent), []

    def measure(tokens):
        asked.append(tokens)
        return ratio(tokens)

    found = locate(sweep(ratio))
    assert found.status == "interpolated"
    assert abs(found.tokens - crossing) <= 1
    done = confirm(found, measure)
    assert done.status == "confirmed"
    assert done.interpolated == found.tokens
    assert done.slower.seq_len <= crossing <= done.faster.seq_len <= NARROW * done.slower.seq_len
    assert done.slower.ratio > 1 >= done.faster.ratio
    assert len(asked) <= MOST_STEPS
    assert {point.seq_len for point in done.points} == {*LENGTHS, *asked}


def test_interpolation_is_in_the_logarithms():
    assert locate([Point(1024, 8.0), Point(4096, 0.125)]).tokens == 2048
    assert locate([Point(1000, 4.0), Point(8000, 0.5)]).tokens == 4000


@pytest.mark.parametrize(
    ("crossing", "status", "said"),
    [
        (100, "faster throughout", "none in range: faster than softmax from 1024 tokens on"),
        (1e6, "slower throughout", "none up to 32768 tokens, where it takes 30.5 x"),
    ],
)
def test_outside_the_range_it_says_so_and_measures_and_extrapolates_nothing(crossing, status, said):
    found = confirm(locate(sweep(power_law(crossing))), lambda tokens: pytest.fail(f"measured {tokens}"))
    assert (found.status, found.tokens, found.interpolated) == (status, None, None)
    assert said in sentence(found)


def test_faster_at_first_but_slower_at_last_is_no_crossover():
    found = locate([Point(1024, 0.9), Point(2048, 1.2)])
    assert (found.status, found.tokens, found.crossings) == ("slower at last", None, 1)
    assert sentence(found).startswith("none up to 2048 tokens")


def test_of_several_crossings_the_last_counts_and_their_number_is_told():
    found = locate(sweep(lambda n: {1024: 2.0, 2048: 0.9, 4096: 1.1, 8192: 0.5}[n], LENGTHS[:4]))
    assert 4096 < found.tokens < 8192
    assert found.crossings == 3
    assert sentence(found).endswith("the ratio passes 1 3 times")


def test_equal_times_count_as_not_slower():
    assert locate([Point(1024, 2.0), Point(2048, 1.0)]).tokens == 2048


@pytest.mark.parametrize("count", [0, 1])
def test_one_length_is_not_enough(count):
    found = locate(sweep(power_law(2000), LENGTHS[:count]))
    assert found.status == "not measured"
    assert "fewer than two lengths" in sentence(found)


def test_a_length_that_cannot_be_measured_leaves_it_unconfirmed():
    found = confirm(locate(sweep(power_law(3000))), lambda tokens: None)
    assert found.status == "interpolated"
    assert (found.slower.seq_len, found.faster.seq_len) == (2048, 4096)


def test_a_jump_in_the_bisection_is_enclosed_where_it_was_measured():
    done = confirm(locate(sweep(power_law(3000))), lambda tokens: 1.5 if tokens < 3500 else 0.99)
    assert done.slower.seq_len < 3500 <= done.faster.seq_len
    assert done.slower.seq_len <= done.tokens <= done.faster.seq_len


def test_middles_are_round_lengths():
    assert [middle(1024, 2048) % 64, middle(100, 200) % 8] == [0, 0]
    done = confirm(locate(sweep(power_law(20), [16, 32])), lambda tokens: power_law(20)(tokens))
    assert done.status == "confirmed"  # 16 and 24, and nothing round between
