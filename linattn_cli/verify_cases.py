"""What `verify-scan` checks: every primitive, on inputs that are awkward on purpose.

A case makes float64 inputs from a generator and calls an operator with them. Token inputs have time as
dimension 1; inputs named `initial...` have none and enter through `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.delta.api import delta_scan
from linattn_cli.kernels.linear.api import linear_scan
from linattn_cli.kernels.penalty.api import penalty_gain
from linattn_cli.kernels.types import PenaltyState

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shapes of a case: B, T, H, K and V of the legend in `kernels/types.py`."""

    tokens: int
    key_dim: int
    value_dim: int
    batch: int = 2
    heads: int = 2


@dataclass(frozen=True)
class Called:
    """What one call of an operator gave: tensors with time at dimension 1, its state, what ran."""

    values: dict[str, Tensor]
    state: Any
    impl: str


@dataclass(frozen=True)
class Case:
    """One operator with one set of options.

    model    name of the primitive or mixer
    options  what distinguishes the case, shown in the row
    inputs   `inputs(sizes, generator)`: named float64 tensors
    call     `call(inputs, state=, impl=, chunk_size=)`
    start    the initial state from the inputs, None for an empty one
    reverse  whether time runs backwards, so that the last piece of a split call comes first
    cached   whether the state is a cache of inputs, in their dtype, and not a sum in the state's
    judge    replaces errors by residuals where the answer is ill-conditioned: `judge(inputs, values)`
    brute_force  the output as an explicit sum over the inputs, where there is one
    limit    `limit(impl, sizes)`: smaller sizes for an implementation that does not scale to those asked for
    why_not  `why_not(impl, sizes, device)`: why an implementation cannot run this case, None if it can
    """

    model: str
    options: str
    inputs: Callable[[Sizes, Generator], dict[str, Tensor]]
    call: Callable[..., Called]
    start: Callable[[Inputs], Any] = lambda inputs: None
    reverse: bool = False
    cached: bool = False
    judge: Callable[[Inputs, Inputs], Judgement] | None = None
    brute_force: Callable[[Inputs], Tensor] | None = None
    limit: Callable[[str, Sizes], Sizes] = lambda impl, sizes: sizes
    why_not: Callable[[str, Sizes, str], str | None] = lambda impl, sizes, device: None


@dataclass(frozen=True)
class Judgement:
    """Residuals in place of errors: already relative, and zero where the answer is exact."""

    condition: float
    residuals: dict[str, Tensor]


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def decays(generator: Generator, sizes: Sizes, kind: str) -> Tensor:
    """Log-decays [B, T, H]: `smooth` ones depend on the token, `extreme` ones are 0, -0.001 or -50."""
    u = torch.rand(sizes.batch, sizes.tokens, sizes.heads, generator=generator, dtype=torch.float64)
    if kind == "smooth":
        return -0.5 * u
    return torch.where(u < 0.4, 0.0, torch.where(u < 0.9, -1e-3, -50.0)).double()


def _primitive_cannot(operator: str) -> Callable[[str, Sizes, str], str | None]:
    def why_not(impl: str, sizes: Sizes, device: str) -> str | None:
        if impl == "scan":
            return "a primitive has no scan; its operator is checked through the mixers that use it"
        if impl == "triton":
            return dispatch.why_not_triton(operator, torch.empty(0, device=device))
        return None

    return why_not


def _tokens(generator: Generator, sizes: Sizes, dim: int, groups: int = 1) -> Tensor:
    return normal(generator, sizes.batch, sizes.tokens, sizes.heads * groups, dim)


def _initial(generator: Generator, sizes: Sizes, dim: int) -> Tensor:
    return normal(generator, sizes.batch, sizes.heads, sizes.key_dim, dim)


def _linear_case(options: str, *, decay: str = "", carried: bool = False, groups: int = 1, **flags: bool) -> Case:
    def inputs(sizes: Sizes, generator: Generator) -> dict[str, Tensor]:
        made = {
            "q": _tokens(generator, sizes, sizes.key_dim, groups),
            "k": _tokens(generator, sizes, sizes.key_dim),
            "v": _tokens(generator, sizes, sizes.value_dim),
        }
        if decay:
            made["log_decay"] = decays(generator, sizes, decay)
        if carried:
            made["initial_state"] = _initial(generator, sizes, sizes.value_dim)
        return made

    def call(x: Inputs, *, state: Any, impl: str, chunk_size: int | None) -> Called:
        out = linear_scan(
            x["q"],
            x["k"],
            x["v"],
            log_decay=x.get("log_decay"),
            initial_state=state,
            chunk_size=chunk_size,
            impl=impl,
            **flags,
        )
        return Called({"o": out.o}, out.final_state, out.impl)

    start = _carried_state if carried else Case.start
    return Case(
        "linear_scan",
        options,
        inputs,
        call,
        start,
        reverse=flags.get("reverse", False),
        why_not=_primitive_cannot("linear_scan"),
    )


def _delta_case(
    options: str, *, decay: str = "", carried: bool = False, groups: int = 1, reverse: bool = False
) -> Case:
    def inputs(sizes: Sizes, generator: Generator) -> dict[str, Tensor]:
        p = unit(_tokens(generator, sizes, sizes.key_dim))
        # Near p, as a write direction is: the recurrence stays tame at any length.
        a = unit(p + 0.3 * _tokens(generator, sizes, sizes.key_dim))
        made = {
            "q": _tokens(generator, sizes, sizes.key_dim, groups),
            "p": p,
            "a": a,
            "v": _tokens(generator, sizes, sizes.value_dim),
        }
        if decay:
            made["log_decay"] = decays(generator, sizes, decay)
        if carried:
            made["initial_state"] = _initial(generator, sizes, sizes.value_dim)
        return made

    def call(x: Inputs, *, state: Any, impl: str, chunk_size: int | None) -> Called:
        out = delta_scan(
            x["q"],
            x["p"],
            x["a"],
            x["v"],
            log_decay=x.get("log_decay"),
            initial_state=state,
            return_residual=True,
            reverse=reverse,
            chunk_size=chunk_size,
            impl=impl,
        )
        assert out.residual is not None  # it was asked for
        return Called({"o": out.o, "residual": out.residual}, out.final_state, out.impl)

    start = _carried_state if carried else Case.start
    return Case("delta_scan", options, inputs, call, start, reverse=reverse, why_not=_primitive_cannot("delta_scan"))


def _penalty_case(
    options: str, *, lambda0: float = 0.1, carried: bool = False, groups: int = 1, repeated: bool = False
) -> Case:
    def inputs(sizes: Sizes, generator: Generator) -> dict[str, Tensor]:
        u = _tokens(generator, sizes, sizes.key_dim) / sizes.key_dim**0.5
        if repeated:
            keys = unit(normal(generator, sizes.batch, 8, sizes.heads, sizes.key_dim))
            u = keys[:, torch.randint(8, (sizes.tokens,), generator=generator)]
        made = {"u": u, "k": unit(_tokens(generator, sizes, sizes.key_dim, groups))}
        if carried:
            made["initial_directions"] = _initial(generator, sizes, 3)
        return made

    def call(x: Inputs, *, state: Any, impl: str, chunk_size: int | None) -> Called:
        out = penalty_gain(x["u"], x["k"], lambda0=lambda0, initial_state=state, chunk_size=chunk_size, impl=impl)
        return Called({"x": out.o}, out.final_state, out.impl)

    def start(x: Inputs) -> PenaltyState:
        # Built from directions, so that the gradient of a mass, which is symmetric, has one meaning.
        mass = x["initial_directions"] @ x["initial_directions"].mT
        eye = torch.eye(mass.shape[-1], dtype=mass.dtype, device=mass.device)
        return PenaltyState(mass, torch.linalg.inv(lambda0 * eye + mass))

    def judge(x: Inputs, values: Inputs) -> Judgement:
        return _penalty_residuals(x, values, lambda0)

    return Case(
        "penalty_gain",
        options,
        inputs,
        call,
        start if carried else Case.start,
        judge=judge if repeated else None,
        why_not=_primitive_cannot("penalty_gain"),
    )


def _carried_state(inputs: Inputs) -> Tensor:
    return inputs["initial_state"]


def _penalty_residuals(inputs: Inputs, values: Inputs, lambda0: float) -> Judgement:
    """`|M x - k| / (|M| |x|)` of every gain and of the columns of A, and the largest cond(M) seen."""
    u, k, x = (tensor.double() for tensor in (inputs["u"], inputs["k"], values["x"]))
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    mass = lambda0 * eye + torch.einsum("bthi,bthj->bthij", u, u).cumsum(1)
    groups = k.shape[2] // u.shape[2]
    per_query = mass.repeat_interleave(groups, dim=2)
    last, inverse = mass[:, -1], values["state.inverse"].double()
    # Worst where directions are still missing, which is early, or at the end.
    eigenvalues = torch.linalg.eigvalsh(torch.cat((mass[:, :32], mass[:, -1:]), dim=1))
    return Judgement(
        condition=(eigenvalues[..., -1] / eigenvalues[..., 0]).max().item(),
        residuals={
            "x residual": _residual(per_query, x.unsqueeze(-1), k.unsqueeze(-1)),
            "state.inverse residual": _residual(last, inverse, eye),
        },
    )


def _residual(matrix: Tensor, x: Tensor, right: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm(matrix, 2, keepdim=True)
    size = x.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return ((matrix @ x - right).norm(dim=-2, keepdim=True) / (norm * size)).squeeze(-2)


def primitive_cases() -> list[Case]:
    """Every primitive with every argument that changes what it computes."""
    return [
        _linear_case("plain"),
        _linear_case("log_decay, initial_state, grouped", decay="smooth", carried=True, groups=2),
        _linear_case("log_decay 0 and -50", decay="extreme"),
        _linear_case("exclusive, log_decay", decay="smooth", exclusive=True),
        _linear_case("reverse, log_decay", decay="smooth", reverse=True),
        _linear_case(
            "reverse, exclusive, log_decay, initial_state",
            decay="smooth",
            carried=True,
            reverse=True,
            exclusive=True,
        ),
        _delta_case("plain"),
        _delta_case("log_decay, initial_state, grouped", decay="smooth", carried=True, groups=2),
        _delta_case("log_decay 0 and -50", decay="extreme"),
        _delta_case("reverse, log_decay, initial_state", decay="smooth", carried=True, reverse=True),
        _penalty_case("lambda0 0.1"),
        _penalty_case("lambda0 1, initial_state, grouped", lambda0=1.0, carried=True, groups=2),
        _penalty_case("repeated directions, lambda0 0.0001", lambda0=1e-4, repeated=True),
    ]
