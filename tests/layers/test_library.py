"""The layers in somebody else's model: the worked example, signatures, and what is packaged for it."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn

import linattn_cli.layers as layers
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.layers.base import Backbone
from tests.readme_blocks import PUBLIC

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformer_block.py"
CLASSES = [getattr(layers, name) for name in layers.__all__ if name not in ("Mixer", "MixerState")]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("transformer_block", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_worked_example_shows_what_it_says(example):
    shown = example.main()
    assert shown["parameters with a gradient"] == shown["parameters"] > 0
    assert shown["padding changes the logits by"] < 1e-5
    assert shown["decoding changes the logits by"] < 1e-5
    assert shown["generated tokens that differ"] == 0


def test_the_worked_example_runs_as_a_script():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=True)
    assert "generated tokens that differ: 0" in done.stdout


def test_it_is_exact_in_float64(example):
    torch.manual_seed(0)
    model = example.TinyModel().double().eval()
    tokens = torch.randint(50, (2, 12))
    with torch.no_grad():
        whole, _ = model(tokens)
        first, states = model(tokens[:, :5])
        last, _ = model(tokens[:, 5:], states)
    torch.testing.assert_close(torch.cat((first, last), 1), whole, rtol=1e-9, atol=1e-9)


def test_it_learns(example):
    torch.manual_seed(0)
    model = example.TinyModel()
    tokens = torch.randint(50, (8, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [layers.HLA2, layers.Linear])
def test_torch_compile_gives_the_same(layer):
    """Traced and differentiated ahead of time; the code generator behind it, which takes minutes here, is torch's."""
    torch.manual_seed(0)
    attention, x = layer(32, 4), torch.randn(2, 20, 32)
    compiled = torch.compile(attention, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, attention(x))
    expected = torch.autograd.grad(attention(x).sum(), list(attention.parameters()))
    found = torch.autograd.grad(y.sum(), list(attention.parameters()))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layer", CLASSES)
def test_the_constructor(layer):
    parameters = inspect.signature(layer).parameters
    assert list(parameters)[:3] == ["d_model", "heads", "d_head"]
    assert all(p.kind is p.KEYWORD_ONLY or p.kind is p.VAR_KEYWORD for p in list(parameters.values())[3:])
    assert layer(24, 3).d_head == 8
    assert layer(24, 3, 16).d_head == 16
    with pytest.raises(ValueError, match="d_model = 32 is no multiple of heads = 3; give d_head as well"):
        layer(32, 3)
    with pytest.raises(TypeError, match="'readuot'"):
        layer(24, 3, readuot="raw")


def test_the_keywords_of_the_backbone_are_those_of_mixer():
    own = {name for name, p in inspect.signature(layers.Mixer.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert own == set(Backbone.__annotations__)


def test_every_mixer_is_exported_with_its_options():
    exported = {layer.__name__: layer for layer in CLASSES}
    for mixer in MIXERS.values():
        layer = exported.pop(mixer.layer.split(":")[1])
        own = inspect.signature(layer).parameters
        assert set(mixer.options) <= set(own), mixer.name
        assert {name: own[name].default for name in mixer.options} == {k: o.default for k, o in mixer.options.items()}
    assert not exported


def test_the_public_names_are_there_and_explained():
    assert set(PUBLIC["linattn_cli.layers"]) == set(layers.__all__)
    for module, names in PUBLIC.items():
        found = importlib.import_module(module)
        assert all(not part.startswith("_") for part in module.split("."))
        for name in names:
            thing = getattr(found, name)
            assert inspect.getdoc(thing), f"{module}.{name}"


def test_the_marker_of_a_typed_package_is_packaged():
    assert (resources.files("linattn_cli") / "py.typed").is_file()
