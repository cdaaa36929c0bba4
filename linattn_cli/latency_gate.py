"""The check before a timing: the very call that is timed, at its own shape, against the serial recurrence.

By causality the first tokens of a call of any length depend on the first inputs alone, so one serial run of a
short prefix judges every length: outputs, and in training the gradients that a loss on the prefix has. A call
of the prefix alone comes first and is judged to its last token. In `decode` the tokens after the context are
judged from the state that the context left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn_cli.compare import Comparison, Scale, budget, compare, name_of
from linattn_cli.kernels.types import state_dtype, state_tensors
from linattn_cli.latency_cases import DECODED, PREFIX, Arm, Setting, Tensors

Values = dict[str, Tensor]


@dataclass(frozen=True)
class _Truth:
    """The serial recurrence on a prefix: in float64, and in the dtype that is timed."""

    exact: Values
    serial: Values


class Gate:
    """Checks the arms of one setting; serial runs are kept, so that each arm is run once for all lengths."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._truths: dict[tuple[str, int], _Truth] = {}
        self._short: dict[tuple[str, str], str | None] = {}

    def check(self, arm: Arm, tensors: dict[str, Tensor], tokens: int) -> tuple[str | None, str]:
        """What is wrong with an arm at a length, or None; and how much of the call was judged.

        That is `prefix`, after one call of the prefix alone that was judged to its last token; `decoded`; or
        `whole`, where the chunk form in float64 judged all outputs of a kernel, which takes memory that may not
        be there.
        """
        x = {name: tensors[name] for name in arm.names}
        with arm.context():
            if self.setting.mode == "decode":
                return self._decode_problem(arm, x, tokens), "decoded"
            if arm.key not in self._short:
                problem, _ = self._prefix_problem(arm, {name: y[:, :PREFIX].contiguous() for name, y in x.items()})
                self._short[arm.key] = problem and f"in a call of {min(tokens, PREFIX)} tokens, {problem}"
            if (problem := self._short[arm.key]) is not None:
                return problem, "prefix"
            problem, whole = self._prefix_problem(arm, x)
            if problem or arm.impl != "triton" or arm.chunk is None:
                return problem, "prefix"
            try:
                return self._chunk_problem(arm.chunk, x, whole), "whole"
            except torch.OutOfMemoryError:
                return None, "prefix"

    def _prefix_problem(self, arm: Arm, x: Tensors) -> tuple[str | None, Tensor]:
        """What is wrong with the first tokens of a call or not finite in it, and its whole output."""
        prefix = min(x[arm.names[0]].shape[1], PREFIX)
        got, whole = self._run(arm, x, prefix)
        return self._judge(got, self._truth(arm, x, prefix), x) or _not_finite(whole), whole

    def _run(self, arm: Arm, x: Tensors, prefix: int) -> tuple[Values, Tensor]:
        """The values of the prefix, and the whole output, of the call that is timed."""
        if self.setting.mode != "train":
            with torch.no_grad():
                o = arm.call(x, None)[0]
            return {"o": o[:, :prefix]}, o
        leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
        o = arm.call(leaves, None)[0]
        upstream = torch.zeros_like(o)
        upstream[:, :prefix] = _upstream(o[:, :prefix], self.setting.dtype)
        found = torch.autograd.grad(o, list(leaves.values()), upstream, allow_unused=True)
        gradients = _named_gradients(leaves, found)
        return {"o": o.detach()[:, :prefix]} | {n: g[:, :prefix] for n, g in gradients.items()}, o.detach()

    def _truth(self, arm: Arm, x: Tensors, prefix: int) -> _Truth:
        key = arm.model, prefix
        if key not in self._truths:
            low = {name: y[:, :prefix].contiguous() for name, y in x.items()}
            wide = {name: y.double() for name, y in low.items()}
            self._truths[key] = _Truth(self._oracle(arm, wide), self._oracle(arm, low))
        return self._truths[key]

    def _oracle(self, arm: Arm, x: Tensors) -> Values:
        if self.setting.mode != "train":
            with torch.no_grad():
                return {"o": arm.oracle(x, None)}
        leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
        o = arm.oracle(leaves, None)
        found = torch.autograd.grad(o, list(leaves.values()), _upstream(o, self.setting.dtype), allow_unused=True)
        return {"o": o.detach()} | _named_gradients(leaves, found)

    def _decode_problem(self, arm: Arm, x: Tensors, tokens: int) -> str | None:
        with torch.no_grad():
            state = arm.prefill({name: y[:, :tokens] for name, y in x.items()})
            after = {name: y[:, tokens : tokens + DECODED].contiguous() for name, y in x.items()}
            serial = arm.oracle(after, state)
            exact = arm.oracle({name: y.double() for name, y in after.items()}, _double(state))
            outputs, carried = [], state
            for i in range(DECODED):
                o, carried = arm.call({name: y[:, i : i + 1].contiguous() for name, y in after.items()}, carried)
                outputs.append(o)
            got = torch.cat(outputs, dim=1)
        return self._judge({"o": got}, _Truth({"o": exact}, {"o": serial}), after)

    def _judge(self, got: Values, truth: _Truth, x: Tensors) -> str | None:
        for name, exact in truth.exact.items():
            scale = Scale.of(exact)
            if name == "grad log_decay":
                # It is a difference of sums that cancel: relative to what is summed.
                prefix = exact.shape[1]
                terms = Scale.of((x["q"][:, :prefix].double() * truth.exact["grad q"]).sum(-1))
                scale = Scale(max(scale.peak, terms.peak), max(scale.rms, terms.rms))
            dtype = truth.serial[name].dtype
            serial = compare(truth.serial[name], exact, dtype=dtype, scale=scale)
            allowed = budget(self.setting.dtype, serial, gradient=name.startswith("grad"))
            found = compare(got[name], exact, dtype=dtype, scale=scale)
            if not allowed.allows(found):
                return _describe(name, found, allowed.max_error, allowed.rms_ratio, "the serial recurrence in float64")
        return None

    def _chunk_problem(self, chunk: Callable[[Tensors], Tensor], x: Tensors, whole: Tensor) -> str | None:
        """A kernel's whole output against the chunk form in float64, the error of the chunk form as its measure."""
        with torch.no_grad():
            exact = chunk({name: y.double() for name, y in x.items()})
            same = chunk(x)
        scale = Scale.of(exact)
        yardstick = compare(same, exact, dtype=whole.dtype, scale=scale)
        allowed = budget(self.setting.dtype, yardstick, gradient=False)
        found = compare(whole, exact, dtype=whole.dtype, scale=scale)
        if allowed.allows(found):
            return None
        return _describe("o", found, allowed.max_error, allowed.rms_ratio, "the chunk form in float64")


def _describe(name: str, found: Comparison, max_error: float, rms_ratio: float, against: str) -> str:
    if found.problem:
        return f"{name}: {found.problem}"
    errors = f"max error {found.max_error:.2g} (budget {max_error:.2g}), RMS {found.rms_ratio:.2g} ({rms_ratio:.2g})"
    worst = f"worst at {list(found.worst)}: {found.got:.5g}, expected {found.expected:.5g}"
    return f"{name}: {errors} against {against}, {worst}"


def _not_finite(whole: Tensor) -> str | None:
    bad = int((~whole.isfinite()).sum())
    return f"o: {bad} of {whole.numel()} values not finite" if bad else None


def _named_gradients(leaves: Tensors, found: tuple[Tensor | None, ...]) -> Values:
    # No path from an input to the output is a gradient of zero.
    pairs = zip(leaves.items(), found, strict=True)
    return {f"grad {name}": torch.zeros_like(y) if g is None else g for (name, y), g in pairs}


def _upstream(o: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient that arrives at a prefix: the same numbers, of the dtype that is timed, in every precision."""
    generator = torch.Generator(o.device).manual_seed(1)
    drawn = torch.randn(o.shape, generator=generator, device=o.device, dtype=state_dtype(dtype))
    return drawn.to(dtype).to(o.dtype)


def _double(state: Any) -> Any:
    """A state with its tensors in float64, whatever its nesting."""
    if isinstance(state, Tensor):
        return state.double() if state.is_floating_point() else state
    if not isinstance(state, (tuple, list)) or not state_tensors(state):
        return state
    parts = [_double(part) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def describe(setting: Setting) -> str:
    """What the gate checks, in words, for the log."""
    what = {
        "forward": f"outputs of {PREFIX} tokens, alone and at the start of each length",
        "train": f"outputs and gradients of {PREFIX} tokens, alone and at the start of each length",
        "decode": f"{DECODED} tokens decoded after each context",
    }[setting.mode]
    return f"checked first: {what}, {name_of(setting.dtype)} against the serial recurrence in float64"
