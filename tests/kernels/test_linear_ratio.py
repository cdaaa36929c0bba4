"""The fused operator of linear attention against the serial form: on a GPU, else in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.fused_operator import check_outputs, count_calls, normals, with_gradients
from tests.kernels.on_triton import DEVICE, kernels_imported

with kernels_imported():
    from linattn_cli.kernels import linear_ratio_triton
    from linattn_cli.kernels.forms.linear import LinearState, linear_attention


pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the calls that the fused operator made."""
    return count_calls(monkeypatch, linear_ratio_triton, "linear_ratio_triton")


def tensors_of(T=37, B=1, Q=2, H=2, K=9, V=12, *, state: bool = False) -> dict[str, Tensor]:
    normal = normals()
    x = {"q": normal(B, T, Q, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    if state:
        x |= {"S": normal(B, H, K, V), "z": normal(B, H, K).abs()}
    return {name: y.to(DEVICE) for name, y in x.items()}


def outputs(x: dict[str, Tensor], impl: str, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Output, states, and the gradients of everything under a fixed random upstream on all of them."""
    held = {name: y.to(dtype).requires_grad_() for name, y in x.items()}
    state = LinearState(held["S"], held["z"]) if "S" in held else None
    if impl == "triton":
        options["chunk_size"] = 16
    out = linear_attention(held["q"], held["k"], held["v"], **options, initial_state=state, impl=impl)
    results = {"o": out.o, "S": out.state.S, "z": out.state.z}
    assert out.impl == impl
    return with_gradients(results, held) | {"clamped": out.clamped}


def check(x: dict[str, Tensor], **options: Any) -> None:
    check_outputs(outputs, x, **options)


@pytest.mark.parametrize("feature_map", ["elu1", "silu", "identity"])
def test_outputs_and_gradients(feature_map: str, fused: list[int]) -> None:
    x = tensors_of()
    if feature_map != "elu1":  # a denominator of signed features passes through zero; only positive ones here
        x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    check(x, feature_map=feature_map)
    assert fused == [37]


def test_a_carried_state_and_grouped_queries(fused: list[int]) -> None:
    check(tensors_of(T=20, B=2, Q=4, H=2, state=True))
    assert fused == [20]


def test_one_token_with_a_gradient(fused: list[int]) -> None:
    check(tensors_of(T=1, state=True))
    assert fused == [1]


@pytest.mark.parametrize(("K", "V"), [(40, 70), (130, 20), (16, 131)])
def test_wide_heads(K: int, V: int) -> None:
    check(tensors_of(T=18, Q=1, H=1, K=K, V=V))


def test_a_clamped_denominator_has_no_gradient() -> None:
    x = tensors_of(T=20)
    x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    x["q"][0, 5] *= -1.0
    held = {}
    for dtype, impl in ((torch.float64, "reference"), (torch.float32, "triton")):
        leaves = [x[name].to(dtype).requires_grad_() for name in "qkv"]
        out = linear_attention(*leaves, feature_map="identity", chunk_size=16, impl=impl)
        assert int(out.clamped) == 2
        upstream = torch.ones_like(out.o)
        upstream[0, 5] = 1e-4  # the quotient there is 1e4 times the others
        held[impl] = torch.autograd.grad((out.o * upstream).sum(), leaves)
    for ours, exact in zip(held["triton"], held["reference"], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=4e-6 * exact.abs().max().item())


def test_what_the_operator_leaves_to_the_parts(fused: list[int]) -> None:
    q, k, v = tensors_of(T=3).values()
    whole = linear_attention(q, k, v, impl="triton").o
    assert fused == [3]
    mask = torch.ones(1, 3, dtype=torch.bool, device=DEVICE)
    torch.testing.assert_close(linear_attention(q, k, v, mask=mask, impl="triton").o, whole, rtol=0, atol=1e-6)
    linear_attention(q, k, v, readout="raw", impl="triton")
    linear_attention(q, k, v, impl="chunk")
    assert fused == [3]


def test_two_runs_give_the_same_bits_with_and_without_a_gradient() -> None:
    x = tensors_of(T=20, state=True)
    first, second = (outputs(x, "triton", torch.float32) for _ in range(2))
    for name, y in first.items():
        assert torch.equal(y, second[name]), name
    with torch.no_grad():
        state = LinearState(x["S"], x["z"])
        plain = linear_attention(x["q"], x["k"], x["v"], initial_state=state, chunk_size=16, impl="triton")
    assert torch.equal(plain.o, first["o"])


def test_the_operator_is_registered_as_torch_expects() -> None:
    x = [y.requires_grad_() for y in tensors_of(T=3, state=True).values()]
    torch.library.opcheck(
        linear_ratio_triton._linear_ratio,
        (*x, "elu1", 1e-4, 0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiles_as_one_graph() -> None:
    leaves = [y.requires_grad_() for y in tensors_of(T=5).values()]
    options: dict[str, Any] = {"feature_map": "elu1", "floor": 1e-4, "S": None, "z": None, "chunk_size": 16}

    def mixer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_ratio_triton.linear_ratio_triton(q, k, v, **options)[0]

    results = []
    for function in (mixer, torch.compile(mixer, fullgraph=True, backend="aot_eager")):
        o = function(*leaves)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
