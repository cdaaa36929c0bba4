"""One decoding step in one launch, against the serial oracles: on a GPU where there is one, else in the interpreter.

Every mixer of the registry under every option decodes a sequence from a carried state, one token at a time.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from linattn_cli.compare import budget, compare
from linattn_cli.kernels.registry import MIXERS, Mixer
from linattn_cli.kernels.types import PenaltyState, state_tensors
from linattn_cli.verify_mixers import _tensor_names, form_of, option_sets
from tests.kernels.on_triton import DEVICE, GPU, compile_one_by_one, kernels_imported

with kernels_imported():
    from linattn_cli.kernels import decode_hla_triton, decode_triton
    from linattn_cli.kernels.forms import decode

DECODED = {name: mixer for name, mixer in MIXERS.items() if "triton" in mixer.impls}
WITH_A_PENALTY = ("vla", "rls", "mesa")
Options = dict[str, object]


pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that decoding launched."""
    compile_one_by_one(monkeypatch)
    names: list[str] = []

    def counted(module: Any) -> None:
        launch = module.launch

        def noted(function: Any, *arguments: Any, **sizes: Any) -> None:
            names.append(function.fn.__name__)
            launch(function, *arguments, **sizes)

        monkeypatch.setattr(module, "launch", noted)

    from linattn_cli.kernels.penalty import triton as penalty

    for module in (decode_triton, decode_hla_triton, penalty):
        counted(module)
    return names


def cases() -> list[Any]:
    found = []
    for mixer in DECODED.values():
        for options in option_sets(mixer):
            words = "-".join(f"{name}={value}" for name, value in options.items())
            found.append(pytest.param(mixer, options, id=f"{mixer.name}-{words or 'defaults'}"))
    return found


def tensors_of(mixer: Mixer, options: Options, T: int, *, B=2, Q=2, H=2, K=5, V=9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = {"q": normal(B, T, Q, K) * K**-0.5, "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    for name in _tensor_names(mixer, options, inspect.signature(form_of(mixer)).parameters)[3:]:
        x[name] = {
            "u": normal(B, T, H, K) / K,
            "beta": normal(B, T, H).sigmoid(),
            "log_decay": -normal(B, T, H).abs(),
        }[name]
    if "log_decay" in x:
        x["log_decay"][:, 1::7] = 0.0
        x["log_decay"][:, 4::9] = -50.0
    return {name: y.to(DEVICE) for name, y in x.items()}


def settings_of(options: Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "beta"}


def decoded(
    mixer: Mixer, options: Options, x: dict[str, Tensor], impl: str, dtype: torch.dtype, prefix: int
) -> tuple[Tensor, Any, list[Tensor]]:
    """Outputs and last state of decoding everything after a prefix, and how many read-outs each token clamped."""
    form, settings = form_of(mixer), settings_of(options)
    x = {name: y.to(dtype) for name, y in x.items()}
    with torch.no_grad():
        state = form(**{n: y[:, :prefix] for n, y in x.items()}, **settings, impl="reference").state
        outputs, clamped = [], []
        for t in range(prefix, x["q"].shape[1]):
            out = form(**{n: y[:, t : t + 1] for n, y in x.items()}, **settings, initial_state=state, impl=impl)
            assert out.impl == impl
            assert type(out.state) is type(state)
            state = out.state
            outputs.append(out.o)
            clamped.append(out.clamped)
    return torch.cat(outputs, 1), state, clamped


def check(mixer: Mixer, options: Options, x: dict[str, Tensor], prefix: int = 2, dtype=torch.float32) -> None:
    """Every output and state: at most 2 x the serial form's error in the same dtype, plus 4 eps."""
    x = {name: y.to(dtype) for name, y in x.items()}
    exact_o, exact_state, exact_clamped = decoded(mixer, options, x, "reference", torch.float64, prefix)
    serial_o, serial_state, _ = decoded(mixer, options, x, "reference", dtype, prefix)
    ours_o, ours_state, clamped = decoded(mixer, options, x, "triton", dtype, prefix)
    pairs = [(ours_o, serial_o, exact_o, dtype)]
    states = zip(*(state_tensors(state) for state in (ours_state, serial_state, exact_state)), strict=True)
    pairs += [(ours, serial, exact, torch.float32) for ours, serial, exact in states]
    for index, (ours, serial, exact, kind) in enumerate(pairs):
        found = compare(ours, exact, dtype=kind)
        allowed = budget(dtype, compare(serial, exact, dtype=kind), gradient=False)
        assert allowed.allows(found), f"{'output' if index == 0 else f'state {index}'}: {found}, allowed {allowed}"
    for ours, exact in zip(clamped, exact_clamped, strict=True):
        assert (ours is None) == (exact is None)
        assert ours is None or int(ours.sum()) == int(exact.sum())


@pytest.mark.parametrize(("mixer", "options"), cases())
def test_every_mixer_and_option(mixer: Mixer, options: Options, launches: list[str]) -> None:
    check(mixer, options, tensors_of(mixer, options, 9))
    assert len(launches) == 7
    assert len(set(launches)) == 1


@pytest.mark.parametrize("name", DECODED)
def test_grouped_queries_and_several_tiles(name: str, launches: list[str]) -> None:
    """K = 70 is five row blocks of 16 in a tile of 128; V = 35 is three blocks of columns."""
    mixer = DECODED[name]
    check(mixer, {}, tensors_of(mixer, {}, 5, B=1, Q=4, H=2, K=70, V=35))
    assert len(launches) == 3


@pytest.mark.parametrize("name", WITH_A_PENALTY)
def test_the_inverse_is_taken_anew(name: str, launches: list[str]) -> None:
    mixer = DECODED[name]
    check(mixer, {}, tensors_of(mixer, {}, 138, B=1, Q=1, H=1, K=9, V=4), prefix=2)
    assert launches.count("inverse_kernel") == 2
    assert len(launches) == 138


def test_hla3_published_with_groups() -> None:
    mixer = DECODED["hla3"]
    options: Options = {"variant": "published", "readout": "ratio", "decay": "moment", "feature_map": "elu1"}
    check(mixer, options, tensors_of(mixer, options, 6, B=1, Q=4, H=2, K=17, V=20))


@pytest.mark.parametrize("name", ["vla", "hla2"])
def test_strided_tokens_and_identical_bits(name: str) -> None:
    """q, k and v are slices of one projection of two sequences, as a layer makes them."""
    mixer, form = DECODED[name], form_of(DECODED[name])
    x = tensors_of(mixer, {}, 3, V=5)
    state = form(**{n: y[:, :2] for n, y in x.items()}, impl="reference").state
    dense = {n: y[:, 2:] for n, y in x.items()}
    fused = torch.cat([dense[n].flatten(2) for n in "qkv"], dim=-1)
    strided = dense | {n: part.unflatten(-1, (2, 5)) for n, part in zip("qkv", fused.split(10, -1), strict=True)}
    assert not strided["k"].is_contiguous()
    first, second, third = (form(**y, initial_state=state, impl="triton") for y in (dense, strided, dense))
    for other in (second, third):
        assert torch.equal(first.o, other.o)
        assert all(map(torch.equal, state_tensors(first.state), state_tensors(other.state)))


@pytest.mark.parametrize("name", ["vla", "ahla"])
def test_a_gradient_or_padding_goes_the_general_way(name: str, launches: list[str]) -> None:
    mixer, form = DECODED[name], form_of(DECODED[name])
    x = tensors_of(mixer, {}, 3)
    state = form(**{n: y[:, :2] for n, y in x.items()}, impl="reference").state
    token = {n: y[:, 2:] for n, y in x.items()}
    plain = form(**token, initial_state=state, impl="triton")
    assert len(launches) == 1
    q = token["q"].clone().requires_grad_()
    out = form(**{**token, "q": q}, initial_state=state, impl="triton")
    assert torch.autograd.grad(out.o.sum(), q)[0].abs().sum() > 0
    mask = torch.ones(2, 1, dtype=torch.bool, device=DEVICE)
    padded = form(**token, mask=mask, initial_state=state, impl="triton")
    assert "_step_kernel" not in launches[1:]
    assert "_hla_step_kernel" not in launches[1:]
    for other in (out, padded):
        torch.testing.assert_close(other.o.detach(), plain.o, rtol=0, atol=1e-5 * plain.o.abs().max().item())


def test_what_the_other_implementations_get() -> None:
    x = torch.zeros(1, 1, 2, 4, device=DEVICE)
    state = (torch.zeros(1, 2, 4, 4, device=DEVICE),)
    assert decode.decodes("triton", ("delta_scan",), (x, None), None, state)
    for impl in ("chunk", "reference", "scan", "auto" if not GPU else "chunk"):
        assert not decode.decodes(impl, ("delta_scan",), (x,), None, state)
    assert not decode.decodes("triton", ("delta_scan",), (x,), None, None)
    assert not decode.decodes("triton", ("delta_scan",), (x.double(),), None, state)
    assert not decode.decodes("triton", ("delta_scan",), (x.expand(1, 2, 2, 4),), None, state)


def test_a_replaced_implementation_is_used() -> None:
    """A bug planted in a primitive must show in decoding too."""
    from linattn_cli.kernels import dispatch

    x = torch.zeros(1, 1, 2, 4, device=DEVICE)
    with dispatch.override("delta_scan", "triton", lambda *_, **__: None):
        assert not decode.decodes("triton", ("penalty_gain", "delta_scan"), (x,), None, (x,))


def test_wrong_states_and_options_are_refused() -> None:
    x = torch.ones(1, 1, 2, 4, device=DEVICE)
    linear, vla, hla2 = (form_of(DECODED[name]) for name in ("linear", "vla", "hla2"))
    state = linear(x, x, x, impl="reference").state
    with pytest.raises(ValueError, match="initial_state must have shape"):
        linear(x, x, x[..., :3].contiguous(), initial_state=state, impl="triton")
    with pytest.raises(ValueError, match="feature_map must be one of"):
        hla2(x, x, x, feature_map="relu", initial_state=hla2(x, x, x, impl="reference").state, impl="triton")
    state = vla(x, x, x, x, impl="reference").state
    state = state._replace(penalty=PenaltyState(state.penalty.mass.double(), state.penalty.inverse, 1))
    with pytest.raises(ValueError, match="mass must be float32"):
        vla(x, x, x, x, initial_state=state, impl="triton")


def test_operators_are_registered_as_torch_expects() -> None:
    from linattn_cli.kernels.penalty.triton import penalty_inverse

    x, S, z = (torch.randn(*shape, device=DEVICE) for shape in ((1, 1, 2, 4), (1, 2, 4, 4), (1, 2, 4)))
    spd = torch.eye(4, device=DEVICE).expand(1, 2, 4, 4).contiguous()
    vla = (x, x, x, x, None, None, S, spd, spd, z, "elu1", False, True, True, "write", True, False, 1.0, 1e-4)
    hla3 = (x, x, x, None, S, None, S, S, None, z, z, None, "hla3", "identity", [0, 0, 0, 0, 0], 0.0, 1e-6)
    for operator, arguments in (
        (decode_triton.matrix_step_operator, vla),
        (decode_hla_triton.hla_step_operator, hla3),
        (penalty_inverse, (spd, 0.1)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_step_compiles_as_one_graph() -> None:
    x = tensors_of(DECODED["vla"], {}, 3)
    state = form_of(DECODED["vla"])(**{n: y[:, :2] for n, y in x.items()}, impl="reference").state
    token = {n: y[:, 2:] for n, y in x.items()}
    options = {"penalty": state.penalty, "z": state.z, "normalise": True, "lambda0": 0.1, "feature_map": "elu1"}

    def step(token: dict[str, Tensor]) -> decode.MatrixStep:
        return decode.matrix_step("vla", **token, S=state.S, **options)

    with torch.no_grad():
        graph, eager = torch.compile(step, fullgraph=True, backend="aot_eager")(token), step(token)
    assert all(map(torch.equal, state_tensors(graph), state_tensors(eager)))
