"""Every mixer of the registry as a drop-in layer in the backbone."""

from __future__ import annotations

import importlib

import pytest
import torch

from linattn_cli.kernels.registry import MIXERS
from linattn_cli.layers.conv import ShortConv
from linattn_cli.model import build_mixer, build_model
from linattn_cli.settings import ModelConfig

T, VOCABULARY = 13, 20


def config(name, **changes):
    small = {"d_model": 32, "heads": 4, "d_head": 8, "ffn": 32, "max_positions": 64, "short_conv": 3}
    return ModelConfig(name=name, **small | changes)


def model(name, **changes):
    torch.manual_seed(0)
    return build_model(config(name, **changes), vocab_size=VOCABULARY, seq_len=16).double()


def tokens(batch, length, seed=0):
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("name", MIXERS)
def test_decoding_and_padding(name, kv_heads, positions):
    """Token by token equals the full forward; padding left and right changes nothing, nor what comes after."""
    lm = model(name, kv_heads=kv_heads, positions=positions)
    text = tokens(2, T)
    full = lm(text)
    state, logits = None, []
    for t in range(T):
        step, state = lm(text[:, t : t + 1], state, return_state=True)
        logits.append(step)
    torch.testing.assert_close(torch.cat(logits, 1), full, rtol=1e-8, atol=1e-9)

    mask = torch.ones(2, T + 3, dtype=torch.bool)
    mask[0, :3] = False
    mask[1, -3:] = False
    padded = tokens(2, T + 3, seed=1)
    padded[mask] = text.flatten()
    got, padded_state = lm(padded, None, True, mask)
    torch.testing.assert_close(got[0, 3:], full[0], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(got[1, :-3], full[1], rtol=1e-8, atol=1e-9)
    following = tokens(2, 2, seed=2)
    torch.testing.assert_close(lm(following, padded_state), lm(following, state), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", MIXERS)
def test_every_parameter_learns(name):
    lm = model(name)
    lm(tokens(2, T)).square().sum().backward()
    for key, parameter in lm.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().max() > 0 or key.startswith("positions"), key


@pytest.mark.parametrize("name", MIXERS)
def test_the_backbone_leaves_a_mixers_initialisation_alone(name):
    torch.manual_seed(7)
    alone = build_mixer(config(name))
    original = ModelConfig.model_fields  # building a mixer must not change the schema
    torch.manual_seed(7)
    seeded = []
    real = importlib.import_module("linattn_cli.model").build_mixer
    with pytest.MonkeyPatch.context() as patch:

        def build(c):
            torch.manual_seed(7)
            seeded.append(real(c))
            return seeded[-1]

        patch.setattr("linattn_cli.model.build_mixer", build)
        lm = build_model(config(name), vocab_size=VOCABULARY, seq_len=16)
    assert ModelConfig.model_fields is original
    for block in lm.blocks:
        for (key, mine), (_, expected) in zip(block.mixer.named_parameters(), alone.named_parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_autocast_trains(name):
    torch.manual_seed(0)
    lm = build_model(config(name), vocab_size=VOCABULARY, seq_len=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(lm(tokens(2, T)).flatten(0, 1), tokens(2, T, 1).flatten())
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in lm.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", MIXERS)
def test_state_bytes_are_those_of_the_state(name):
    lm = model(name, short_conv=0).float()
    _, short = lm(tokens(3, 4), return_state=True)
    _, long = lm(tokens(3, 16), return_state=True)
    assert lm.state_bytes(short) > 0
    if name == "softmax":
        assert lm.state_bytes(long) == 4 * lm.state_bytes(short)
    else:
        assert lm.state_bytes(long) == lm.state_bytes(short)
    if name == "linear":
        assert lm.state_bytes(short) == 2 * 4 * (4 * 8 * 8 + 4 * 8)


@pytest.mark.parametrize("name", MIXERS)
def test_the_jacobian_factors_are_those_of_the_recurrence(name):
    """Autograd's Jacobian of the layer's new state in its old one, where there is a delta or linear recurrence."""
    layer = build_mixer(config(name, short_conv=0)).double()
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    factors = layer.jacobian_factors(x)
    if factors is None:
        return
    log_decay, a, p = factors
    _, state = layer(torch.randn(1, 3, 32, dtype=torch.float64), return_state=True)
    S = state.form.S.detach().requires_grad_()
    changed = state._replace(form=state.form._replace(S=S))
    # k of the new token depends on nothing carried, so dS'/dS acts on every value column alike
    _, after = layer(x, changed, return_state=True)
    if name in ("vla", "rls"):
        # the gain of the new token comes from the carried penalty; take the write the layer used
        expected = None
    else:
        eye = torch.eye(8, dtype=torch.float64).expand(1, 4, 8, 8)
        decay = torch.ones(1, 4, dtype=torch.float64) if log_decay is None else log_decay[:, 0].exp()
        expected = decay[..., None, None] * eye
        if a is not None:
            expected = expected - a[:, 0, :, :, None] * p[:, 0, :, None, :]
    columns = [
        torch.autograd.grad(after.form.S[0, h, i, 0], S, retain_graph=True)[0][0, h, :, 0]
        for h in range(4)
        for i in range(8)
    ]
    jacobian = torch.stack(columns).view(1, 4, 8, 8)
    if expected is not None:
        torch.testing.assert_close(jacobian, expected)
    else:
        rank = torch.linalg.matrix_rank(torch.eye(8, dtype=torch.float64) - jacobian)
        assert rank.max() == 1


def test_the_short_convolution_skips_padding():
    conv = ShortConv(4, 3).double()
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, False, True]])
    got, cache = conv(x, None, mask)
    alone, cache_alone = conv(x[:, mask[0]], None, None)
    torch.testing.assert_close(got[:, mask[0]], alone)
    torch.testing.assert_close(cache, cache_alone)
    impulse = torch.zeros(1, 4, 4, dtype=torch.float64)
    impulse[0, 0] = 1
    torch.testing.assert_close(conv(impulse, None, None)[0][0, :3].mT, conv.weight[:, 0])


@pytest.mark.parametrize("norm", [True, False])
def test_the_output_norm_is_on_or_off_for_every_mixer_alike(norm):
    for name in MIXERS:
        layer = build_mixer(config(name, output_norm=norm))
        assert isinstance(layer.norm, torch.nn.LayerNorm if norm else torch.nn.Identity)


def test_a_tied_head_shares_the_embedding():
    tied, free = model("linear"), model("linear", tied_head=False)
    assert tied.head.weight is tied.embedding.weight
    assert free.parameter_count() - tied.parameter_count() == VOCABULARY * 32


def test_too_long_for_the_learned_positions():
    with pytest.raises(ValueError, match=r"64 learned positions, got a sequence of 65 tokens; train with a larger"):
        model("linear")(tokens(1, 65))


def test_set_impl_reaches_every_layer():
    lm = model("vla")
    text = tokens(1, T)
    chunk = lm(text)
    lm.set_impl("reference")
    assert {block.mixer.impl for block in lm.blocks} == {"reference"}
    torch.testing.assert_close(lm(text), chunk)
    with pytest.raises(ValueError, match="impl must be one of"):
        lm.set_impl("fast")


def test_messages():
    with pytest.raises(ValueError, match="rotary positions need an even d_head, got 7"):
        build_mixer(config("linear", d_head=7, positions="rotary"))
    with pytest.raises(ValueError, match="padding_mask must have shape"):
        build_mixer(config("linear"))(torch.zeros(1, 3, 32), padding_mask=torch.ones(1, 4).bool())
