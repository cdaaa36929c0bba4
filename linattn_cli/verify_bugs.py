"""Planted bugs: known faults in every implementation but the serial one, to prove that the checker fails.

In the primitives they replace an implementation through `dispatch.override`; the associative scans have no
such table, so there the sweeps that `kernels/monoids/stream.py` calls are replaced for the duration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.layout import choose_chunk_size
from linattn_cli.kernels.monoids import stream
from linattn_cli.kernels.registry import PRIMITIVES
from linattn_cli.kernels.types import PenaltyState

BUGS: dict[str, str] = {
    "drop-last-token": "the last token is read but never written",
    "shift-mask": "a token does not see its own write",
    "drop-decay": "the decay is ignored",
    "stale-state": "a carried state is ignored",
    "swap-read-write": "what is read and what is written are exchanged",
    "skip-tail-chunk": "an incomplete last chunk is never computed",
    "low-precision-state": "the state is rounded to bfloat16 between chunks",
}

WRITES = {"linear_scan": 1, "delta_scan": 2, "penalty_gain": 0}
"""Which positional tensor of a primitive is the direction that is written."""

READS = {"linear_scan": 0, "delta_scan": 1, "penalty_gain": 1}
"""Which one is read in its place when the two are exchanged."""


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Run a block with a bug in every implementation that is checked; `ValueError` for an unknown name."""
    if bug not in BUGS:
        raise ValueError(f"inject must be one of {', '.join(BUGS)}; got {bug!r}")
    with ExitStack() as stack:
        for operator, primitive in PRIMITIVES.items():
            for impl in primitive.impls:
                if impl == "reference" or (impl == "triton" and not dispatch.triton_available()):
                    continue
                faulty = _faulty(operator, dispatch.load(operator, impl), bug)
                stack.enter_context(dispatch.override(operator, impl, faulty))
        stack.enter_context(_faulty_scan(bug))
        yield


def _faulty(operator: str, right: Callable[..., tuple], bug: str) -> Callable[..., tuple]:
    """An implementation of a primitive with a bug in it, with the same signature and results."""
    write, read = WRITES[operator], READS[operator]

    def wrong(*tensors: Tensor, **options: Any) -> tuple:
        if bug == "drop-last-token":
            last = 0 if options.get("reverse") else -1
            return right(*_edit(tensors, write, _without_token(tensors[write], last)), **options)
        if bug == "shift-mask":
            return _shifted(operator, right, tensors, options)
        if bug == "drop-decay":
            return right(*tensors, **(options | {"log_decay": None} if "log_decay" in options else options))
        if bug == "stale-state":
            return right(*tensors, **options | {"initial_state": None})
        if bug == "swap-read-write":
            if tensors[read].shape != tensors[write].shape:
                return right(*tensors, **options)
            swapped = _edit(_edit(tensors, write, tensors[read]), read, tensors[write])
            return right(*swapped, **options)
        return _in_chunks(right, tensors, options, bug)

    return wrong


def _edit(tensors: tuple[Tensor, ...], index: int, value: Tensor) -> tuple[Tensor, ...]:
    return (*tensors[:index], value, *tensors[index + 1 :])


def _without_token(x: Tensor, token: int) -> Tensor:
    kept = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    kept[token] = 0
    return x * kept.view(1, -1, 1, 1)


def _shifted(operator: str, right: Callable[..., tuple], tensors: tuple[Tensor, ...], options: dict) -> tuple:
    """The output without the token's own write; states are right, so only the mask is wrong."""
    if operator == "linear_scan":
        return right(*tensors, **options | {"exclusive": True})
    if operator == "penalty_gain":
        results = right(*tensors, **options)
        u, k = tensors
        late = torch.cat((torch.zeros_like(u[:, :1]), u[:, :-1]), dim=1)
        return (right(late, k, **options)[0], *results[1:])
    q, _, a, _ = tensors
    o, state, residual = right(*tensors, **options | {"return_residual": True})
    groups = q.shape[2] // a.shape[2]
    a, residual_per_query = (x.repeat_interleave(groups, dim=2) for x in (a, residual))
    own = (q * a).sum(-1, keepdim=True) * residual_per_query
    return (o - own).to(o.dtype), state, residual


def _in_chunks(right: Callable[..., tuple], tensors: tuple[Tensor, ...], options: dict, bug: str) -> tuple:
    """One call a chunk, the state handed on; the tail left out, or the state rounded on the way."""
    tokens = tensors[0].shape[1]
    size = choose_chunk_size(tokens, options["chunk_size"])
    starts = list(range(0, tokens, size))
    if bug == "skip-tail-chunk" and tokens > size and tokens % size:
        starts.pop()
    reverse = bool(options.get("reverse"))
    log_decay, state = options.get("log_decay"), options["initial_state"]
    parts: dict[int, tuple] = {}
    for start in reversed(starts) if reverse else starts:
        span = slice(start, start + size)
        own = options | {"initial_state": state}
        if log_decay is not None:
            own["log_decay"] = log_decay[:, span]
        o, state, *rest = right(*(x[:, span] for x in tensors), **own)
        if bug == "low-precision-state":
            state = _rounded(state)
        parts[start] = (o, *rest)
    pieces = [parts[start] for start in starts]
    whole = [
        None if column[0] is None else _padded(torch.cat(column, dim=1), tokens) for column in zip(*pieces, strict=True)
    ]
    return (whole[0], state, *whole[1:])


def _padded(x: Tensor, tokens: int) -> Tensor:
    missing = tokens - x.shape[1]
    return torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), dim=1) if missing else x


def _rounded(state: Any) -> Any:
    if isinstance(state, PenaltyState):
        return PenaltyState(_rounded(state.mass), _rounded(state.inverse), state.age)
    return state.to(torch.bfloat16).to(state.dtype)


@contextmanager
def _faulty_scan(bug: str) -> Iterator[None]:
    """The same faults in the sweeps of the associative scans."""
    exclusive, inclusive = stream.exclusive_scan, stream.inclusive_scan

    def identity_at(monoid: Any, elements: Any, dim: int) -> Any:
        """The elements with the last one replaced by the neutral one."""
        length = elements[0].shape[dim]
        neutral = monoid.identity(elements)
        fields = (
            torch.cat((x.narrow(dim, 0, length - 1), e.narrow(dim, length - 1, 1)), dim)
            for x, e in zip(elements, neutral, strict=True)
        )
        return type(elements)(*fields)

    def spoilt(monoid: Any, elements: Any) -> tuple[Any, Any]:
        if bug == "swap-read-write":
            return replace(monoid, combine=lambda A, B: monoid.combine(B, A)), elements
        if bug == "low-precision-state":

            def rounding(A: Any, B: Any) -> Any:
                C = monoid.combine(A, B)
                return type(C)(*(x.to(torch.bfloat16).to(x.dtype) for x in C))

            return replace(monoid, combine=rounding), elements
        if bug == "drop-decay":
            # The decays of an element are its scalars: fields with no matrix dimensions.
            least = min(x.dim() for x in elements)
            most = max(x.dim() for x in elements)
            fields = (torch.ones_like(x) if x.dim() == least < most else x for x in elements)
            return monoid, type(elements)(*fields)
        return monoid, elements

    def wrong_inclusive(monoid: Any, elements: Any, dim: int = 1) -> Any:
        monoid, elements = spoilt(monoid, elements)
        if bug == "drop-last-token":
            elements = identity_at(monoid, elements, dim)
        if bug == "shift-mask":
            return exclusive(monoid, elements, dim)[0]
        return inclusive(monoid, elements, dim)

    def wrong_exclusive(monoid: Any, elements: Any, dim: int = 1) -> tuple[Any, Any]:
        monoid, elements = spoilt(monoid, elements)
        if bug in ("skip-tail-chunk", "drop-last-token"):
            elements = identity_at(monoid, elements, dim)
        prefixes, total = exclusive(monoid, elements, dim)
        return (monoid.identity(elements) if bug == "stale-state" else prefixes), total

    stream.exclusive_scan, stream.inclusive_scan = wrong_exclusive, wrong_inclusive
    try:
        yield
    finally:
        stream.exclusive_scan, stream.inclusive_scan = exclusive, inclusive
