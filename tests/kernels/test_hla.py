"""The higher-order forms: every implementation and option against explicit sums, states, gradients,
precision."""

from __future__ import annotations

import pytest
import torch

from linattn_cli.kernels.forms.ahla import ahla, ahla_serial
from linattn_cli.kernels.forms.hla2 import Hla2State, hla2, hla2_serial
from linattn_cli.kernels.forms.hla3 import hla3, hla3_serial
from linattn_cli.kernels.linear.chunk import linear_scan_chunk
from linattn_cli.kernels.types import state_dtype, state_tensors
from tests.kernels.higher_order_cases import CASES, draw, expected, span

EXACT, EXACT_GRADIENT = 1e-9, 1e-8  # relative to the largest value, float64 (DESIGN.md)
every_case = pytest.mark.parametrize("name", sorted(CASES))
RUNS = {
    "reference": {"impl": "reference"},
    "chunk": {"impl": "chunk", "chunk_size": 4},
    "scan-tokens": {"impl": "scan", "chunk_size": 11},
    "scan-chunks": {"impl": "scan", "chunk_size": 3},
    "scan-summaries": {"impl": "scan", "chunk_size": 1},
}
every_run = pytest.mark.parametrize("run", sorted(RUNS))


def assert_close(actual, wanted, budget, what=""):
    assert actual.shape == wanted.shape, what
    assert torch.isfinite(actual).all(), what
    error = (actual.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30)
    assert error <= budget, f"{what}: {error:.3g} > {budget:.3g}"


@every_case
@every_run
@pytest.mark.parametrize("readout", ["raw", "ratio"])
def test_equals_the_explicit_sum(name, run, readout):
    case = CASES[name]
    inputs = draw(case, 11, heads=(4, 2))
    out = case.form(**inputs, **case.options, readout=readout, **RUNS[run])
    wanted = expected(case, inputs, readout)
    denominator = 1.0 if readout == "raw" else expected(case, inputs) / wanted
    # a ratio is judged before the division: close to a zero of the denominator it has no digits to compare
    assert_close(out.o * denominator, wanted * denominator, EXACT)
    assert out.impl == RUNS[run]["impl"]
    assert (out.clamped is None) == (readout == "raw")


@every_case
@every_run
def test_a_call_split_with_its_state_is_one_call(name, run):
    case = CASES[name]
    inputs = draw(case, 11, seed=1, heads=(3, 1))
    options = {**case.options, "readout": "ratio", **RUNS[run]}
    whole = case.form(**inputs, **options)
    first = case.form(**span(inputs, 0, 5), **options)
    second = case.form(**span(inputs, 5, 11), **options, initial_state=first.state)
    assert_close(torch.cat((first.o, second.o), dim=1), whole.o, EXACT)
    reference = case.form(**inputs, **{**options, "impl": "reference"})
    for a, b, c in zip(*(state_tensors(x.state) for x in (second, whole, reference)), strict=True):
        assert_close(a, b, EXACT)
        assert_close(b, c, EXACT)


@every_case
@pytest.mark.parametrize("readout", ["raw", "ratio"])
def test_decoding_token_by_token_is_the_full_forward(name, readout):
    case = CASES[name]
    inputs = draw(case, 9, seed=2, heads=(4, 2))
    options = {**case.options, "readout": readout}
    whole = case.form(**inputs, **options, impl="chunk")
    state, outputs = None, []
    for t in range(9):
        out = case.form(**span(inputs, t, t + 1), **options, initial_state=state, impl="chunk")
        state = out.state
        outputs.append(out.o)
    assert_close(torch.cat(outputs, dim=1), whole.o, EXACT)


def gradients(case, inputs, options, initial_state=None):
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    carried = [] if initial_state is None else [x.clone().requires_grad_() for x in state_tensors(initial_state)]
    if carried:
        pending = iter(carried)
        initial_state = type(initial_state)(*(None if x is None else next(pending) for x in initial_state))
    out = case.form(**leaves, **case.options, **options, initial_state=initial_state)
    parts = [out.o, *state_tensors(out.state)]
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in parts]
    loss = sum((x * w).sum() for x, w in zip(parts, weights, strict=True))
    return dict(
        zip(
            [*leaves, *(f"state{i}" for i in range(len(carried)))],
            torch.autograd.grad(loss, [*leaves.values(), *carried]),
            strict=True,
        )
    ), leaves


@every_case
@pytest.mark.parametrize("run", ["chunk", "scan-chunks"])
def test_gradients_are_those_of_the_serial_form(name, run):
    case = CASES[name]
    inputs = draw(case, 11, seed=3, heads=(4, 2))
    start = case.form(**draw(case, 6, seed=4, heads=(4, 2)), **case.options, impl="reference").state
    wanted, leaves = gradients(case, inputs, {"impl": "reference"}, start)
    actual, _ = gradients(case, inputs, RUNS[run], start)
    for key, gradient in wanted.items():
        scale = gradient.abs().max()
        if key == "log_decay":  # it cancels: judged by the size of its terms
            scale = torch.maximum(scale, (wanted["q"] * leaves["q"]).abs().max())
        assert ((actual[key] - gradient).abs().max() / scale) <= EXACT_GRADIENT, key


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", ["chunk", "scan-chunks"])
def test_low_precision_stays_within_twice_the_serial_error(name, dtype, run):
    case = CASES[name]
    inputs = draw(case, 70, seed=5, dtype=dtype, dims=(8, 8), heads=(4, 2), scale=8**-0.5)
    exact = {key: x.double() for key, x in inputs.items()}
    wanted = case.form(**exact, **case.options, impl="reference")
    serial = case.form(**inputs, **case.options, impl="reference")
    actual = case.form(**inputs, **case.options, impl=RUNS[run]["impl"], chunk_size=16)
    assert actual.o.dtype == dtype
    assert all(x.dtype == state_dtype(dtype) for x in state_tensors(actual.state))
    pairs = [(actual.o, serial.o, wanted.o)]
    pairs += zip(*(state_tensors(x.state) for x in (actual, serial, wanted)), strict=True)
    for a, s, w in pairs:
        scale = w.abs().max()
        eps = torch.finfo(a.dtype).eps
        budget = 2 * (s.double() - w).abs().max() / scale + 4 * eps
        assert_close(a, w, budget)


@every_case
@every_run
def test_padding_changes_neither_the_state_nor_real_tokens(name, run):
    case = CASES[name]
    real = torch.tensor([[False, True, True, False, True, True, True, True, False]] * 2)
    real[1] = real[1].flip(0)
    padded = draw(case, 9, seed=6, heads=(4, 2))
    options = {**case.options, "readout": "ratio", "feature_map": "elu1", **RUNS[run]}
    out = case.form(**padded, **options, mask=real)
    rows = [case.form(**{key: x[i : i + 1, real[i]] for key, x in padded.items()}, **options) for i in range(2)]
    for i, row in enumerate(rows):
        assert_close(out.o[i, real[i]], row.o[0], EXACT)
        for x, y in zip(state_tensors(out.state), state_tensors(row.state), strict=True):
            assert_close(x[i], y[0], EXACT)
    assert out.clamped == sum(row.clamped for row in rows)


def test_values_as_wide_as_the_limit_have_room_for_the_denominator():
    case = CASES["hla3-causal-none"]
    inputs = draw(case, 5, dims=(3, 256))
    out = case.form(**inputs, readout="ratio", impl="chunk")
    assert_close(out.o, expected(case, inputs, "ratio"), 1e-8)


def test_clamping_counts_and_keeps_the_sign():
    q = torch.tensor([1.0, 1e-9, 1.0], dtype=torch.float64).view(1, 3, 1, 1)
    k = torch.tensor([1e-9, 0.0, -1e-9], dtype=torch.float64).view(1, 3, 1, 1)
    v = torch.ones_like(k)
    out = ahla(q, k, v, readout="ratio", eps=1e-6)
    assert out.clamped.item() == 3
    raw = ahla(q, k, v).o
    assert_close(out.o, raw / 1e-6 * torch.sign(raw + 1e-300), EXACT)


def test_positive_features_are_never_clamped():
    case = CASES["hla2-none"]
    inputs = draw(case, 20)
    assert hla2(**inputs, readout="ratio", feature_map="elu1").clamped.item() == 0


def test_the_serial_functions_are_the_reference():
    for form, serial in ((hla2, hla2_serial), (ahla, ahla_serial), (hla3, hla3_serial)):
        inputs = draw(CASES["ahla-none"], 6)
        assert torch.equal(serial(**inputs).o, form(**inputs, impl="reference").o)


def test_the_key_moment_is_held_once_per_key_head():
    inputs = draw(CASES["hla2-none"], 4, heads=(8, 2))
    assert hla2(**inputs).state.S.shape == (2, 2, 3, 3)
    assert hla3(**inputs).state.SK.shape == (2, 2, 3, 3)
    assert ahla(**inputs).state.P.shape == (2, 2, 3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "slow"}, "decay must be one of none, moment, cascade, mask, published; got 'slow'"),
        ({"decay": "moment"}, "needs log_decay"),
        ({"decay": "mask", "state_form": "paper", "log_decay": True}, "no \\(S, C, G\\) state"),
        ({"decay": "cascade", "masked": False, "log_decay": True}, "masked=False does not know"),
        ({"log_decay": True}, "log_decay was given but decay='none'"),
        (
            {"decay": "moment", "log_decay": True, "ridge": 1.0, "state_form": "paper"},
            "would decay as C does",
        ),
        ({"ridge": -1.0}, "ridge must be >= 0"),
        ({"readout": "mean"}, "readout must be one of raw, ratio"),
        ({"impl": "fast"}, "impl must be one of"),
        ({"initial_state": (1, 2)}, "initial_state must be a Hla2State, got tuple"),
        ({"initial_state": Hla2State(torch.zeros(1), torch.zeros(1))}, "initial_state.S must have shape"),
    ],
)
def test_wrong_options_are_named(options, message):
    inputs = draw(CASES["hla2-moment"], 4)
    if not options.pop("log_decay", False):
        del inputs["log_decay"]
    with pytest.raises(ValueError, match=message):
        hla2(**inputs, **options)


def test_a_state_of_other_options_is_refused():
    inputs = draw(CASES["hla2-none"], 4)
    state = hla2(**inputs).state
    with pytest.raises(ValueError, match=r"initial_state\.h must be a tensor"):
        hla2(**inputs, readout="ratio", initial_state=state)
    with pytest.raises(ValueError, match="initial_state must be a Hla2PaperState"):
        hla2(**inputs, state_form="paper", initial_state=state)


def test_the_dense_maps_are_refused_for_large_keys():
    inputs = draw(CASES["hla2-none"], 4, dims=(17, 4))
    with pytest.raises(ValueError, match=r"K <= 16"):
        hla3(**inputs, variant="published", impl="scan")


@pytest.mark.parametrize(("readout", "inner"), [("raw", torch.bfloat16), ("ratio", torch.float32)])
@pytest.mark.parametrize("form", [hla2, ahla, hla3])
def test_scans_of_bfloat16_hand_on_bfloat16_where_no_quotient_follows(form, readout, inner, monkeypatch):
    from linattn_cli.kernels import dispatch

    pytest.importorskip("triton", reason="triton has no wheel for this system")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = []

    def scan(q, k, v, **options):
        seen.append({q.dtype, k.dtype, v.dtype})
        options["chunk_size"] = None
        return linear_scan_chunk(q, k, v, **options)

    q, k, v = torch.randn(3, 1, 5, 2, 4).to(torch.bfloat16)
    with dispatch.override("linear_scan", "triton", scan):
        out = form(q, k, v, readout=readout, impl="triton")
    assert seen
    assert all(dtypes == {inner} for dtypes in seen)
    assert out.o.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in state_tensors(out.state))
