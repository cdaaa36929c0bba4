"""Each form of issue A's mixers: composition against serial oracle, masks, splits, options and what they mean."""

from __future__ import annotations

import pytest
import torch

from linattn_cli.compare import FLOAT64_GRADIENTS, FLOAT64_VALUES, budget, compare
from linattn_cli.kernels.forms.deltanet import decay_delta, deltanet
from linattn_cli.kernels.forms.linear import linear_attention
from linattn_cli.kernels.forms.softmax import softmax
from linattn_cli.kernels.forms.vla import vla, vla_directions
from linattn_cli.kernels.types import state_tensors

B, T, H, G, K, V = 2, 21, 2, 2, 6, 5

CASES = {
    "softmax": (softmax, (), {}),
    "linear": (linear_attention, (), {}),
    "linear-raw-silu": (linear_attention, (), {"readout": "raw", "feature_map": "silu"}),
    "deltanet": (deltanet, ("beta",), {}),
    "decay_delta": (decay_delta, ("log_decay",), {}),
    "vla": (vla, ("u",), {}),
    "vla-beta": (vla, ("u", "beta"), {}),
    "vla-key": (vla, (), {"penalty": "key"}),
    "vla-none": (vla, (), {"penalty": "none"}),
    "vla-raw-identity": (vla, ("u",), {"readout": "raw", "feature_map": "identity"}),
    "vla-unnormalised": (vla, ("u",), {"normalise_gate": False, "lambda0": 2.0}),
}


def tensors(extra=(), tokens=T):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    everything = {
        "u": normal(B, tokens, H, K) / K**0.5,
        "beta": normal(B, tokens, H).sigmoid(),
        "log_decay": -torch.nn.functional.softplus(normal(B, tokens, H)),
    }
    qkv = {"q": normal(B, tokens, G * H, K), "k": normal(B, tokens, H, K), "v": normal(B, tokens, H, V)}
    return qkv | {name: everything[name] for name in extra}


def padding():
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :5] = False
    mask[1, -3:] = False
    return mask


def run(form, x, options, impl, mask=None):
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    out = form(**leaves, **options, mask=mask, impl=impl, chunk_size=None if impl == "reference" else 8)
    o = out.o if mask is None else out.o * mask[..., None, None]
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    floats = [s for s in state_tensors(out.state) if s.is_floating_point()]
    grads = torch.autograd.grad(
        (o.double() * weight).sum() + sum(s.double().sum() for s in floats), list(leaves.values())
    )
    return o, floats, dict(zip(leaves, grads, strict=True)), out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_composition_is_the_serial_oracle(name, padded):
    form, extra, options = CASES[name]
    mask = padding() if padded else None
    x = tensors(extra)
    o, state, grads, out = run(form, x, options, "reference", mask)
    got_o, got_state, got_grads, got = run(form, x, options, "chunk", mask)
    assert compare(got_o, o, dtype=o.dtype).max_error < FLOAT64_VALUES
    for mine, expected in zip(got_state, state, strict=True):
        assert compare(mine, expected, dtype=expected.dtype).max_error < FLOAT64_VALUES
    for key, expected in grads.items():
        assert compare(got_grads[key], expected, dtype=expected.dtype).max_error < FLOAT64_GRADIENTS, key
    assert (got.clamped is None) == (out.clamped is None)
    if out.clamped is not None:
        assert int(got.clamped) == int(out.clamped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_low_precision_output(name, dtype):
    form, extra, options = CASES[name]
    x = {n: t.to(torch.float32 if n == "log_decay" else dtype) for n, t in tensors(extra, 64).items()}
    wide = {n: t.double() for n, t in x.items()}
    exact = form(**wide, **options, impl="reference").o
    serial = compare(form(**x, **options, impl="reference").o, exact, dtype=dtype)
    found = compare(form(**x, **options, impl="chunk").o, exact, dtype=dtype)
    assert budget(dtype, serial, gradient=False).allows(found), (found, serial)


@pytest.mark.parametrize("impl", ["reference", "chunk"])
@pytest.mark.parametrize("name", CASES)
def test_decoding_continues_from_the_state(name, impl):
    form, extra, options = CASES[name]
    x, mask = tensors(extra), padding()
    whole = form(**x, **options, mask=mask, impl=impl).o
    state, outputs = None, []
    for piece in (slice(0, 7), *(slice(t, t + 1) for t in range(7, T))):
        part = form(
            **{n: t[:, piece] for n, t in x.items()}, **options, mask=mask[:, piece], impl=impl, initial_state=state
        )
        state = part.state
        outputs.append(part.o)
    real = mask[..., None, None]
    torch.testing.assert_close(torch.cat(outputs, 1) * real, whole * real, rtol=1e-9, atol=1e-11)


def test_padding_equals_leaving_the_tokens_out():
    for form, extra, options in CASES.values():
        x, mask = tensors(extra), padding()
        padded = form(**x, **options, mask=mask).o
        for row, real in enumerate((slice(5, T), slice(0, T - 3))):
            alone = form(**{n: t[row : row + 1, real] for n, t in x.items()}, **options).o
            torch.testing.assert_close(padded[row : row + 1, real], alone)


def test_vla_without_penalty_is_a_delta_rule():
    x = tensors()
    key = torch.nn.functional.normalize(torch.nn.functional.elu(x["k"]) + 1, dim=-1)
    read, write, state = vla_directions(x["k"], None, None, penalty="none")
    assert state is None
    torch.testing.assert_close(read, key)
    torch.testing.assert_close(write, key)


def test_vla_with_zero_directions_is_vla_without_penalty():
    x = tensors(("u",))
    x["u"] *= 0
    with_zero = vla(**x).o
    x.pop("u")
    torch.testing.assert_close(with_zero, vla(**x, penalty="none").o)


def test_vla_write_is_unit_and_the_jacobian_norm_is_the_closed_form():
    """Proposition 2 says 1; it is (1 + sqrt(5 - 4c)) / 2 with c = a.k."""
    x = tensors(("u",))
    key, write, _ = vla_directions(x["k"], x["u"], None)
    torch.testing.assert_close(write.norm(dim=-1), torch.ones(B, T, H, dtype=torch.float64))
    c = (key * write).sum(-1)
    J = torch.eye(K, dtype=torch.float64) - write[..., :, None] * key[..., None, :]
    norm = torch.linalg.matrix_norm(J, 2)
    torch.testing.assert_close(norm, (1 + (5 - 4 * c).sqrt()) / 2)
    assert norm.max() > 1.001


def test_clamped_denominators_are_counted():
    x = tensors()
    signed = linear_attention(**x, feature_map="identity")
    assert 0 < int(signed.clamped) < B * T * G * H
    assert int(linear_attention(**x).clamped) == 0


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda x: vla(**x), "u must be given when penalty='learned', got None"),
        (lambda x: vla(**x, penalty="keys"), "penalty must be one of learned, none, key; got 'keys'"),
        (lambda x: linear_attention(**x, readout="mean"), "readout must be one of ratio, raw; got 'mean'"),
        (lambda x: linear_attention(**x, feature_map="relu"), "feature_map must be one of elu1, silu, identity; got"),
        (lambda x: softmax(**x, impl="triton"), "softmax has no impl 'triton'"),
        (lambda x: softmax(**x, mask=torch.ones(B, T)), "mask must be bool, true at real tokens, got torch.float32"),
        (
            lambda x: deltanet(**x, beta=torch.ones(B, H, T)),
            "beta must have shape [B, T, H] = [2, 21, 2], got [2, 2, 21]; this looks head-first",
        ),
    ],
)
def test_messages(action, message):
    with pytest.raises(ValueError, match=r".") as caught:
        action(tensors())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("impl", ["reference", "chunk"])
def test_padding_leaves_the_gradients_of_vla_finite_in_float16(impl):
    """A padded token has a gain of zero, whose direction has no gradient that float16 could hold."""
    tensors = [torch.randn(B, T, 2, 8, generator=torch.Generator().manual_seed(i)).half() for i in range(4)]
    leaves = [x.requires_grad_() for x in tensors]
    out = vla(*leaves, mask=padding(), impl=impl)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.o.float().sum(), leaves))


@pytest.mark.parametrize("impl", ["reference", "chunk"])
def test_an_unnormalised_gate_writes_more_than_float16_holds(impl):
    """S = v k^T / lambda0 is 50 000 here and its read-out ten times that; the quotient is 5 000."""
    k, v, u = torch.tensor([10.0, 0, 0, 0]), torch.full((4,), 50.0), torch.zeros(4)
    q, k, v, u = (x.half().view(1, 1, 1, 4).requires_grad_() for x in (k, k, v, u))
    out = vla(q, k, v, u, lambda0=1e-3, normalise_gate=False, feature_map="identity", impl=impl)
    torch.testing.assert_close(out.o, torch.full_like(out.o, 5000.0))
    (grad_v,) = torch.autograd.grad(out.o.float().sum(), v)
    torch.testing.assert_close(grad_v, torch.full_like(v, 100.0))
