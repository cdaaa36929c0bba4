"""Any legal shape of an operator gives the serial result, finite and in its shape; any other a ValueError by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.penalty import penalty_gain
from linattn_cli.kernels.types import PenaltyState
from tests.fuzz import examples

OPERATORS = ("linear_scan", "delta_scan", "penalty_gain")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
sizes = st.integers(1, 9) | st.sampled_from([16, 17, 31, 33])


@st.composite
def calls(draw, dtypes=DTYPES):
    """An operator, its tensors by name, and its options."""
    operator = draw(st.sampled_from(OPERATORS))
    batch, heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens = draw(st.integers(1, 20) | st.sampled_from([63, 64, 65, 130]))
    key_dim, value_dim = draw(sizes), draw(sizes)
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    strided = draw(st.booleans())

    def tensor(*shape, unit=False):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if unit:
            x = torch.nn.functional.normalize(x, dim=-1)
        x = x.to(dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x

    keys, queries = (batch, tokens, heads, key_dim), (batch, tokens, groups * heads, key_dim)
    options = {"chunk_size": draw(st.none() | st.integers(1, 70))}
    state = torch.float64 if dtype == torch.float64 else torch.float32
    if operator == "penalty_gain":
        options["lambda0"] = draw(st.sampled_from([0.1, 1.0, 3]))
        return operator, {"u": tensor(*keys, unit=True), "k": tensor(*queries, unit=True)}, options
    names = ("k",) if operator == "linear_scan" else ("p", "a")
    tensors = {"q": tensor(*queries, unit=True), **{name: tensor(*keys, unit=True) for name in names}}
    if operator == "delta_scan":
        # I - a p^T must not stretch, or the state grows like a power and float16 rightly overflows
        tensors["a"] = tensors["p"] * draw(st.sampled_from([0.5, 1.0]))
    tensors["v"] = tensor(batch, tokens, heads, value_dim)
    if draw(st.booleans()):
        strength = draw(st.sampled_from([0.0, 1e-3, 2.0, 60.0]))
        options["log_decay"] = -strength * torch.rand(batch, tokens, heads, generator=generator, dtype=torch.float64)
        options["log_decay"] = options["log_decay"].to(state)
    if draw(st.booleans()):
        options["initial_state"] = torch.randn(batch, heads, key_dim, value_dim, generator=generator, dtype=state)
    options["reverse"] = draw(st.booleans())
    if operator == "linear_scan":
        options["exclusive"] = draw(st.booleans())
    else:
        options["return_residual"] = draw(st.booleans())
    return operator, tensors, options


def run(operator, tensors, options, impl):
    function = {"linear_scan": linear_scan, "delta_scan": delta_scan, "penalty_gain": penalty_gain}[operator]
    return function(*tensors.values(), **options, impl=impl)


def parts(out):
    found = {"o": out.o}
    if isinstance(out.final_state, PenaltyState):
        found |= {"mass": out.final_state.mass, "inverse": out.final_state.inverse}
    else:
        found["state"] = out.final_state
    return found | ({"residual": out.residual} if getattr(out, "residual", None) is not None else {})


@examples(150)
@given(call=calls(dtypes=[torch.float64]))
def test_legal_shapes_give_the_serial_result(call):
    operator, tensors, options = call
    chunk, serial = (parts(run(operator, tensors, options, impl)) for impl in ("chunk", "reference"))
    assert chunk.keys() == serial.keys()
    for name, expected in serial.items():
        got = chunk[name]
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        assert bool(torch.isfinite(got).all()), name
        scale = max(expected.abs().max().item(), 1.0)
        assert (got - expected).abs().max().item() <= 1e-9 * scale, name


@examples(120)
@given(call=calls())
def test_legal_calls_of_any_dtype_are_finite_and_in_shape(call):
    operator, tensors, options = call
    found = parts(run(operator, tensors, options, "auto"))
    query = tensors["k" if operator == "penalty_gain" else "q"]
    batch, tokens, heads, width = query.shape
    width = tensors["v"].shape[-1] if "v" in tensors else width
    assert found["o"].shape == (batch, tokens, heads, width)
    assert found["o"].dtype == query.dtype
    for name, tensor in found.items():
        assert bool(torch.isfinite(tensor).all()), name
        if name not in ("o", "residual"):
            assert tensor.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32), name


@st.composite
def broken(draw):
    """A call with one thing wrong, and the words of which the message must have one."""
    operator, tensors, options = draw(calls())
    carried = [key for key, x in options.items() if isinstance(x, torch.Tensor)]
    name = draw(st.sampled_from([*tensors, *carried, "more"]))
    if name == "more":
        wrong = [("chunk_size", bad) for bad in (0, -1, 2.0, True)] + [("impl", bad) for bad in ("chunky", 7, "scan")]
        if operator == "penalty_gain":
            wrong += [("lambda0", bad) for bad in (0, -1.0, float("nan"), float("inf"), "1", None)]
        option, value = draw(st.sampled_from(wrong))
        return operator, tensors, {**options, option: value}, {option}
    where = tensors if name in tensors else options
    x = where[name]
    kind = draw(st.sampled_from(["rank", "unsqueeze", "size", "empty", "dtype", "device", "type"]))
    match kind:
        case "rank":
            y = x[0]
        case "unsqueeze":
            y = x.unsqueeze(-1)
        case "size":
            dim = draw(st.integers(0, x.dim() - 1))
            if dim == 2 and name == ("k" if operator == "penalty_gain" else "q"):
                dim = 3  # more query heads may be right
            grown = list(x.shape)
            grown[dim] = 1009 if dim == 2 else grown[dim] + 1  # a prime: no number of groups makes it right
            if dim == x.dim() - 1 and name == "v" and "initial_state" not in options:
                grown[dim] = 257
            y = torch.zeros(grown, dtype=x.dtype)
        case "empty":
            y = x[:, :0]
        case "dtype":
            y = x.to(draw(st.sampled_from([torch.int64, torch.bool, torch.complex64])))
        case "device":
            y = x.to("meta")
        case "type":
            y = draw(st.sampled_from([x.tolist(), 1.0, "x"]))
    where[name] = y
    return operator, tensors, options, set(tensors) | set(options) | {"K", "V"}


@examples(250)
@given(call=broken())
def test_anything_else_is_a_value_error_that_names_the_argument(call):
    operator, tensors, options, words = call
    impl = options.pop("impl", "auto")
    with pytest.raises(ValueError, match=r".") as caught:
        run(operator, tensors, options, impl)
    message = str(caught.value)
    assert "\n" not in message
    assert any(word in message.replace(",", " ").replace("=", " ").replace(".", " ").split() for word in words), message
