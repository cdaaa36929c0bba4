"""Inputs of the three primitives, and how to run one forward and backward, for the tests that compare forms."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from linattn_cli.compare import Comparison, Scale, budget, compare
from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.penalty import penalty_gain
from linattn_cli.kernels.penalty.inverse import inverse
from linattn_cli.kernels.types import PenaltyState, ScanOutput

CHUNK = 8
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, 37)
DECAYS = ("none", "zero", "strong", "tokens")
LAMBDA0 = 0.3
OPERATORS = ("linear_scan", "delta_scan", "penalty_gain")


@dataclass
class Case:
    """One operator with its tensors (those with a gradient) and its options."""

    operator: str
    tensors: dict[str, Tensor]
    options: dict[str, object] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype) -> Case:
        """The same numbers in another dtype; states stay in the dtype of states."""
        state = torch.float64 if dtype == torch.float64 else torch.float32
        return Case(
            self.operator,
            {n: x.to(state if n in ("state", "root", "log_decay") else dtype) for n, x in self.tensors.items()},
            self.options,
        )


def make(
    operator: str,
    tokens: int,
    *,
    decay: str = "none",
    with_state: bool = False,
    groups: int = 1,
    key_dim: int = 6,
    value_dim: int = 5,
    seed: int = 0,
    alike: bool = False,
    **options: object,
) -> Case:
    """Random float64 inputs with B = H = 2; unit keys, as the mixers pass them.

    `alike` makes the keys positive, as `elu + 1` does: any two of them point nearly the same way.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = heads = 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        x = normal(*shape)
        return torch.nn.functional.normalize(torch.nn.functional.elu(x) + 1 if alike else x, dim=-1)

    keys = (batch, tokens, heads, key_dim)
    queries = (batch, tokens, groups * heads, key_dim)
    if operator == "penalty_gain":
        tensors = {"u": unit(*keys), "k": unit(*queries)}
        if with_state:
            tensors["root"] = normal(batch, heads, key_dim, key_dim)
        return Case(operator, tensors, options)
    names = ("q", "k") if operator == "linear_scan" else ("q", "p", "a")
    tensors = {name: unit(*(queries if name == "q" else keys)) for name in names}
    tensors["v"] = normal(batch, tokens, heads, value_dim)
    if decay != "none":
        uniform = torch.rand(batch, tokens, heads, generator=generator, dtype=torch.float64)
        tensors["log_decay"] = {"zero": 0 * uniform, "strong": 0 * uniform - 50, "tokens": -2 * uniform}[decay]
    if with_state:
        tensors["state"] = normal(batch, heads, key_dim, value_dim)
    return Case(operator, tensors, options)


def call(case: Case, tensors: dict[str, Tensor], impl: str, **more: object) -> ScanOutput:
    """Run the operator of a case on these tensors."""
    options: dict = {"chunk_size": CHUNK, **case.options, **more, "impl": impl}
    x = dict(tensors)
    if case.operator == "penalty_gain":
        lambda0 = options.pop("lambda0", LAMBDA0)
        root = x.pop("root", None)
        if root is not None:
            # the inverse of a carried state is a function of its mass, and its gradient goes that way
            mass = root @ root.mT
            options["initial_state"] = PenaltyState(mass, inverse(mass, lambda0))
        return penalty_gain(x["u"], x["k"], lambda0=lambda0, **options)
    log_decay, state = x.pop("log_decay", None), x.pop("state", None)
    if case.operator == "linear_scan":
        return linear_scan(x["q"], x["k"], x["v"], log_decay=log_decay, initial_state=state, **options)
    return delta_scan(
        x["q"],
        x["p"],
        x["a"],
        x["v"],
        log_decay=log_decay,
        initial_state=state,
        return_residual=True,
        **options,
    )


def values(out: ScanOutput) -> dict[str, Tensor]:
    """The tensors of an output by name."""
    found = {"o": out.o}
    if isinstance(out.final_state, PenaltyState):
        found |= {"mass": out.final_state.mass, "inverse": out.final_state.inverse}
    else:
        found["final_state"] = out.final_state
    if out.residual is not None:
        found["residual"] = out.residual
    return found


def run(case: Case, impl: str, **more: object) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs by name, and the gradient of every tensor under a fixed random upstream on all outputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in case.tensors.items()}
    found = values(call(case, leaves, impl, **more))
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in found.values()
    )
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {n: x.detach() for n, x in found.items()}, dict(zip(leaves, grads, strict=True))


def assert_within_budget(case: Case, dtype: torch.dtype, candidate: str = "chunk", **more: object) -> None:
    """The candidate in `dtype` against the float64 serial form on the same rounded numbers."""
    low = case.cast(dtype)
    exact, exact_grads = run(low.cast(torch.float64), "reference")
    serial, serial_grads = run(low, "reference")
    got, got_grads = run(low, candidate, **more)
    # the gradient of log-decay is a cancelling sum of q.dq: that is what its error is relative to
    decay_scale = None
    if "log_decay" in exact_grads:
        flow = (low.tensors["q"].double() * exact_grads["q"]).sum(-1)
        decay_scale = Scale.of(torch.maximum(flow.abs().max(), exact_grads["log_decay"].abs().max()).view(1))
    for gradient, mine, oracle, low_oracle in (
        (False, got, exact, serial),
        (True, got_grads, exact_grads, serial_grads),
    ):
        for name, expected in oracle.items():
            scale = decay_scale if gradient and name == "log_decay" else None
            found = compare(mine[name], expected, dtype=low_oracle[name].dtype, scale=scale)
            allowed = budget(dtype, _compare_serial(low_oracle[name], expected, scale), gradient=gradient)
            kind = "gradient of " if gradient else ""
            assert allowed.allows(found), f"{kind}{name} in {dtype}: {found}, allowed {allowed}"


def _compare_serial(serial: Tensor, expected: Tensor, scale: Scale | None) -> Comparison:
    return compare(serial, expected, dtype=serial.dtype, scale=scale)
