"""What a model does inside, measured: Jacobians of the state, and how large the state gets.

For a mixer with the delta recurrence `S_t = g_t S_{t-1} + a_t (v_t - S_{t-1}^T p_t)^T` the Jacobian
`dS_t/dS_{t-1}` acts on every column of S as the K x K matrix `J_t = g_t I - a_t p_t^T`; for a linear one it
is `g_t I`. Softmax carries no state of fixed size and has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linattn_cli.evaluation import precision

MAX_SVD_FLOPS = 4e9


@dataclass(frozen=True)
class JacobianNorms:
    """Spectral norms of `J_t` of one layer, `[B, T, H]` float64."""

    layer: str
    norms: Tensor

    @property
    def largest(self) -> float:
        return float(self.norms.max())


def jacobian_norm(log_decay: Tensor | None, a: Tensor | None, p: Tensor | None) -> Tensor:
    """Spectral norm of `J_t = exp(log_decay_t) I - a_t p_t^T`, by singular value decomposition.

    log_decay  `[B, T, H]`, natural log; None is no decay
    a, p       `[B, T, H, K]`, both or neither; neither is a linear recurrence

    Returns `[B, T, H]` float64; `[1, 1, 1]` where all three are None and every step is the identity. Raises
    `ValueError` if only one of a and p is given.

    The norm of `I - a p^T` with unit a and p and `c = a.p` is `(1 + sqrt(5 - 4c)) / 2`, 1 only at c = 1:

    >>> a = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> p = torch.tensor([0.6, 0.8]).view(1, 1, 1, 2)
    >>> round(float(jacobian_norm(None, a, p)), 6), round(float((1 + (5 - 4 * 0.6) ** 0.5) / 2), 6)
    (1.306226, 1.306226)
    """
    if (a is None) != (p is None):
        raise ValueError("jacobian_norm needs a and p together, or neither")
    # On the CPU, also from a GPU: cuSOLVER takes small matrices one at a time.
    decay = None if log_decay is None else log_decay.detach().cpu().double().exp()
    if a is None or p is None:
        return torch.ones(1, 1, 1, dtype=torch.float64) if decay is None else decay
    a, p = a.detach().cpu().double(), p.detach().cpu().double()
    eye = torch.eye(a.shape[-1], dtype=torch.float64)
    scaled = eye if decay is None else decay[..., None, None] * eye
    return torch.linalg.svdvals(scaled - a[..., :, None] * p[..., None, :])[..., 0]


def mixer_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every mixer of a model with its name, first layer first."""
    for name, module in model.named_modules():
        if hasattr(module, "jacobian_factors"):
            yield name, module


def jacobian_norms(model: nn.Module, tokens_BT: Tensor, *, dtype: str = "float32") -> list[JacobianNorms]:
    """Norms of every step of every layer on these tokens, from the tensors the layers really used.

    Layers without a state of fixed size (softmax) have no entry. As many sequences are used as the
    decomposition affords, at least one.
    """
    inputs: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[name] = args[0] if args else kwargs["x_BTD"]

        return hook

    layers = list(mixer_layers(model))
    handles = [m.register_forward_pre_hook(remember(n), with_kwargs=True) for n, m in layers]
    found = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision(tokens_BT.device, dtype):
            model(tokens_BT)
            for name, layer in layers:
                factors = layer.jacobian_factors(inputs[name])
                if factors is None:
                    continue
                log_decay, a, p = factors
                if a is not None and p is not None:
                    rows = max(1, int(MAX_SVD_FLOPS / (20 * a[0].numel() * a.shape[-1] ** 2)))
                    log_decay = None if log_decay is None else log_decay[:rows]
                    a, p = a[:rows], p[:rows]
                found.append(JacobianNorms(name, jacobian_norm(log_decay, a, p)))
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return found


def state_norms(layers: Iterable[Any]) -> dict[str, float]:
    """Largest Frobenius norm over layers, heads and sequences of each matrix that the equations name.

    These are the fields called by a capital letter, and the inverse of the penalty, which is A; what a layer
    keeps beside them (caches, counters, the mass that A is the inverse of) is left out.

    >>> from linattn_cli.kernels.types import PenaltyState
    >>> state_norms([PenaltyState(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2))])
    {'A': 2.0}
    """
    largest: dict[str, float] = {}
    for layer in layers:
        for field, norms in matrix_norms(layer).items():
            name = "A" if field == "inverse" else field
            if name[0].isupper():
                largest[name] = max(largest.get(name, 0.0), float(norms.max()))
    return largest


def matrix_norms(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """Frobenius norm of every matrix of a state, by the name of its field, one entry a matrix.

    >>> from linattn_cli.kernels.types import PenaltyState
    >>> norms = matrix_norms(PenaltyState(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)))
    >>> {name: norm.tolist() for name, norm in norms.items()}
    {'mass': [[0.0]], 'inverse': [[2.0]]}
    """
    if isinstance(state, Tensor):
        # [B, H, K, V]: vectors (z) and counters have fewer dimensions.
        return {prefix: torch.linalg.matrix_norm(state.detach().double())} if state.dim() == 4 else {}
    fields = getattr(state, "_fields", None)
    if fields is not None:
        parts = {name: getattr(state, name) for name in fields}
    elif isinstance(state, (tuple, list)):
        parts = {f"{prefix}{index}": part for index, part in enumerate(state)}
    else:
        return {}
    norms: dict[str, Tensor] = {}
    for name, part in parts.items():
        norms.update(matrix_norms(part, name))
    return norms
