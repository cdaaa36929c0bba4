"""Chunk against serial, and both against what they must satisfy, for the three primitives."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.layout import choose_chunk_size
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.penalty import chunk, penalty_gain
from linattn_cli.kernels.types import PenaltyState
from tests.kernels.primitive_cases import (
    CHUNK,
    DECAYS,
    LAMBDA0,
    LENGTHS,
    OPERATORS,
    assert_within_budget,
    call,
    make,
    run,
    values,
)

SCANS = ("linear_scan", "delta_scan")


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_chunk_is_serial_in_float64(operator, tokens, decay, with_state):
    if operator == "penalty_gain" and decay != "none":
        decay = "none"
    assert_within_budget(make(operator, tokens, decay=decay, with_state=with_state), torch.float64)


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("linear_scan", {"reverse": True}),
        ("linear_scan", {"exclusive": True}),
        ("linear_scan", {"exclusive": True, "reverse": True}),
        ("delta_scan", {"reverse": True}),
    ],
)
@pytest.mark.parametrize("decay", DECAYS)
def test_directions_and_exclusive_reads(operator, decay, options):
    assert_within_budget(make(operator, 2 * CHUNK + 3, decay=decay, with_state=True, **options), torch.float64)


@pytest.mark.parametrize("operator", OPERATORS)
def test_grouped_heads_equal_repeated_heads(operator):
    case = make(operator, 2 * CHUNK + 3, groups=3, with_state=True)
    assert_within_budget(case, torch.float64)
    repeated = {
        name: x.repeat_interleave(3, dim=1 if x.dim() == 4 and name in ("state", "root") else 2)
        if name not in _queries(operator)
        else x
        for name, x in case.tensors.items()
    }
    grouped = call(case, case.tensors, "chunk").o
    torch.testing.assert_close(grouped, call(case, repeated, "chunk").o, rtol=1e-12, atol=1e-12)


def _queries(operator: str) -> tuple[str, ...]:
    return ("k",) if operator == "penalty_gain" else ("q",)


@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize("decay", ["none", "tokens"])
@pytest.mark.parametrize("key_dim", [32, 64, 128])
def test_delta_scan_in_float32_with_keys_all_alike(key_dim, decay, chunk_size):
    """The worst case of a chunk: it must neither round worse than the recurrence nor let anybody ask for that."""
    case = make("delta_scan", 600, decay=decay, key_dim=key_dim, value_dim=key_dim, alike=True)
    if decay != "none":
        case.tensors["log_decay"] *= 0.02
    assert_within_budget(case, torch.float32, chunk_size=chunk_size)


def test_penalty_gain_in_float32_where_the_first_chunk_adds_much_mass():
    case = make("penalty_gain", 300, key_dim=6, lambda0=0.1)
    case.tensors["u"] *= 3
    assert_within_budget(case, torch.float32, chunk_size=None)


@pytest.mark.parametrize("silent", [0, 60, 114])
def test_penalty_gain_corrects_the_chunks_that_need_it_wherever_they_stand(silent, monkeypatch):
    case = make("penalty_gain", 300, key_dim=6, lambda0=0.1)
    case.tensors["u"] *= 3
    case.tensors["u"][:, :silent] = 0
    case = case.cast(torch.float32)
    exact = run(case.cast(torch.float64), "reference")[0]["o"]
    errors = {}
    for name, threshold in (("all", -1.0), ("chosen", chunk.HEAVY), ("none", math.inf)):
        monkeypatch.setattr(chunk, "HEAVY", threshold)
        errors[name] = (run(case, "chunk", chunk_size=None)[0]["o"] - exact).norm().item()
    assert errors["chosen"] < 1.5 * errors["all"]
    assert errors["chosen"] < 0.5 * errors["none"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", ["none", "tokens", "strong"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_low_precision_is_within_its_budget(operator, decay, dtype):
    decay = "none" if operator == "penalty_gain" else decay
    case = make(operator, 150, decay=decay, with_state=True, key_dim=24, value_dim=20)
    assert_within_budget(case, dtype, chunk_size=None)


@pytest.mark.parametrize("operator", SCANS)
def test_one_strong_decay_among_weak_ones_keeps_its_digits(operator):
    case = make(operator, 64, decay="tokens")
    case.tensors["log_decay"] = torch.full_like(case.tensors["log_decay"], -0.001)
    case.tensors["log_decay"][:, 20] = -50
    assert_within_budget(case, torch.float32, chunk_size=64)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64])
@pytest.mark.parametrize("operator", OPERATORS)
def test_chunk_size_changes_nothing(operator, chunk_size):
    decay = "none" if operator == "penalty_gain" else "tokens"
    assert_within_budget(make(operator, 21, decay=decay), torch.float64, chunk_size=chunk_size)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradcheck(operator):
    decay = "none" if operator == "penalty_gain" else "tokens"
    case = make(operator, 5, decay=decay, with_state=True, key_dim=3, value_dim=2)
    # keep finite differences of the decay below zero
    if "log_decay" in case.tensors:
        case.tensors["log_decay"] -= 0.1
    names = list(case.tensors)
    leaves = [x.clone().requires_grad_() for x in case.tensors.values()]

    def outputs(*tensors):
        out = call(case, dict(zip(names, tensors, strict=True)), "chunk", chunk_size=2)
        return tuple(values(out).values())

    assert torch.autograd.gradcheck(outputs, leaves, atol=1e-7)


@pytest.mark.parametrize("impl", ["reference", "chunk"])
@pytest.mark.parametrize("cut", [1, CHUNK - 1, CHUNK, CHUNK + 1, 18])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_call_may_be_split_anywhere(operator, cut, impl):
    decay = "none" if operator == "penalty_gain" else "tokens"
    case = make(operator, 19, decay=decay)
    whole, whole_grads = run(case, impl)

    leaves = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    first = call(case, {n: x[:, :cut] for n, x in leaves.items()}, impl)
    second = (
        call(case, {n: x[:, cut:] for n, x in leaves.items()}, impl, initial_state=first.final_state)
        if (operator == "penalty_gain")
        else call(case, {**{n: x[:, cut:] for n, x in leaves.items()}, "state": first.final_state}, impl)
    )
    joined = values(second) | {"o": torch.cat((first.o, second.o), 1)}
    if first.residual is not None:
        joined["residual"] = torch.cat((first.residual, second.residual), 1)
    for name, expected in whole.items():
        torch.testing.assert_close(joined[name], expected, rtol=1e-9, atol=1e-11)
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (joined[n] * torch.randn(joined[n].shape, generator=generator, dtype=torch.float64)).sum() for n in whole
    )
    for name, grad in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
        torch.testing.assert_close(grad, whole_grads[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("operator", SCANS)
def test_a_reversed_call_may_be_split_too(operator):
    case = make(operator, 19, decay="tokens", reverse=True)
    whole = call(case, case.tensors, "chunk")
    late = call(case, {n: x[:, 7:] for n, x in case.tensors.items()}, "chunk")
    early = call(case, {**{n: x[:, :7] for n, x in case.tensors.items()}, "state": late.final_state}, "chunk")
    torch.testing.assert_close(torch.cat((early.o, late.o), 1), whole.o)
    torch.testing.assert_close(early.final_state, whole.final_state)


def test_the_reversed_scan_is_the_adjoint():
    """<do, LA(q, k, v)> = <v, LArev(k, q, do)>: the definition of a transpose, decay and exclusive read included."""
    case = make("linear_scan", 23, decay="tokens")
    q, k, v, log_decay = (case.tensors[n] for n in ("q", "k", "v", "log_decay"))
    do = torch.randn_like(v)
    for exclusive in (False, True):
        o = linear_scan(q, k, v, log_decay=log_decay, exclusive=exclusive).o
        dv = linear_scan(k, q, do, log_decay=log_decay, exclusive=exclusive, reverse=True).o
        torch.testing.assert_close((do * o).sum(), (v * dv).sum())


@pytest.mark.parametrize("operator", OPERATORS)
def test_non_contiguous_inputs_and_upstream_gradients(operator):
    case = make(operator, 19)
    strided = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in case.tensors.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    torch.testing.assert_close(call(case, strided, "chunk").o, call(case, case.tensors, "chunk").o)

    grads = []
    for tensors in (strided, case.tensors):
        leaves = [x.detach().requires_grad_() for x in tensors.values()]
        out = call(case, dict(zip(tensors, leaves, strict=True)), "chunk").o
        # sum() sends an expanded gradient of stride 0, the transpose a strided one
        total = out.sum() + out.transpose(1, 2).square().sum()
        grads.append(torch.autograd.grad(total, leaves))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_sequences_of_a_batch_do_not_touch_each_other(operator):
    case = make(operator, 19)
    both = call(case, case.tensors, "chunk").o
    one = call(case, {n: x[1:] for n, x in case.tensors.items()}, "chunk").o
    torch.testing.assert_close(both[1:], one)


@pytest.mark.parametrize("operator", OPERATORS)
def test_causality(operator):
    case = make(operator, 19)
    before = call(case, case.tensors, "chunk").o[:, :12]
    changed = {n: torch.cat((x[:, :12], torch.randn_like(x[:, 12:])), 1) for n, x in case.tensors.items()}
    torch.testing.assert_close(call(case, changed, "chunk").o[:, :12], before, rtol=0, atol=1e-14)


def test_autocast_does_not_reach_the_state():
    case = make("delta_scan", 40).cast(torch.float32)
    plain, plain_grads = run(case, "chunk")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_grads = run(case, "chunk")
    torch.testing.assert_close(cast["final_state"], plain["final_state"], rtol=0, atol=0)
    torch.testing.assert_close(cast_grads["p"], plain_grads["p"], rtol=0, atol=0)


def test_decoding_refreshes_the_inverse():
    case = make("penalty_gain", 200)
    state = None
    gains = []
    for t in range(200):
        out = call(case, {n: x[:, t : t + 1] for n, x in case.tensors.items()}, "chunk", initial_state=state)
        state = out.final_state
        gains.append(out.o)
        assert state.age <= 64
    torch.testing.assert_close(torch.cat(gains, 1), call(case, case.tensors, "reference").o)
    M = LAMBDA0 * torch.eye(6, dtype=torch.float64) + state.mass
    torch.testing.assert_close(M @ state.inverse, torch.eye(6, dtype=torch.float64).expand_as(M))


def test_adversarial_penalty_by_its_residual():
    """Eight repeated unit directions: cond(M) passes 1e4, where only |M x - k| means something in float32."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(8, 16, generator=generator), dim=-1)
    u = directions[torch.arange(8192) % 8].view(1, 8192, 1, 16)
    k = torch.nn.functional.normalize(torch.randn(1, 8192, 1, 16, generator=generator), dim=-1)
    M = 0.1 * torch.eye(16, dtype=torch.float64) + (u[0, :, 0].mT.double() @ u[0, :, 0].double())
    assert torch.linalg.cond(M) > 1e4

    def residual(impl):
        last, key = penalty_gain(u, k, lambda0=0.1, impl=impl).o[0, -1, 0].double(), k[0, -1, 0].double()
        return float((M @ last - key).norm() / (torch.linalg.matrix_norm(M, 2) * last.norm()))

    assert residual("chunk") < 2 * residual("reference") + 4 * torch.finfo(torch.float32).eps


def test_chunks_are_equal_and_waste_nothing():
    assert [choose_chunk_size(t, None) for t in (1, 63, 64, 65, 73, 2048)] == [1, 63, 64, 33, 37, 64]
    assert choose_chunk_size(10, 64) == 10


def test_the_resolved_implementation_is_recorded():
    case = make("linear_scan", 5)
    assert call(case, case.tensors, "auto").impl == "chunk"
    assert call(case, case.tensors, "reference").impl == "reference"


@pytest.mark.parametrize(("dtype", "impl"), [(torch.float32, "triton"), (torch.float64, "chunk")], ids=str)
def test_auto_on_a_gpu_is_triton_where_its_kernels_have_the_dtype(monkeypatch, dtype, impl):
    pytest.importorskip("triton", reason="triton has no wheel for this system")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert dispatch.resolve("linear_scan", "auto", torch.empty(0, dtype=dtype)) == impl


def test_an_override_is_only_felt_inside_its_block():
    case = make("linear_scan", 5)
    q, k, v = (case.tensors[n] for n in "qkv")
    expected = linear_scan(q, k, v).o
    with dispatch.override("linear_scan", "chunk", lambda *x, **o: (torch.zeros_like(v), None)):
        assert linear_scan(q, k, v).o.abs().max() == 0
    torch.testing.assert_close(linear_scan(q, k, v).o, expected)


def test_chunk_runs_without_triton():
    """In a fresh process in which triton cannot be imported."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from linattn_cli.kernels.delta import delta_scan
x = torch.randn(1, 9, 1, 4, requires_grad=True)
out = delta_scan(x, x, x, x)
out.o.sum().backward()
print(out.impl)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "chunk"), done.stderr


def test_the_delta_scan_is_deltanets_rule():
    """p = a = k with |k| = 1 overwrites exactly: reading a key just written gives its value."""
    k = torch.nn.functional.normalize(torch.randn(1, 9, 1, 4, dtype=torch.float64), dim=-1)
    v = torch.randn(1, 9, 1, 3, dtype=torch.float64)
    torch.testing.assert_close(delta_scan(k, k, k, v).o, v)


def test_the_gain_is_the_inverse():
    case = make("penalty_gain", 19)
    out = call(case, case.tensors, "chunk")
    u, k = case.tensors["u"], case.tensors["k"]
    for t in (0, 7, 8, 18):
        M = LAMBDA0 * torch.eye(6, dtype=torch.float64) + torch.einsum("bshi,bshj->bhij", u[:, : t + 1], u[:, : t + 1])
        torch.testing.assert_close(out.o[:, t], torch.linalg.solve(M, k[:, t]))
    assert isinstance(out.final_state, PenaltyState)
