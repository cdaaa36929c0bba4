"""Running a mixer through its operator: Blelloch over the tokens of a chunk, and over the chunk summaries.

States of tokens exist for one chunk at a time, so memory is that of T / C summaries; the backward recomputes
each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn_cli.kernels.layout import choose_chunk_size
from linattn_cli.kernels.monoids.base import Monoid
from linattn_cli.kernels.monoids.blelloch import exclusive_scan, inclusive_scan, reduce


def scan_tokens(
    monoid: Monoid,
    inputs: Sequence[Tensor | None],
    *,
    token: Callable[..., Any],
    read: Callable[..., Tensor],
    initial: Any = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Any]:
    """Outputs of every token and the summary of all of them.

    inputs      tensors `[B, T, ...]` (or None), handed to `token` and `read` a chunk at a time
    token       `token(*inputs) -> element`, one summary a token
    read        `read(element, *inputs) -> [B, C, ...]`, the output from the state after each token
    initial     element that summarises what came before, length 1 in time
    chunk_size  tokens a chunk; T scans over tokens alone, 1 over summaries alone
    """
    tokens = next(x for x in inputs if x is not None).shape[1]
    size = choose_chunk_size(tokens, chunk_size)
    chunks = [
        tuple(None if x is None else x[:, start : start + size] for x in inputs) for start in range(0, tokens, size)
    ]

    def summarise(*chunk: Tensor | None) -> Any:
        return reduce(monoid, token(*chunk))

    def outputs(*arguments: Any) -> list[Tensor]:
        prefix, chunk = element(*arguments[: len(element._fields)]), arguments[len(element._fields) :]
        return [read(monoid.combine(prefix, inclusive_scan(monoid, token(*chunk))), *chunk)]

    with torch.no_grad():
        element = type(token(*(None if x is None else x[:, :1] for x in inputs)))
    summaries = [_recomputed(summarise, *chunk) for chunk in chunks]
    joined = element(*(torch.cat(fields, dim=1) for fields in zip(*summaries, strict=True)))
    prefixes, total = exclusive_scan(monoid, joined)
    if initial is not None:
        prefixes, total = monoid.combine(initial, prefixes), monoid.combine(initial, total)
    o: list[Tensor] = []
    for index, chunk in enumerate(chunks):
        o += _recomputed(outputs, *(x[:, index : index + 1] for x in prefixes), *chunk)
    return torch.cat(o, dim=1), total


def _recomputed(function: Callable[..., Sequence[Tensor]], *arguments: Tensor | None) -> tuple[Tensor, ...]:
    """The results of `function`, whose backward runs it again: between the two only the arguments are kept.

    `torch.utils.checkpoint` does the same and takes seconds to import on its first call.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments):
        return _Recomputed.apply(function, *arguments)
    return tuple(function(*arguments))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Sequence[Tensor]], *arguments: Tensor | None) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*arguments)
        ctx.set_materialize_grads(False)
        return tuple(function(*arguments))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted = ctx.needs_input_grad[1:]
        arguments = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        first = next(x for x in arguments if x is not None)
        with torch.enable_grad(), torch.autocast(first.device.type, enabled=False):
            results = ctx.function(*arguments)
        reached = [(y, d) for y, d in zip(results, upstream, strict=True) if d is not None and y.requires_grad]
        leaves = [x for x, needed in zip(arguments, wanted, strict=True) if needed and x is not None]
        found = iter(
            torch.autograd.grad([y for y, _ in reached], leaves, [d for _, d in reached], allow_unused=True)
            if reached
            else [None] * len(leaves)
        )
        return None, *(next(found) if needed else None for needed in wanted)
