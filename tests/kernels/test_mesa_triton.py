"""The fused mesa operator against the serial form: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linattn_cli.kernels.types import state_tensors
from tests.kernels.fused_operator import check_outputs, count_calls, normals, with_gradients
from tests.kernels.on_triton import DEVICE, kernels_imported

with kernels_imported():
    from linattn_cli.kernels import mesa_triton
    from linattn_cli.kernels.forms.mesa import MesaState, mesa
    from linattn_cli.kernels.types import PenaltyState


pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the calls that the fused operator made."""
    return count_calls(monkeypatch, mesa_triton, "mesa_triton")


def tensors_of(T=37, B=1, Q=2, H=2, K=9, V=12, *, state: bool = False) -> dict[str, Tensor]:
    normal = normals()
    x = {"q": normal(B, T, Q, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    if state:
        x |= {"S": normal(B, H, K, V), "root": normal(B, H, K, K) * K**-0.5}
    return {name: y.to(DEVICE) for name, y in x.items()}


def outputs(x: dict[str, Tensor], impl: str, dtype: torch.dtype, *, age: int = 64, **options: Any) -> dict[str, Tensor]:
    """Output, states, and the gradients of everything under a fixed random upstream on all of them."""
    held = {name: y.to(dtype).requires_grad_() for name, y in x.items()}
    state = None
    if "S" in held:
        mass = held["root"] @ held["root"].mT
        eye = torch.eye(mass.shape[-1], dtype=torch.float64, device=DEVICE)
        inverse = torch.linalg.inv(mass.double() + eye).to(dtype)
        state = MesaState(held["S"], PenaltyState(mass, inverse, age))
    if impl == "triton":
        options["chunk_size"] = 16
    out = mesa(held["q"], held["k"], held["v"], **options, initial_state=state, impl=impl)
    results = {"o": out.o, "S": out.state.S, "mass": out.state.penalty.mass, "inverse": out.state.penalty.inverse}
    assert out.impl == impl
    return with_gradients(results, held)


def check(x: dict[str, Tensor], **options: Any) -> None:
    check_outputs(outputs, x, **options)


@pytest.mark.parametrize("feature_map", ["silu", "elu1"])
def test_outputs_and_gradients(feature_map: str, fused: list[int]) -> None:
    check(tensors_of(), feature_map=feature_map)
    assert fused == [37]


def test_a_carried_state_and_grouped_queries(fused: list[int]) -> None:
    check(tensors_of(T=20, B=2, Q=4, H=2, state=True))
    assert fused == [20]


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_short_call_starts_from_the_given_inverse(tokens: int, fused: list[int]) -> None:
    check(tensors_of(T=tokens, state=True), age=20)
    assert fused == [tokens]


@pytest.mark.parametrize(("K", "V"), [(40, 70), (130, 20)])
def test_wide_heads(K: int, V: int) -> None:
    check(tensors_of(T=18, Q=1, H=1, K=K, V=V))


def test_padding_goes_the_other_way_and_gives_the_same(fused: list[int]) -> None:
    q, k, v = (x for x in tensors_of(T=20).values())
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    masked = mesa(q, k, v, mask=mask, chunk_size=16, impl="triton")
    assert fused == []
    torch.testing.assert_close(masked.o, mesa(q, k, v, chunk_size=16, impl="triton").o, rtol=0, atol=2e-6)
    assert fused == [20]


def test_bits_do_not_depend_on_the_gradient() -> None:
    q, k, v = (x for x in tensors_of(T=20).values())
    plain = mesa(q, k, v, chunk_size=16, impl="triton")
    trained = mesa(q.clone().requires_grad_(), k, v, chunk_size=16, impl="triton")
    assert torch.equal(plain.o, trained.o)
    assert all(map(torch.equal, state_tensors(plain.state), state_tensors(trained.state)))


def test_half_precision_comes_and_goes_without_a_cast() -> None:
    q, k, v = (x.half().requires_grad_() for x in tensors_of(T=20).values())
    out = mesa(q, k, v, chunk_size=16, impl="triton")
    serial = mesa(q, k, v, impl="reference")
    assert out.o.dtype == torch.float16
    assert all(x.dtype == torch.float32 for x in state_tensors(out.state))
    torch.testing.assert_close(out.o.float(), serial.o.float(), rtol=0, atol=4e-3 * serial.o.abs().max().item())
    grads = torch.autograd.grad(out.o.float().square().sum(), (q, k, v))
    wanted = torch.autograd.grad(serial.o.float().square().sum(), (q, k, v))
    for ours, truth in zip(grads, wanted, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, truth, rtol=0, atol=4e-3 * truth.abs().max().item())


def test_the_operator_is_registered_as_torch_expects() -> None:
    x = {name: y.requires_grad_() for name, y in tensors_of(T=3, state=True).items()}
    mass = torch.eye(9, device=DEVICE).expand(1, 2, 9, 9).contiguous().requires_grad_()
    torch.library.opcheck(
        mesa_triton._mesa,
        (x["q"], x["k"], x["v"], x["S"], mass, None, "silu", 1.0, 0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiles_as_one_graph() -> None:
    leaves = [y.requires_grad_() for y in tensors_of(T=5).values()]
    options: dict[str, Any] = {"feature_map": "silu", "lambda0": 1.0, "S": None, "state": None, "chunk_size": 16}

    def mixer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mesa_triton.mesa_triton(q, k, v, **options)[0]

    results = []
    for function in (mixer, torch.compile(mixer, fullgraph=True, backend="aot_eager")):
        o = function(*leaves)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
