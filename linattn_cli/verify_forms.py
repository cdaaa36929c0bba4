"""The ways to compute an operator that `verify-scan` compares, and running one of them on a case."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels.types import state_dtype
from linattn_cli.verify_cases import Case, Inputs, Sizes

FULL_PRECISION_INPUTS = ("log_decay",)
"""Inputs kept in float32 where the others are in half precision, as the layers pass them."""

STATE_PRECISION = ("state", "residual")
"""Values kept in the state's dtype whatever that of the inputs."""

DECODED = 64
"""Tokens decoded one by one at the end of a sequence too long to decode from its start."""


@dataclass(frozen=True)
class Form:
    """One way to compute an operator.

    name       as given to `--forms`
    impl       implementation asked of the operator
    pieces     `whole`: one call; `split`: two, the state carried; `decode`: one token a call
    over       for `scan`: over `tokens` or over `chunks`
    gradients  whether gradients are checked as well
    """

    name: str
    impl: str
    pieces: str = "whole"
    over: str = "chunks"
    gradients: bool = True

    def matches(self, wanted: str) -> bool:
        """Whether `--forms` means this form: by its name, or by its implementation.

        >>> Form("chunk-split", "chunk", "split").matches("chunk")
        True
        """
        return wanted in (self.name, self.impl)


SERIAL = Form("serial", "reference", gradients=False)
CHUNK = Form("chunk", "chunk")

FORMS: tuple[Form, ...] = (
    SERIAL,
    CHUNK,
    Form("chunk-split", "chunk", "split"),
    Form("chunk-decode", "chunk", "decode", gradients=False),
    Form("scan-tokens", "scan", over="tokens"),
    Form("scan-chunks", "scan"),
    Form("scan-split", "scan", "split"),
    Form("triton", "triton"),
    Form("triton-split", "triton", "split"),
    Form("triton-decode", "triton", "decode", gradients=False),
)


@dataclass(frozen=True)
class Run:
    """Everything a form computed: outputs and final state, then gradients by input name."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def chunk_size_for(tokens: int) -> int:
    """Short enough for several chunks, and never a divisor of T, so that there is a tail.

    >>> chunk_size_for(97), chunk_size_for(128), chunk_size_for(4096), chunk_size_for(1)
    (24, 24, 63, 16)
    """
    size = 16 if tokens <= 64 else 24 if tokens <= 512 else 64
    while size > 3 and tokens >= size and tokens % size == 0:
        size -= 1
    return size


def draw(case: Case, dtype: torch.dtype, sizes: Sizes, seed: int, device: str) -> dict[str, Tensor]:
    """The inputs of a case, in the dtype that the operator receives; the same numbers for every dtype."""
    made = case.inputs(sizes, _generator(f"{seed}/{case.model}/{case.options}/{sizes}"))
    return {
        name: (x.to(input_dtype(name, dtype)) if x.is_floating_point() else x).to(device) for name, x in made.items()
    }


def _generator(label: str) -> torch.Generator:
    """Seeded by a digest of the label: torch keeps only 32 bits of a CPU seed, so they must all count."""
    return torch.Generator().manual_seed(zlib.crc32(label.encode()))


def input_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return state_dtype(dtype) if name.startswith("initial") or name in FULL_PRECISION_INPUTS else dtype


def execute(case: Case, inputs: Inputs, form: Form, *, gradients: bool, seed: int, dtype: torch.dtype) -> Run:
    """Run a form, and differentiate it against a random upstream gradient that depends on names alone.

    dtype  the dtype under test: upstream gradients are rounded to what it gives outputs and states, also in
           the float64 run that judges them
    """
    leaves = {name: x.detach().requires_grad_(gradients and x.is_floating_point()) for name, x in inputs.items()}
    with torch.set_grad_enabled(gradients):
        values = _call_in_pieces(case, leaves, form)
    if not gradients:
        return Run(values, {})
    outputs, upstreams = [], []
    for name, value in values.items():
        if value.requires_grad:
            outputs.append(value)
            upstreams.append(_upstream(name, value, seed, dtype))
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(outputs, list(wanted.values()), upstreams, allow_unused=True)
    return Run({name: x.detach() for name, x in values.items()}, dict(zip(wanted, found, strict=True)))


def _upstream(name: str, value: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(value.shape, generator=_generator(f"{seed}/{name}"), dtype=torch.float64)
    rounded = drawn.to(state_dtype(dtype) if name.startswith(STATE_PRECISION) else dtype)
    return rounded.to(value.dtype).to(value.device)


def _call_in_pieces(case: Case, inputs: Inputs, form: Form) -> dict[str, Tensor]:
    tokens = next(x.shape[1] for name, x in inputs.items() if not name.startswith("initial"))
    size = tokens if form.over == "tokens" else chunk_size_for(tokens)
    spans = list(pairwise(_edges(tokens, form.pieces)))
    state, parts = case.start(inputs), []
    for begin, end in reversed(spans) if case.reverse else spans:
        piece = {name: x if name.startswith("initial") else x[:, begin:end] for name, x in inputs.items()}
        called = case.call(piece, state=state, impl=form.impl, chunk_size=size)
        assert called.impl == form.impl, f"{case.model} ran {called.impl}, {form.impl} was asked for"
        state = called.state
        parts.append(called.values)
    if case.reverse:
        parts.reverse()
    values = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    return values | named_state(state)


def _edges(tokens: int, pieces: str) -> list[int]:
    """Where the calls of a form begin and end.

    >>> _edges(9, "split"), _edges(3, "decode"), _edges(1, "split")
    ([0, 3, 9], [0, 1, 2, 3], [0, 1])
    """
    if pieces == "decode":
        prefix = max(0, tokens - DECODED) if tokens > 4 * DECODED else 0
        return sorted({0, *range(prefix, tokens + 1)})
    return sorted({0, tokens // 3, tokens}) if pieces == "split" else [0, tokens]


def named_state(state: Any, prefix: str = "state") -> dict[str, Tensor]:
    """The tensors of a state by the names of its fields.

    >>> from linattn_cli.kernels.types import PenaltyState
    >>> list(named_state(PenaltyState(torch.zeros(1), torch.zeros(1), 3)))
    ['state.mass', 'state.inverse']
    """
    if isinstance(state, Tensor):
        return {prefix: state} if state.is_floating_point() else {}
    if not isinstance(state, (tuple, list)):
        return {}
    found: dict[str, Tensor] = {}
    for name, part in zip(getattr(state, "_fields", range(len(state))), state, strict=True):
        found |= named_state(part, f"{prefix}.{name}")
    return found
