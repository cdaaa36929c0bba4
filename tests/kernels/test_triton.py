"""The Triton kernels against the serial oracles in float64: on a GPU where there is one, else in the interpreter.

The interpreter is slow, so shapes are small; chunks of 16 give several chunks and super-chunks all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.kernels.on_triton import DEVICE, EPS, kernels_imported

with kernels_imported():
    from linattn_cli.kernels.delta.api import delta_scan
    from linattn_cli.kernels.delta.reference import delta_scan_reference
    from linattn_cli.kernels.delta.triton import _delta_scan, delta_scan_triton
    from linattn_cli.kernels.linear.api import linear_scan
    from linattn_cli.kernels.linear.reference import linear_scan_reference
    from linattn_cli.kernels.linear.triton import _linear_scan, linear_scan_triton
    from linattn_cli.kernels.penalty.api import penalty_gain
    from linattn_cli.kernels.penalty.reference import penalty_gain_reference
    from linattn_cli.kernels.penalty.triton import _penalty_gain, penalty_gain_triton
    from linattn_cli.kernels.ratio_triton import _ratio_readout
    from linattn_cli.kernels.rows_triton import _features
    from linattn_cli.kernels.types import PenaltyState

OPERATORS = {
    "linear": (linear_scan_triton, linear_scan_reference, ("q", "k", "v")),
    "delta": (delta_scan_triton, delta_scan_reference, ("q", "p", "a", "v")),
    "penalty": (penalty_gain_triton, penalty_gain_reference, ("u", "k")),
}


pytestmark = pytest.mark.usefixtures("interpreter")


def draw(*shape: int, unit: bool = False) -> Tensor:
    x = torch.randn(*shape)
    return normalize(x, dim=-1) if unit else x


def scan_tensors(operator: str, B=1, T=37, Q=2, H=2, K=12, V=9, decay="random", initial=True) -> dict[str, Tensor]:
    """Random inputs of a scan by name; `mixed` decays put -50 among mild ones."""
    torch.manual_seed(0)
    tensors = {"q": draw(B, T, Q, K), "v": draw(B, T, H, V)}
    if operator == "linear":
        tensors["k"] = draw(B, T, H, K)
    else:
        tensors |= {"p": draw(B, T, H, K, unit=True), "a": draw(B, T, H, K, unit=True)}
    if decay != "none":
        tensors["log_decay"] = torch.zeros(B, T, H) if decay == "zero" else -0.1 * torch.rand(B, T, H)
    if decay == "mixed":
        tensors["log_decay"][:, 2::5] = -50.0
    if initial:
        tensors["initial_state"] = draw(B, H, K, V)
    return tensors


def outputs(operator: str, triton: bool, dtype: torch.dtype, tensors: dict[str, Tensor], **flags) -> dict[str, Tensor]:
    """Outputs and gradients by name; every floating output gets a fixed random upstream gradient."""
    run = OPERATORS[operator][0 if triton else 1]
    held = {name: x.to(DEVICE, dtype).requires_grad_() for name, x in tensors.items()}
    named = dict(held)
    leading = [named.pop(name) for name in OPERATORS[operator][2]]
    if operator == "penalty":
        flags = {"initial_state": None, "chunk_size": 16, **flags}
        if "mass" in named:
            mass = named.pop("mass")
            eye = torch.eye(mass.shape[-1], dtype=torch.float64, device=DEVICE)
            inverse = torch.linalg.inv(mass.double() + flags["lambda0"] * eye).to(dtype)
            flags["initial_state"] = PenaltyState(mass, inverse, flags.pop("age"))
        x, state = run(*leading, **flags)
        results = {"x": x, "mass": state.mass, "inverse": state.inverse}
    else:
        flags = {"log_decay": None, "initial_state": None, "chunk_size": 16, **named, **flags}
        if operator == "delta":
            flags["return_residual"] = True
        names = ("o", "state", "residual")
        results = dict(zip(names, run(*leading, **flags), strict=False))
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=dtype, device=DEVICE)
    for name, x in results.items():
        upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if name in ("mass", "inverse"):  # these are symmetric, and so is what a caller can ask of them
            upstream = upstream + upstream.mT
        loss = loss + (x * upstream.to(DEVICE, dtype)).sum()
    grads = torch.autograd.grad(loss, list(held.values()))
    results |= {f"d_{name}": grad for name, grad in zip(held, grads, strict=True)}
    return {name: x.detach() for name, x in results.items()}


def check(operator: str, tensors: dict[str, Tensor], **flags) -> None:
    """Errors relative to max|float64|: at most 2 x the serial float32 form's own, plus 4 eps."""
    truth = outputs(operator, False, torch.float64, tensors, **flags)
    serial = outputs(operator, False, torch.float32, tensors, **flags)
    ours = outputs(operator, True, torch.float32, tensors, **flags)
    for name, exact in truth.items():
        assert ours[name].shape == exact.shape, name
        assert ours[name].dtype == torch.float32, name
        if name == "d_mass":  # a mass is symmetric, so only this part of its gradient means anything
            exact, serial[name], ours[name] = (x + x.mT for x in (exact, serial[name], ours[name]))
        scale = exact.abs().max()
        if name == "d_log_decay":  # a cancelling sum (MATH.md section 7)
            q = tensors["q"].to(exact)
            scale = torch.maximum(scale, (q * truth["d_q"]).sum(-1).abs().max())
        error = ((ours[name].double() - exact).abs().max() / scale).item()
        budget = 2 * ((serial[name].double() - exact).abs().max() / scale).item() + 4 * EPS
        assert error <= budget, f"{name}: {error:.2e} > {budget:.2e}"


@pytest.mark.parametrize(("exclusive", "reverse"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_linear_scan(exclusive: bool, reverse: bool, decay: str) -> None:
    check("linear", scan_tensors("linear", decay=decay), exclusive=exclusive, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_delta_scan(reverse: bool, decay: str) -> None:
    check("delta", scan_tensors("delta", decay=decay), reverse=reverse)


@pytest.mark.parametrize("operator", ["linear", "delta"])
def test_grouped_queries(operator: str) -> None:
    flags = {"exclusive": False} if operator == "linear" else {}
    check(operator, scan_tensors(operator, B=2, T=20, Q=4, H=2, initial=False), reverse=False, **flags)


@pytest.mark.parametrize("operator", ["linear", "delta"])
def test_one_token(operator: str) -> None:
    flags = {"exclusive": False} if operator == "linear" else {}
    check(operator, scan_tensors(operator, T=1), reverse=False, **flags)


@pytest.mark.parametrize("operator", ["linear", "delta"])
def test_wide_heads_and_zero_decay(operator: str) -> None:
    flags = {"exclusive": False} if operator == "linear" else {}
    tensors = scan_tensors(operator, T=35, Q=1, H=1, K=131, V=70, decay="zero")
    check(operator, tensors, reverse=False, **flags)


def penalty_tensors(B=1, T=37, Q=2, H=2, K=12, mass=False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {"u": draw(B, T, H, K, unit=True) * K**-0.5, "k": draw(B, T, Q, K, unit=True)}
    if mass:
        half = draw(B, H, K, 2 * K) * (0.3 * K**-0.5)
        tensors["mass"] = half @ half.mT
    return tensors


def test_penalty_gain() -> None:
    check("penalty", penalty_tensors(), lambda0=0.1)


def test_gradients_where_the_penalty_adds_much_mass() -> None:
    """Unit directions over a small lambda0: A shrinks tenfold in a few tokens, and gains need their correction."""
    tensors = penalty_tensors(T=70, Q=4, H=2)
    tensors["u"] *= 12**0.5
    check("penalty", tensors, lambda0=0.1)


def test_penalty_gain_from_a_mass_with_grouped_queries() -> None:
    check("penalty", penalty_tensors(T=20, Q=4, H=1, mass=True), lambda0=0.1, age=64)


def test_a_short_call_starts_from_the_given_inverse() -> None:
    check("penalty", penalty_tensors(T=5, mass=True), lambda0=0.1, age=20)


def test_one_token_starts_from_the_given_inverse_in_one_launch() -> None:
    check("penalty", penalty_tensors(B=2, T=1, Q=4, H=2, mass=True), lambda0=0.1, age=20)


def test_token_by_token_repeated_directions_keep_the_residual_small() -> None:
    """Sixty-four downdates of one inverse: what each loses adds up."""
    torch.manual_seed(0)
    u = draw(3, 12, unit=True).repeat(40, 1).view(1, 120, 1, 12)
    k = draw(1, 120, 1, 12, unit=True)
    state, x = None, []
    for t in range(120):
        now = slice(t, t + 1)
        x_t, state = penalty_gain_triton(
            u[:, now].to(DEVICE), k[:, now].to(DEVICE), lambda0=1e-3, initial_state=state, chunk_size=None
        )
        x.append(x_t)
    serial, _ = penalty_gain_reference(u, k, lambda0=1e-3, initial_state=None)
    worst = [residual(u, k, gains.cpu(), 1e-3) for gains in (torch.cat(x, 1), serial)]
    assert worst[0] <= 2 * worst[1] + 4 * EPS, worst


def residual(u: Tensor, k: Tensor, x: Tensor, lambda0: float) -> float:
    """The largest `|M_t x_t - k_t| / (|M_t| |x_t|)` of one head."""
    wide = u[0, :, 0].double()
    M = lambda0 * torch.eye(u.shape[3], dtype=torch.float64) + (wide.unsqueeze(-1) * wide.unsqueeze(-2)).cumsum(0)
    assert torch.linalg.cond(M[-1]) > 1e4
    solution, right = x[0, :, 0].double(), k[0, :, 0].double()
    left = ((M @ solution.unsqueeze(-1)).squeeze(-1) - right).norm(dim=-1)
    return (left / (torch.linalg.matrix_norm(M, ord=2) * solution.norm(dim=-1))).max().item()


@pytest.mark.parametrize("K", [72, 130])
def test_wide_penalty_gain(K: int) -> None:
    """The one width that needs eight warps, and the one above the registers (library factorisations)."""
    check("penalty", penalty_tensors(T=18, Q=1, H=1, K=K), lambda0=0.1)


def test_repeated_directions_are_judged_by_the_residual() -> None:
    """Three unit directions over and over: cond(M) grows with T, and so does the error of any float32 x."""
    torch.manual_seed(0)
    u = draw(3, 12, unit=True).repeat(40, 1).view(1, 120, 1, 12)
    k = draw(1, 120, 1, 12, unit=True)
    x, _ = penalty_gain_triton(u.to(DEVICE), k.to(DEVICE), lambda0=1e-3, initial_state=None, chunk_size=16)
    assert residual(u, k, x.cpu(), 1e-3) <= 16 * EPS


def test_age_counts_tokens_since_the_inversion() -> None:
    tensors = {name: x.to(DEVICE) for name, x in penalty_tensors(T=40).items()}
    u, k = tensors["u"], tensors["k"]
    state = None
    ages = []
    for begin, end in ((0, 3), (3, 40), (40, 40)):
        if begin == end:
            break
        _, state = penalty_gain_triton(
            u[:, begin:end], k[:, begin:end], lambda0=0.1, initial_state=state, chunk_size=16
        )
        ages.append(state.age)
    assert ages == [0, 37]
    _, state = penalty_gain_triton(u[:, :30], k[:, :30], lambda0=0.1, initial_state=state, chunk_size=16)
    assert state.age == 0


@pytest.mark.parametrize("operator", ["linear", "delta", "penalty"])
def test_a_call_in_two_parts_gives_the_same(operator: str) -> None:
    tensors = penalty_tensors() if operator == "penalty" else scan_tensors(operator)
    leading = [tensors.pop(name).to(DEVICE) for name in OPERATORS[operator][2]]
    run = OPERATORS[operator][0]
    flags: dict = {"chunk_size": 16}
    if operator == "penalty":
        flags |= {"lambda0": 0.1, "initial_state": None}
    else:
        flags |= {"reverse": False, **{name: x.to(DEVICE) for name, x in tensors.items()}}
        flags |= {"exclusive": False} if operator == "linear" else {"return_residual": False}
    whole, state, *_ = run(*leading, **flags)
    parts = []
    for part in (slice(0, 21), slice(21, None)):
        if "log_decay" in tensors:
            flags["log_decay"] = tensors["log_decay"][:, part].to(DEVICE)
        o, flags["initial_state"], *_ = run(*(x[:, part] for x in leading), **flags)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=16 * EPS * whole.abs().max().item())
    last = (flags["initial_state"].inverse, state.inverse) if operator == "penalty" else (flags["initial_state"], state)
    torch.testing.assert_close(*last, rtol=0, atol=32 * EPS * last[1].abs().max().item())


@pytest.mark.parametrize("operator", ["linear", "delta", "penalty"])
def test_two_runs_give_the_same_bits_and_layouts_do_not_matter(operator: str) -> None:
    if operator == "penalty":
        tensors, flags = penalty_tensors(T=20), {"lambda0": 0.1}
    else:
        tensors = scan_tensors(operator, T=20)
        flags = {"reverse": False, **({"exclusive": False} if operator == "linear" else {})}
    first = outputs(operator, True, torch.float32, tensors, **flags)
    strided = {name: torch.stack((x, x), -1)[..., 0] for name, x in tensors.items()}
    second = outputs(operator, True, torch.float32, strided, **flags)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize(
    ("scan", "count"), [(linear_scan, 3), (delta_scan, 4), (partial(penalty_gain, lambda0=1.0), 2)]
)
def test_float64_is_refused_with_the_remedy(scan: Callable[..., Any], count: int) -> None:
    x = torch.zeros(1, 2, 1, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="its kernels have no float64; use impl='chunk'"):
        scan(*[x] * count, impl="triton")


SMALL = {"device": DEVICE, "requires_grad": True}


@pytest.mark.parametrize("name", ["linear", "delta", "penalty", "ratio", "features"])
def test_operators_are_registered_as_torch_expects(name: str) -> None:
    x, v = torch.randn(1, 3, 1, 4, **SMALL), torch.randn(1, 3, 1, 5, **SMALL)
    state, decay = torch.randn(1, 1, 4, 5, **SMALL), torch.full((1, 3, 1), -0.1, **SMALL)
    operator, arguments = {
        "linear": (_linear_scan, (x, x, v, decay, state, False, False, 0)),
        "delta": (_delta_scan, (x, x, x, v, decay, state, False, 0, True, True)),
        "penalty": (_penalty_gain, (x, x, None, None, 0.1, 0)),
        "ratio": (_ratio_readout, (v, x, x, None, 1e-4)),
        "features": (_features, (x, "elu1", True, False)),
    }[name]
    torch.library.opcheck(
        operator, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


def test_compiles_as_one_graph() -> None:
    torch.manual_seed(0)

    def mixer(u: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flags = {"initial_state": None, "chunk_size": 16}
        x, _ = penalty_gain_triton(u, k, lambda0=0.1, **flags)
        scan = {"log_decay": None, "reverse": False, **flags}
        o, _, _ = delta_scan_triton(k, k, normalize(x, dim=-1), v, return_residual=False, **scan)
        return linear_scan_triton(k, k, o, exclusive=False, **scan)[0]

    leaves = [draw(1, 5, 1, 4, unit=True).to(DEVICE).requires_grad_() for _ in range(3)]
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    results = []
    for function in (mixer, compiled):
        o = function(*leaves)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


def test_custom_operators_are_for_those_who_look_on() -> None:
    """Eager calls skip them, in both directions; a trace finds them; a second derivative is refused, not wrong."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = (draw(1, 3, 2, 4).to(DEVICE).requires_grad_() for _ in range(3))
    flags = {"log_decay": None, "initial_state": None, "exclusive": False, "reverse": False, "chunk_size": None}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        o, _ = linear_scan_triton(q, k, v, **flags)
        torch.autograd.grad(o.sum(), (q, k, v))
    assert not [event.key for event in seen.key_averages() if event.key.startswith("linattn::")]
    o, _ = linear_scan_triton(q, k, v, **flags)
    (d_q,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_q.sum().backward()
