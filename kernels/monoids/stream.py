"""Running a mixer through its operator: Blelloch over the tokens of a chunk, and over the chunk summaries.

States of tokens exist for one chunk at a time, so memory is that of T / C summaries; the backward recomputes
each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

    def outputs(prefix: Any, *chunk: Tensor | None) -> Tensor:
        return read(monoid.combine(prefix, inclusive_scan(monoid, token(*chunk))), *chunk)

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    summaries = [run(summarise, *chunk) for chunk in chunks]
    element = type(summaries[0])
    joined = element(*(torch.cat(fields, dim=1) for fields in zip(*summaries, strict=True)))
    prefixes, total = exclusive_scan(monoid, joined)
    if initial is not None:
        prefixes, total = monoid.combine(initial, prefixes), monoid.combine(initial, total)
    o = [
        run(outputs, element(*(x[:, index : index + 1] for x in prefixes)), *chunk)
        for index, chunk in enumerate(chunks)
    ]
    return torch.cat(o, dim=1), total
