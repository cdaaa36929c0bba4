"""Gated DeltaNet, RLS and mesa, and `impl="scan"` of the forms that are compositions of primitives."""

from __future__ import annotations

import pytest
import torch

from linattn_cli import brute_force
from linattn_cli.kernels.forms.deltanet import decay_delta, deltanet
from linattn_cli.kernels.forms.features import unit
from linattn_cli.kernels.forms.gated_deltanet import gated_deltanet
from linattn_cli.kernels.forms.linear import linear_attention
from linattn_cli.kernels.forms.mesa import mesa, rls
from linattn_cli.kernels.forms.vla import vla
from linattn_cli.kernels.types import state_dtype, state_tensors

EXACT, EXACT_GRADIENT = 1e-9, 1e-8  # relative to the largest value, float64 (DESIGN.md)
FORMS = {
    "linear": (linear_attention, (), {}),
    "linear-raw": (linear_attention, (), {"feature_map": "identity", "readout": "raw"}),
    "deltanet": (deltanet, ("beta",), {}),
    "decay_delta": (decay_delta, ("log_decay",), {}),
    "gated_deltanet": (gated_deltanet, ("beta", "log_decay"), {}),
    "vla": (vla, ("u",), {}),
    "vla-control": (vla, (), {"penalty": "none"}),
    "vla-key": (vla, ("u", "beta"), {"penalty": "key", "normalise_gate": False}),
    "rls": (rls, (), {}),
    "mesa": (mesa, (), {"lambda0": 0.5}),
}
RUNS = {
    "reference": {"impl": "reference"},
    "chunk": {"impl": "chunk", "chunk_size": 4},
    "scan-tokens": {"impl": "scan", "chunk_size": 11},
    "scan-chunks": {"impl": "scan", "chunk_size": 3},
}
every_form = pytest.mark.parametrize("name", sorted(FORMS))
every_run = pytest.mark.parametrize("run", sorted(RUNS))


def draw(name, tokens, *, seed=0, dtype=torch.float64, heads=(4, 2), dims=(5, 3)):
    _, extra, _ = FORMS[name]
    generator = torch.Generator().manual_seed(seed)
    (query_heads, kv_heads), (key_dim, value_dim) = heads, dims
    shapes = {
        "q": (query_heads, key_dim),
        "k": (kv_heads, key_dim),
        "v": (kv_heads, value_dim),
        "u": (kv_heads, key_dim),
        "beta": (kv_heads,),
        "log_decay": (kv_heads,),
    }
    inputs = {}
    for key, shape in shapes.items():
        x = torch.randn(2, tokens, *shape, generator=generator, dtype=torch.float64)
        if key in ("q", "k", "v", *extra):
            x = x.sigmoid() if key == "beta" else -0.1 * x.abs() if key == "log_decay" else x
            inputs[key] = (unit(x) / key_dim**0.5 if key == "u" else x).to(dtype)
    if "log_decay" in inputs:
        inputs["log_decay"][:, 3] = 0.0
        inputs["log_decay"][:, 7:8] = -50.0
    return inputs


def run_form(name, inputs, **options):
    form, _, fixed = FORMS[name]
    return form(**inputs, **fixed, **options)


def span(inputs, start, stop):
    return {key: x[:, start:stop] for key, x in inputs.items()}


def assert_close(actual, wanted, budget, what=""):
    assert actual.shape == wanted.shape, what
    assert torch.isfinite(actual).all(), what
    error = (actual.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30)
    assert error <= budget, f"{what}: {error:.3g} > {budget:.3g}"


@every_form
@every_run
def test_equals_the_serial_form_also_when_split(name, run):
    inputs = draw(name, 11)
    wanted = run_form(name, inputs, impl="reference")
    out = run_form(name, inputs, **RUNS[run])
    assert out.impl == RUNS[run]["impl"]
    first = run_form(name, span(inputs, 0, 5), **RUNS[run])
    second = run_form(name, span(inputs, 5, 11), **RUNS[run], initial_state=first.state)
    assert_close(out.o, wanted.o, EXACT)
    assert_close(torch.cat((first.o, second.o), dim=1), wanted.o, EXACT)
    for x, y, z in zip(*(state_tensors(part.state) for part in (out, second, wanted)), strict=True):
        assert_close(x, z, EXACT)
        assert_close(y, z, EXACT)


@every_form
@every_run
def test_padding_changes_neither_the_state_nor_real_tokens(name, run):
    inputs = draw(name, 9, seed=1)
    real = torch.tensor([[False, True, True, False, True, True, True, True, False]] * 2)
    out = run_form(name, inputs, **RUNS[run], mask=real)
    short = run_form(name, {key: x[:, real[0]] for key, x in inputs.items()}, **RUNS[run])
    assert_close(out.o[:, real[0]], short.o, EXACT)
    for x, y in zip(state_tensors(out.state), state_tensors(short.state), strict=True):
        assert_close(x, y, EXACT)


@every_form
@pytest.mark.parametrize("run", ["chunk", "scan-tokens", "scan-chunks"])
def test_gradients_are_those_of_the_serial_form(name, run):
    inputs = draw(name, 11, seed=2)
    generator = torch.Generator().manual_seed(3)
    results = []
    for options in (RUNS["reference"], RUNS[run]):
        leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
        out = run_form(name, leaves, **options)
        generator.manual_seed(3)
        loss = sum(
            (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
            for x in (out.o, *state_tensors(out.state))
        )
        results.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    for key, wanted, actual in zip(inputs, *results, strict=True):
        if wanted is None:
            assert actual is None or not actual.any(), key
            continue
        scale = wanted.abs().max()
        if key == "log_decay":  # it cancels: judged by the size of its terms
            scale = torch.maximum(scale, (results[0][0] * inputs["q"]).abs().max())
        assert (actual - wanted).abs().max() <= EXACT_GRADIENT * scale, key


@pytest.mark.parametrize("name", ["gated_deltanet", "rls", "mesa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", ["chunk", "scan-chunks"])
def test_low_precision_stays_within_twice_the_serial_error(name, dtype, run):
    inputs = draw(name, 70, seed=4, dtype=dtype, dims=(8, 8))
    wanted = run_form(name, {key: x.double() for key, x in inputs.items()}, impl="reference")
    serial = run_form(name, inputs, impl="reference")
    actual = run_form(name, inputs, impl=RUNS[run]["impl"], chunk_size=16)
    assert actual.o.dtype == dtype
    assert all(x.dtype == state_dtype(dtype) for x in state_tensors(actual.state))
    pairs = [(actual.o, serial.o, wanted.o)]
    pairs += zip(*(state_tensors(x.state) for x in (actual, serial, wanted)), strict=True)
    for a, s, w in pairs:
        error = (s.double() - w).abs().max() / w.abs().max()
        assert_close(a, w, 2 * error + 4 * torch.finfo(a.dtype).eps)


def test_rls_and_mesa_agree_through_different_primitives():
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 200, 3, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    for lambda0 in (0.01, 1.0):
        for impl in ("reference", "chunk", "scan"):
            a, b = (form(q, k, v, lambda0=lambda0, impl=impl) for form in (rls, mesa))
            assert_close(a.o, b.o, EXACT)
            assert_close(a.state.S, a.state.penalty.inverse @ b.state.S, EXACT)


def test_mesa_is_ridge_regression_on_every_prefix():
    inputs = draw("mesa", 12, heads=(2, 2))
    silu = torch.nn.functional.silu
    q, k = unit(silu(inputs["q"])), unit(silu(inputs["k"]))
    wanted = brute_force.ridge_regression(q, k, inputs["v"], lambda0=0.5)
    assert_close(mesa(**inputs, lambda0=0.5).o, wanted, EXACT)
    assert_close(rls(**inputs, lambda0=0.5).o, wanted, EXACT)


def test_gated_deltanet_is_the_solution_of_its_triangular_system():
    inputs = draw("gated_deltanet", 12, heads=(2, 2))
    assert_close(gated_deltanet(**inputs).o, brute_force.gated_deltanet(**inputs), EXACT)


def test_wrong_shapes_are_named():
    inputs = draw("gated_deltanet", 4)
    with pytest.raises(ValueError, match="beta must have shape"):
        gated_deltanet(**{**inputs, "beta": inputs["beta"].mT})
    with pytest.raises(ValueError, match="log_decay must be <= 0"):
        gated_deltanet(**{**inputs, "log_decay": -inputs["log_decay"]})
    inputs = draw("mesa", 4)
    with pytest.raises(ValueError, match="lambda0 must be a finite float > 0"):
        mesa(**inputs, lambda0=0.0)
    with pytest.raises(ValueError, match="feature_map must be one of"):
        rls(**inputs, feature_map="relu")
