"""How much of its error budget a nested form uses when its scans run on bfloat16, emulated on the CPU.

    python benchmarks/nested_precision.py [--seq-lens 64,512,4096] [--d-head 64]

Every product's operands are rounded to bfloat16 and summed in float32, chunk by chunk, as the GPU kernels do it,
forward and backward; what one scan hands to the next is bfloat16. Printed is the larger of (largest error /
budget) and (RMS error / budget), the budget being 2 x the error of a float32 run rounded to bfloat16, plus 4 eps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import normalize

from linattn_cli.compare import budget, compare
from linattn_cli.kernels.forms.ahla import ahla
from linattn_cli.kernels.forms.hla2 import hla2
from linattn_cli.kernels.forms.hla3 import hla3

CHUNK = 64
FORMS = {"hla2": hla2, "ahla": ahla, "hla3": hla3}


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def walk(q: Tensor, k: Tensor, v: Tensor, *, reverse: bool = False) -> Tensor:
    """The linear scan of `[H, T, D]` with rounded operands."""
    if reverse:
        return walk(q.flip(1), k.flip(1), v.flip(1)).flip(1)
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2])
    outputs = []
    for q_c, k_c, v_c in zip(*(x.split(CHUNK, dim=1) for x in (q, k, v)), strict=True):
        scores = (q_c @ k_c.mT).tril()
        outputs.append(rounded(scores) @ v_c + q_c @ rounded(S))
        S = S + k_c.mT @ v_c
    return rounded(torch.cat(outputs, dim=1))


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return walk(q, k, v)

    @staticmethod
    def backward(ctx, d_o):
        q, k, v = ctx.saved_tensors
        d_o = rounded(d_o)
        return walk(d_o, v, k), walk(v, d_o, q, reverse=True), walk(k, q, d_o, reverse=True)


def emulated(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scan = Scan.apply
    if name == "ahla":
        return scan(q, k, scan(q, k, v))
    return scan(q, scan(q, k, k), v if name == "hla2" else scan(q, k, v))


def exact(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batched = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return FORMS[name](*batched, impl="chunk").o.squeeze(0).transpose(0, 1)


def draw(kind: str, tokens: int, d_head: int) -> list[Tensor]:
    """q, k, v and an upstream gradient, all representable in bfloat16."""
    torch.manual_seed(0)
    q, k, v, upstream = torch.randn(4, 2, tokens, d_head)
    if kind == "unit":
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    if kind == "positive":
        q, k = q.abs(), k.abs()
    if kind == "eight keys":
        k = k[:, :8].repeat(1, tokens // 8, 1)
    return [rounded(x) for x in (q, k, v, upstream)]


def results(function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    *leaves, upstream = (x.to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, upstream)]


def row(name: str, kind: str, inputs: list[Tensor]) -> dict[str, object]:
    truth = results(lambda *x: exact(name, *x), inputs, torch.float64)
    ours = results(lambda *x: emulated(name, *x), inputs, torch.float32)
    cells: dict[str, object] = {"form": name, "tokens": inputs[0].shape[1], "inputs": kind}
    for label, wanted, found in zip(("o", "dq", "dk", "dv"), truth, ours, strict=True):
        half = torch.bfloat16
        allowed = budget(half, compare(wanted.to(half), wanted, dtype=half), gradient=label != "o")
        error = compare(found.to(half), wanted, dtype=half)
        assert error.max_error is not None, error.problem
        assert error.rms_ratio is not None, error.problem
        cells[label] = max(error.max_error / allowed.max_error, error.rms_ratio / allowed.rms_ratio)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", default="64,512,4096")
    parser.add_argument("--d-head", type=int, default=64)
    options = parser.parse_args()
    rows = [
        row(name, kind, draw(kind, int(tokens), options.d_head))
        for tokens in options.seq_lens.split(",")
        for kind in ("normal", "unit", "positive", "eight keys")
        for name in FORMS
    ]
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()
