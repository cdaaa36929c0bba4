"""Errors of `rls` in float32 over a long sequence: of the serial recurrence, token by token, and of the chunk form.

    python benchmarks/rls_long.py [--tokens 131072]

The inputs are those of `linattn verify-scan --models rls --seq-len 131072 --d-head 32 --dtypes float32`, whose budget
is twice the serial error plus four roundings; the chunk form in float64 is the reference. The serial backward goes
piece by piece through the states between pieces: at once it would keep a tape of some 30 GB.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from linattn_cli.kernels.forms.mesa import RlsState, rls
from linattn_cli.kernels.types import PenaltyState
from linattn_cli.verify_cases import Sizes
from linattn_cli.verify_forms import draw
from linattn_cli.verify_mixers import mixer_cases

NAMES = ("q", "k", "v")
PIECE = 1024


def at_once(inputs: list[Tensor], upstream: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, state and gradients of the chunk form."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    out = rls(*leaves, impl="chunk")
    gradients = torch.autograd.grad(out.o, leaves, upstream.to(dtype))
    return named(out.o.detach(), out.state.S.detach(), gradients)


def in_pieces(inputs: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """The same of the serial recurrence in the dtype of the inputs."""
    states: list[RlsState | None] = [None]
    outputs = []
    starts = range(0, inputs[0].shape[1], PIECE)
    with torch.no_grad():
        for start in starts:
            piece = [x[:, start : start + PIECE] for x in inputs]
            out = rls(*piece, impl="reference", initial_state=states[-1])
            states.append(out.state)
            outputs.append(out.o)
    gradients: list[tuple[Tensor, ...]] = []
    behind: tuple[Tensor | None, ...] = (None, None, None)
    for start, state in zip(reversed(starts), reversed(states[:-1]), strict=True):
        leaves = [x[:, start : start + PIECE].clone().requires_grad_() for x in inputs]
        carried, initial = leaf_state(state)
        out = rls(*leaves, impl="reference", initial_state=initial)
        ends = (out.state.S, out.state.penalty.mass, out.state.penalty.inverse)
        pairs = [(end, d) for end, d in zip(ends, behind, strict=True) if d is not None and end.requires_grad]
        results, above = zip((out.o, upstream[:, start : start + PIECE]), *pairs, strict=True)
        found = torch.autograd.grad(results, leaves + carried, above, allow_unused=True)
        gradients.insert(0, found[:3])
        behind = found[3:] if carried else behind
    columns = [torch.cat(column, 1) for column in zip(*gradients, strict=True)]
    return named(torch.cat(outputs, 1), states[-1].S, columns)


def leaf_state(state: RlsState | None) -> tuple[list[Tensor], RlsState | None]:
    """The tensors of a state as leaves, and the state made of them."""
    if state is None:
        return [], None
    S, mass, inverse = (x.detach().requires_grad_() for x in (state.S, state.penalty.mass, state.penalty.inverse))
    return [S, mass, inverse], RlsState(S, PenaltyState(mass, inverse, state.penalty.age))


def named(o: Tensor, S: Tensor, gradients) -> dict[str, Tensor]:
    return {"o": o, "S": S} | {f"grad {name}": x for name, x in zip(NAMES, gradients, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, help=f"a multiple of {PIECE}")
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)  # the tensors of a token are small
    drawn = draw(mixer_cases(["rls"])[0], torch.float32, Sizes(tokens, 32, 32), 0, "cpu")
    inputs = [drawn[name] for name in NAMES]
    upstream = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1))
    exact = at_once(inputs, upstream, torch.float64)
    for form, found in (("chunk", at_once(inputs, upstream, torch.float32)), ("serial", in_pieces(inputs, upstream))):
        for name, expected in exact.items():
            error = found[name].double() - expected
            largest = error.abs().max() / expected.abs().max()
            rms = error.pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
            print(f"{form:7} {name:7} max {largest:.2e}  rms {rms:.2e}", flush=True)


if __name__ == "__main__":
    main()
