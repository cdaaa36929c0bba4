"""How an operator of launches is called: bare, as an autograd function, or as the custom operator torch can trace.

A custom operator costs the host 0.1 ms or more a call, forward and backward, which up to 32k tokens is longer than most
of the kernels it launches run. It is what compilation and fake tensors need, and only they get it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn_cli.kernels.launch import compiled_together, rehearses

PLAIN = (Tensor, torch.nn.Parameter)


class Operator:
    """A forward with its custom operator and its gradient.

    forward   makes the launches, of the positional arguments of the custom operator
    traced    that custom operator
    setup     `setup(ctx, inputs, output)`, as for `register_autograd`
    backward  `backward(gradient, ctx, *upstream)`; gradient makes the launches of the backward
    gradient  these launches, and `traced_gradient` the custom operator of them
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        traced: Any,
        setup: Callable[..., None],
        backward: Callable[..., Any],
        gradient: Callable[..., Any],
        traced_gradient: Callable[..., Any],
    ) -> None:
        traced.register_autograd(partial(backward, traced_gradient), setup_context=setup)
        gradient = partial(compiled_together, gradient)
        self.forward, self.traced = partial(compiled_together, forward), traced

        def forward_of_training(*inputs: Any) -> Any:
            output = forward(*inputs)
            if rehearses():
                context = _Rehearsed()
                setup(context, inputs, output)
                backward(gradient, context, *context.upstream(output))
            return output

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:  # type: ignore[override]
                output = compiled_together(forward_of_training, *inputs)
                setup(ctx, inputs, output)
                return output

            @staticmethod
            @once_differentiable
            def backward(ctx: Any, *upstream: Any) -> Any:  # type: ignore[override]
                return backward(gradient, ctx, *upstream)

        self.eager = Eager

    def __call__(self, *inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if traces(tensors):
            return self.traced(*inputs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self.eager.apply(*inputs)
        return self.forward(*inputs)


class _Rehearsed:
    """In the place of autograd's context while a backward is rehearsed behind its forward, for kernels to compile."""

    def __init__(self) -> None:
        self.saved_tensors: tuple[Any, ...] = ()
        self._materialises = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._materialises = value

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def upstream(self, output: Any) -> list[Tensor | None]:
        """Gradients as they mostly come: of the outputs, and none of the states behind them."""
        outputs = output if isinstance(output, tuple) else (output,)
        return [torch.empty_like(x) if self._materialises or i == 0 else None for i, x in enumerate(outputs)]


def traces(tensors: list[Tensor]) -> bool:
    """Whether something looks on: compilation, a forward derivative, or tensors that are not plain memory."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return any(type(x) not in PLAIN for x in tensors)
