"""Every option of every mixer in the backbone: one step of training, decoding, and the associative scan."""

from __future__ import annotations

import pytest
import torch

from linattn_cli.kernels.registry import MIXERS
from linattn_cli.layers.decay import SelectiveDecay
from linattn_cli.model import build_model
from linattn_cli.settings import ModelConfig

SETTINGS = [
    (name, {option: value})
    for name, mixer in MIXERS.items()
    for option, spec in mixer.options.items()
    for value in (spec.choices or ((not spec.default,) if isinstance(spec.default, bool) else (0.5,)))
    if value != spec.default
]


def build(name, options, **changes):
    torch.manual_seed(0)
    small = {"d_model": 16, "heads": 4, "kv_heads": 2, "d_head": 4, "ffn": 16, "layers": 1}
    return build_model(ModelConfig(name=name, options=options, **small | changes), vocab_size=11, seq_len=16)


def tokens(batch, length):
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=str)
def test_an_option_trains_and_decodes(name, options):
    lm = build(name, options).double()
    text = tokens(2, 9)
    full = lm(text)
    full.square().sum().backward()
    for key, parameter in lm.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
    state, logits = None, []
    for t in range(9):
        step, state = lm(text[:, t : t + 1], state, return_state=True)
        logits.append(step)
    torch.testing.assert_close(torch.cat(logits, 1), full, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, mixer in MIXERS.items() if "scan" in mixer.impls])
def test_the_associative_scan_trains_the_same_model(name):
    gradients = []
    for impl in ("chunk", "scan"):
        lm = build(name, {}, impl=impl, chunk_size=4).double()
        lm(tokens(2, 9)).square().sum().backward()
        gradients.append({key: p.grad for key, p in lm.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_autocast_keeps_states_in_float32(name):
    lm = build(name, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, state = lm(tokens(2, 9), return_state=True)
        logits.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in lm.parameters())
    if name != "softmax":  # its state is a cache of keys and values
        form = state.layers[0].form
        assert {x.dtype for x in form if isinstance(x, torch.Tensor)} <= {torch.float32}


def test_the_selective_decay_starts_between_one_token_and_a_thousand():
    torch.manual_seed(0)
    gate = SelectiveDecay(16, 512)
    log_decay = gate(torch.zeros(1, 1, 16))
    assert log_decay.dtype == torch.float32
    assert log_decay.max() < -1e-3 * 0.99
    assert log_decay.min() > -1.6 * 1.01
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gate(torch.zeros(1, 1, 16)), log_decay)
