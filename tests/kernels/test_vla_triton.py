"""The fused VLA operator against the serial form: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from linattn_cli.kernels.types import state_tensors
from tests.kernels.fused_operator import check_outputs, count_calls, normals, with_gradients
from tests.kernels.on_triton import DEVICE, kernels_imported

with kernels_imported():
    from linattn_cli.kernels import vla_triton
    from linattn_cli.kernels.forms.vla import VLAState, vla
    from linattn_cli.kernels.types import PenaltyState


pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the calls that the fused operator made."""
    return count_calls(monkeypatch, vla_triton, "vla_triton")


def tensors_of(T=37, B=1, Q=2, H=2, K=9, V=12, *, state: bool = False) -> dict[str, Tensor]:
    normal = normals()
    x = {"q": normal(B, T, Q, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    x["u"] = normalize(normal(B, T, H, K), dim=-1) * K**-0.5
    if state:
        x |= {"S": normal(B, H, K, V), "root": normal(B, H, K, K) * K**-0.5, "z": normal(B, H, K).abs()}
    return {name: y.to(DEVICE) for name, y in x.items()}


def outputs(x: dict[str, Tensor], impl: str, dtype: torch.dtype, *, age: int = 64, **options: Any) -> dict[str, Tensor]:
    """Output, states, and the gradients of everything under a fixed random upstream on all of them."""
    held = {name: y.to(dtype).requires_grad_() for name, y in x.items()}
    state = None
    if "S" in held:
        mass = held["root"] @ held["root"].mT
        eye = torch.eye(mass.shape[-1], dtype=torch.float64, device=DEVICE)
        inverse = torch.linalg.inv(mass.double() + 0.1 * eye).to(dtype)
        state = VLAState(held["S"], PenaltyState(mass, inverse, age), held["z"])
    if impl == "triton":
        options["chunk_size"] = 16
    u = held["u"] if options.get("penalty", "learned") == "learned" else None
    out = vla(held["q"], held["k"], held["v"], u, **options, initial_state=state, impl=impl)
    results = {"o": out.o, "S": out.state.S, "mass": out.state.penalty.mass, "inverse": out.state.penalty.inverse}
    results["z"] = out.state.z
    assert out.impl == impl
    return with_gradients(results, held, allow_unused=True) | {"clamped": out.clamped}


def check(x: dict[str, Tensor], **options: Any) -> None:
    check_outputs(outputs, x, **options)


@pytest.mark.parametrize("penalty", ["learned", "key"])
@pytest.mark.parametrize("feature_map", ["elu1", "silu"])
def test_outputs_and_gradients(penalty: str, feature_map: str, fused: list[int]) -> None:
    x = tensors_of(B=2)  # of one sequence the gradient of q, what is left of terms 20 times its size, is a draw of few
    if feature_map == "silu":  # a denominator of signed features passes through zero; only positive ones here
        x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    check(x, penalty=penalty, feature_map=feature_map, lambda0=1.0 if penalty == "key" else 0.1)
    assert fused == [37]


def test_a_carried_state_and_grouped_queries(fused: list[int]) -> None:
    check(tensors_of(T=20, B=2, Q=4, H=2, state=True))
    assert fused == [20]


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_short_call_starts_from_the_given_inverse(tokens: int, fused: list[int]) -> None:
    check(tensors_of(T=tokens, state=True), age=20)
    assert fused == [tokens]


def test_wide_heads() -> None:
    check(tensors_of(T=18, Q=1, H=1, K=40, V=70))


def test_what_the_operator_leaves_to_the_parts(fused: list[int]) -> None:
    x = tensors_of(T=3)
    q, k, v, u = (x[name] for name in ("q", "k", "v", "u"))
    beta = torch.ones(1, 3, 2, device=DEVICE)
    mask = torch.ones(1, 3, dtype=torch.bool, device=DEVICE)
    vla(q, k, v, u, beta, impl="triton")
    vla(q, k, v, u, mask=mask, impl="triton")
    vla(q, k, v, u, readout="raw", impl="triton")
    vla(q, k, v, u, normalise_gate=False, impl="triton")
    vla(q, k, v, u, penalty="none", impl="triton")
    vla(q, k, v, u, impl="chunk")
    assert fused == []


def test_two_runs_give_the_same_bits_with_and_without_a_gradient() -> None:
    x = tensors_of(T=20, state=True)
    first, second = (outputs(x, "triton", torch.float32) for _ in range(2))
    for name, y in first.items():
        assert torch.equal(y, second[name]), name
    q, k, v, u = (x[name] for name in ("q", "k", "v", "u"))
    with torch.no_grad():
        plain = vla(q, k, v, u, chunk_size=16, impl="triton")
    trained = vla(q.clone().requires_grad_(), k, v, u, chunk_size=16, impl="triton")
    assert torch.equal(plain.o, trained.o)
    assert all(map(torch.equal, state_tensors(plain.state), state_tensors(trained.state)))


def test_the_operator_is_registered_as_torch_expects() -> None:
    x = {name: y.requires_grad_() for name, y in tensors_of(T=3, state=True).items()}
    mass = torch.eye(9, device=DEVICE).expand(1, 2, 9, 9).contiguous().requires_grad_()
    tensors = (x["q"], x["k"], x["v"], x["u"], x["S"], mass, None, x["z"])
    torch.library.opcheck(
        vla_triton._vla,
        (*tensors, "elu1", 0.1, 1e-4, 0, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiles_as_one_graph() -> None:
    x = tensors_of(T=5)
    options = {"feature_map": "elu1", "lambda0": 0.1, "floor": 1e-4, "S": None, "state": None, "z": None}

    def mixer(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
        return vla_triton.vla_triton(q, k, v, u, **options, chunk_size=16)[0]

    leaves = [y.requires_grad_() for y in x.values()]
    results = []
    for function in (mixer, torch.compile(mixer, fullgraph=True, backend="aot_eager")):
        o = function(*leaves)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
