"""The higher-order forms with every option, each beside its brute-force sum, and how to draw their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from linattn_cli import brute_force
from linattn_cli.kernels.forms.ahla import ahla
from linattn_cli.kernels.forms.hla2 import hla2
from linattn_cli.kernels.forms.hla3 import hla3
from linattn_cli.kernels.types import FormOutput


@dataclass(frozen=True)
class Case:
    """One form with options; `brute` holds the options of its reference sum."""

    name: str
    form: Callable[..., FormOutput]
    sums: Callable[..., Tensor]
    options: dict = field(default_factory=dict)
    brute: dict = field(default_factory=dict)

    @property
    def decayed(self) -> bool:
        return self.options.get("decay", "none") != "none"


def _cases() -> list[Case]:
    cases = []
    for decay in ("none", "moment", "cascade", "mask", "published"):
        cases.append(Case(f"hla2-{decay}", hla2, brute_force.hla2, {"decay": decay}, {"decay": decay}))
    for decay in ("none", "moment", "cascade"):
        options = {"decay": decay, "state_form": "paper"}
        cases.append(Case(f"hla2-paper-{decay}", hla2, brute_force.hla2, options, {"decay": decay}))
    for decay in ("none", "moment"):
        options = {"decay": decay, "masked": False}
        cases.append(Case(f"hla2-unmasked-{decay}", hla2, brute_force.hla2, options, options))
    for decay, masked in (
        ("none", True),
        ("moment", True),
        ("mask", True),
        ("published", True),
        ("moment", False),
    ):
        options = {"decay": decay, "masked": masked, "ridge": 0.4}
        name = f"hla2-ridge-{decay}" + ("" if masked else "-unmasked")
        cases.append(Case(name, hla2, brute_force.hla2, options, options))
    cases.append(
        Case("hla2-paper-ridge", hla2, brute_force.hla2, {"state_form": "paper", "ridge": 0.4}, {"ridge": 0.4})
    )
    cases.append(Case("ahla-none", ahla, brute_force.ahla))
    cases.append(Case("ahla-cascade", ahla, brute_force.ahla, {"decay": "cascade"}))
    for variant, decays in (
        ("causal", ("none", "moment", "cascade", "mask")),
        ("published", ("none", "moment")),
    ):
        for decay in decays:
            options = {"variant": variant, "decay": decay}
            cases.append(Case(f"hla3-{variant}-{decay}", hla3, brute_force.hla3, options, options))
    return cases


CASES = {case.name: case for case in _cases()}


def draw(case: Case, tokens: int, *, seed: int = 0, dtype=torch.float64, heads=(2, 2), dims=(3, 4), scale=1.0) -> dict:
    """q, k, v and, where the case decays, log_decay."""
    generator = torch.Generator().manual_seed(seed)
    (query_heads, kv_heads), (key_dim, value_dim) = heads, dims
    inputs = {
        "q": scale * torch.randn(2, tokens, query_heads, key_dim, generator=generator, dtype=torch.float64),
        "k": scale * torch.randn(2, tokens, kv_heads, key_dim, generator=generator, dtype=torch.float64),
        "v": torch.randn(2, tokens, kv_heads, value_dim, generator=generator, dtype=torch.float64),
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if case.decayed:
        log_decay = -0.3 * torch.rand(2, tokens, kv_heads, generator=generator, dtype=torch.float64)
        log_decay[:, ::4] = 0.0
        log_decay[:, 5::7] = -50.0
        inputs["log_decay"] = log_decay.to(dtype)
    return inputs


def span(inputs: dict, start: int, stop: int) -> dict:
    return {name: x[:, start:stop] for name, x in inputs.items()}


def expected(case: Case, inputs: dict, readout: str = "raw") -> Tensor:
    """The brute-force output, key and value heads repeated for their groups."""
    groups = inputs["q"].shape[2] // inputs["k"].shape[2]
    full = {name: x if name == "q" else x.repeat_interleave(groups, dim=2) for name, x in inputs.items()}
    log_decay = {"log_decay": full["log_decay"]} if case.decayed else {}
    q, k, v = full["q"], full["k"], full["v"]
    o = case.sums(q, k, v, **log_decay, **case.brute)
    if readout == "raw":
        return o
    return o / case.sums(q, k, torch.ones_like(v[..., :1]), **log_decay, **case.brute)
