"""Every associative operator: associativity, identity, scan = left fold, and fold = the serial recurrence."""

from __future__ import annotations

from functools import reduce as fold
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn_cli.kernels.monoids import affine, ahla, hla2, hla3, hla3_published, linear, penalty
from linattn_cli.kernels.monoids.blelloch import exclusive_scan, inclusive_scan, reduce
from linattn_cli.kernels.monoids.stream import scan_tokens

BUDGET = 1e-9  # relative to the largest value, float64 (DESIGN.md)
B, K, V = 2, 3, 2


def draw(tokens: int, seed: int, decayed: bool):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(B, tokens, K), normal(B, tokens, K), normal(B, tokens, V)
    logs = [-torch.rand(B, tokens, generator=generator, dtype=torch.float64) if decayed else None for _ in range(3)]
    return q, k, v, logs


FAMILIES = {
    "linear": (linear.LINEAR, lambda q, k, v, logs: linear.token(k, v, logs[0])),
    "affine": (affine.AFFINE, lambda q, k, v, logs: affine.token(q, k, v, logs[0])),
    "penalty": (penalty.PENALTY, lambda q, k, v, logs: penalty.token(k)),
    "hla2": (hla2.HLA2, lambda q, k, v, logs: hla2.token(q, k, v, logs[0], logs[1], ridge=0.3)),
    "hla2_paper": (hla2.HLA2_PAPER, lambda q, k, v, logs: hla2.token_paper(q, k, v, logs[0], logs[1])),
    "hla2_published": (hla2.HLA2_PUBLISHED, lambda q, k, v, logs: hla2.token_published(q, k, v, logs[0])),
    "ahla": (ahla.AHLA, lambda q, k, v, logs: ahla.token(q, k, v, logs[0])),
    "hla3": (hla3.HLA3, lambda q, k, v, logs: hla3.token(q, k, v, *logs)),
    "hla3_published": (
        hla3_published.HLA3_PUBLISHED,
        lambda q, k, v, logs: hla3_published.token(q, k, v, logs[0]),
    ),
}
every_family = pytest.mark.parametrize("family", sorted(FAMILIES))
every_decay = pytest.mark.parametrize("decayed", [False, True])


def at(elements: NamedTuple, start: int, stop: int):
    return type(elements)(*(x[:, start:stop] for x in elements))


def assert_same(actual: NamedTuple, expected: NamedTuple) -> None:
    for name, a, b in zip(expected._fields, actual, expected, strict=True):
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), name
        assert (a - b).abs().max() <= BUDGET * b.abs().max().clamp_min(1e-30), name


def left_fold(monoid, elements: NamedTuple):
    tokens = elements[0].shape[1]
    return fold(monoid.combine, [at(elements, t, t + 1) for t in range(tokens)])


@every_family
@every_decay
@settings(max_examples=25, deadline=None)
@given(lengths=st.tuples(*[st.integers(1, 9)] * 3), seed=st.integers(0, 10**6))
def test_segments_of_uneven_length_associate(family, decayed, lengths, seed):
    monoid, make = FAMILIES[family]
    elements = make(*draw(sum(lengths), seed, decayed))
    first, second = lengths[0], lengths[0] + lengths[1]
    A, B_, C = (
        left_fold(monoid, at(elements, *span)) for span in ((0, first), (first, second), (second, sum(lengths)))
    )
    left = monoid.combine(monoid.combine(A, B_), C)
    assert_same(monoid.combine(A, monoid.combine(B_, C)), left)
    assert_same(left, left_fold(monoid, elements))


@every_family
@every_decay
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_identity_is_neutral_on_both_sides(family, decayed, tokens, seed):
    monoid, make = FAMILIES[family]
    segment = left_fold(monoid, make(*draw(tokens, seed, decayed)))
    neutral = monoid.identity(segment)
    assert_same(monoid.combine(neutral, segment), segment)
    assert_same(monoid.combine(segment, neutral), segment)


@every_family
@every_decay
@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 19), seed=st.integers(0, 10**6))
def test_scan_is_the_left_fold(family, decayed, tokens, seed):
    monoid, make = FAMILIES[family]
    elements = make(*draw(tokens, seed, decayed))
    prefixes, total = exclusive_scan(monoid, elements)
    inclusive = inclusive_scan(monoid, elements)
    assert_same(total, left_fold(monoid, elements))
    assert_same(reduce(monoid, elements), total)
    assert_same(at(prefixes, 0, 1), monoid.identity(total))
    for t in range(tokens):
        assert_same(at(inclusive, t, t + 1), left_fold(monoid, at(elements, 0, t + 1)))
        if t:
            assert_same(at(prefixes, t, t + 1), left_fold(monoid, at(elements, 0, t)))


@every_family
@every_decay
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(2, 15), chunk_size=st.integers(1, 16), split=st.data(), seed=st.integers(0, 10**6))
def test_streaming_over_chunks_and_from_a_carried_segment(family, decayed, tokens, chunk_size, split, seed):
    monoid, make = FAMILIES[family]
    q, k, v, logs = draw(tokens, seed, decayed)

    def token(q, k, v, *logs):
        return make(q, k, v, logs)

    def read(element, *_):
        return torch.cat([x.reshape(*x.shape[:2], -1) for x in element], dim=-1)

    def run(start, stop, initial=None):
        spans = [None if x is None else x[:, start:stop] for x in (q, k, v, *logs)]
        return scan_tokens(monoid, spans, token=token, read=read, initial=initial, chunk_size=chunk_size)

    o, total = run(0, tokens)
    expected = inclusive_scan(monoid, make(q, k, v, logs))
    assert (o - read(expected)).abs().max() <= BUDGET * o.abs().max()
    middle = split.draw(st.integers(1, tokens - 1))
    first, carried = run(0, middle)
    second, end = run(middle, tokens, carried)
    assert (torch.cat((first, second), 1) - o).abs().max() <= BUDGET * o.abs().max()
    assert_same(end, total)


@every_decay
def test_the_fields_read_are_the_states_of_the_recurrences(decayed):
    """Left folds against token loops written from the streaming updates."""
    tokens = 11
    q, k, v, logs = draw(tokens, 7, decayed)
    one = torch.ones(B, tokens, dtype=torch.float64)
    a, p, h = (one if log is None else log.exp() for log in logs)

    def empty(width):
        return torch.zeros(B, K, width, dtype=torch.float64)

    S = empty(K)
    H, H3, C, G, C_pub, G_pub, P, L, E, Y = (empty(V) for _ in range(10))
    for t in range(tokens):
        at_, pt, ht = (x[:, t, None, None] for x in (a, p, h))
        q_row, k_row, v_row = (x[:, t, None, :] for x in (q, k, v))
        q_col, k_col = q_row.mT, k_row.mT
        G = at_ * pt * G + pt * k_col @ (k_row @ C)
        G_pub, C_pub = at_ * G_pub + k_col @ (k_row @ C_pub), at_ * C_pub + q_col @ v_row
        S, C = at_ * S + k_col @ k_row, pt * C + q_col @ v_row
        H = pt * H + (S @ q_col) @ v_row
        P = pt * P + k_col @ v_row
        L = at_ * L + k_col @ v_row
        E = at_ * E + k_col @ (q_row @ L)
        H3 = ht * H3 + (S @ q_col) @ (q_row @ P)
        Y = at_ * Y + k_col @ (v_row - q_row @ Y)
    args = (q, k, v, logs)
    end = {name: left_fold(monoid, make(*args)) for name, (monoid, make) in FAMILIES.items() if name != "hla2"}
    end["hla2"] = left_fold(hla2.HLA2, hla2.token(q, k, v, logs[0], logs[1]))
    pairs = {
        "linear S": (end["linear"].S, L),
        "affine Y": (end["affine"].Y, Y),
        "hla2 S": (end["hla2"].S, S),
        "hla2 H": (end["hla2"].H, H),
        "paper C": (end["hla2_paper"].C, C),
        "paper G": (end["hla2_paper"].G, G),
        "published G": (end["hla2_published"].G, G_pub),
        "ahla E": (end["ahla"].E, E),
        "hla3 H": (end["hla3"].H, H3),
        "hla3 P": (end["hla3"].P, P),
    }
    for name, (actual, expected) in pairs.items():
        assert (actual[:, 0] - expected).abs().max() <= BUDGET * expected.abs().max(), name


def test_the_matrix_of_an_affine_segment_is_the_product_of_its_tokens():
    q, k, v, logs = draw(6, 11, True)
    elements = affine.token(q, k, v, logs[0])
    product = torch.eye(K, dtype=torch.float64)
    for t in range(6):
        product = affine.matrix(at(elements, t, t + 1))[:, 0] @ product
    assert (affine.matrix(reduce(affine.AFFINE, elements))[:, 0] - product).abs().max() <= BUDGET * product.abs().max()


def test_gradients_run_through_the_streamed_scan():
    q, k, v, logs = draw(7, 3, True)
    leaves = [x.requires_grad_() for x in (q, k, v, logs[0])]

    def output(q, k, v, log):
        return scan_tokens(
            ahla.AHLA, (q, k, v, log), token=ahla.token, read=lambda x, q, *_: ahla.read(x, q), chunk_size=3
        )[0]

    assert torch.autograd.gradcheck(output, leaves)


def test_an_empty_scan_is_refused():
    with pytest.raises(ValueError, match="at least one element"):
        exclusive_scan(penalty.PENALTY, penalty.PenaltySegment(torch.zeros(1, 0, 2, 2)))
