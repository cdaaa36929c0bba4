"""Any legal shape of a mixer's form gives its serial result; any other a ValueError by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linattn_cli.kernels.registry import MIXERS
from linattn_cli.kernels.types import state_tensors
from linattn_cli.verify_mixers import form_of
from tests.fuzz import examples

FORMS = {name: form_of(mixer) for name, mixer in MIXERS.items()}


@st.composite
def calls(draw):
    """The name of a mixer and float64 tensors for its form, by name."""
    name = draw(st.sampled_from(list(FORMS)))
    batch, heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    tokens = draw(st.integers(1, 12) | st.sampled_from([31, 64, 65]))
    key_dim, value_dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(*shape):
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    made = {
        "q": lambda: unit(batch, tokens, groups * heads, key_dim),
        "k": lambda: unit(batch, tokens, heads, key_dim),
        "v": lambda: normal(batch, tokens, heads, value_dim),
        "u": lambda: unit(batch, tokens, heads, key_dim),
        "beta": lambda: torch.sigmoid(normal(batch, tokens, heads)),
        "log_decay": lambda: -torch.rand(batch, tokens, heads, generator=generator, dtype=torch.float64),
    }
    tensors = {}
    for key, parameter in inspect.signature(FORMS[name]).parameters.items():
        if key in made and (parameter.default is parameter.empty or key == "u"):
            tensors[key] = made[key]()
    return name, tensors


@examples(100)
@given(call=calls(), chunk_size=st.none() | st.integers(1, 70))
def test_legal_shapes_give_the_serial_result(call, chunk_size):
    name, tensors = call
    out = FORMS[name](**tensors, chunk_size=chunk_size, impl="chunk")
    serial = FORMS[name](**tensors, impl="reference")
    assert out.o.shape == (*tensors["q"].shape[:3], tensors["v"].shape[-1])
    assert out.o.dtype == torch.float64
    pairs = [(out.o, serial.o), *zip(state_tensors(out.state), state_tensors(serial.state), strict=True)]
    for got, expected in pairs:
        assert got.shape == expected.shape
        assert bool(torch.isfinite(got).all())
        if expected.is_floating_point() and expected.numel():
            scale = max(expected.abs().max().item(), 1.0)
            assert (got - expected).abs().max().item() <= 1e-9 * scale


@st.composite
def broken(draw):
    name, tensors = draw(calls())
    key = draw(st.sampled_from(list(tensors)))
    x = tensors[key]
    match draw(st.sampled_from(["rank", "unsqueeze", "batch", "tokens", "empty", "dtype", "device", "type"])):
        case "rank":
            y = x[0]
        case "unsqueeze":
            y = x.unsqueeze(-1)
        case "batch":
            y = torch.cat([x, x])
        case "tokens":
            y = torch.cat([x, x], dim=1)
        case "empty":
            y = x[:, :0]
        case "dtype":
            wrong = [torch.int64, torch.bool, torch.complex64]
            # write strengths and decays may come in another precision
            y = x.to(draw(st.sampled_from(wrong if x.dim() == 3 else [*wrong, torch.float32])))
        case "device":
            y = x.to("meta")
        case "type":
            y = draw(st.sampled_from([x.tolist(), None, 1.0]))
    return name, {**tensors, key: y}, key


@examples(150)
@given(call=broken())
def test_anything_else_is_a_value_error_that_names_a_tensor(call):
    name, tensors, key = call
    if name == "vla" and key == "u" and tensors["u"] is None:
        tensors["u"] = 1.0
    with pytest.raises(ValueError, match=r".") as caught:
        FORMS[name](**tensors)
    message = str(caught.value)
    assert "\n" not in message
    # p and a are what the delta rule's forms make of k, K and V the widths
    words = set(message.replace(",", " ").replace("=", " ").replace(".", " ").split())
    assert words & ({*tensors} | {"p", "a", "K", "V"}), message
