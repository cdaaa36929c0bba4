"""Where a training step stopped being finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn_cli.evaluation import score
from linattn_cli.kernels.types import state_tensors
from linattn_cli.tasks.types import TaskBatch


def first_nonfinite(model: nn.Module, batch: TaskBatch, *, device: torch.device, dtype: str) -> str:
    """Repeat a step on the same weights and name the first tensor that is not finite.

    Looks in the order things happen: parameters, the output of every module, the loss, then the gradients
    from the loss backwards.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}"
    outputs: list[str] = []
    inside: list[str] = []

    def enter(name: str) -> Any:
        return lambda module, inputs: inside.append(name)

    def leave(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            inside.pop()
            # Hooks run as modules end, inner ones first, so the first entry is the innermost culprit.
            if not outputs and not all(_finite(tensor) for tensor in _tensors(output)):
                outputs.append(f"output of {name}")

        return hook

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name or "the model")))
        handles.append(module.register_forward_hook(leave(name or "the model")))
    try:
        model.zero_grad(set_to_none=True)
        loss = score(model, batch, device=device, dtype=dtype).loss()
    except torch.linalg.LinAlgError:
        # A factorisation refuses a matrix that is not finite before its module has an output.
        return outputs[0] if outputs else f"a factorisation inside {inside[-1]}"
    finally:
        for handle in handles:
            handle.remove()
    if outputs:
        return outputs[0]
    if not _finite(loss):
        return "the loss"
    loss.backward()
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"gradient of {name}"
    return "the gradient norm (every gradient is finite, their sum of squares overflows)"


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else state_tensors(output)
