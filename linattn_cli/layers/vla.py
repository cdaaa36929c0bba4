"""Variational linear attention as a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from linattn_cli.kernels.forms.features import unit
from linattn_cli.kernels.forms.vla import vla, vla_directions
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Backbone, Mixer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class VLA(Mixer):
    """Variational linear attention (arXiv 2605.11196); see the form `vla` for the recurrence.

    The penalty directions are `u_t = W_u k_t / (|W_u k_t| sqrt(d_head))`, normalised per head, with W_u square
    over all key heads, so that it mixes them, and k the key before its feature map.

    lambda0         ridge of the penalty, > 0
    penalty         directions u: `learned`, `key` (u = k), or `none` (A = I / lambda0)
    normalise_gate  write along a / |a|
    feature_map     of queries and keys: elu1, silu or identity
    readout         `ratio` divides by phi(q).z, `raw` does not
    beta            `sigmoid` is a learned write strength per head, `none` is 1
    backbone        what every layer takes: see `Mixer`

    >>> import torch
    >>> attention = VLA(d_model=64, heads=4)
    >>> x = torch.randn(2, 10, 64)
    >>> y, state = attention(x, return_state=True)
    >>> z, state = attention(torch.randn(2, 1, 64), state, return_state=True)  # the token that follows
    >>> y.shape, z.shape, state.tokens.tolist()
    (torch.Size([2, 10, 64]), torch.Size([2, 1, 64]), [11, 11])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        lambda0: float = 0.1,
        penalty: str = "learned",
        normalise_gate: bool = True,
        feature_map: str = "elu1",
        readout: str = "ratio",
        beta: str = "none",
        **backbone: Unpack[Backbone],
    ) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.options: dict[str, Any] = {
            "lambda0": lambda0,
            "penalty": penalty,
            "normalise_gate": normalise_gate,
            "feature_map": feature_map,
        }
        self.readout = readout
        width = self.kv_heads * self.d_head
        self.direction = nn.Linear(width, width, bias=False) if penalty == "learned" else None
        self.beta = nn.Linear(d_model, self.kv_heads, bias=False) if beta == "sigmoid" else None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return vla(
            q,
            k,
            v,
            self._penalty_direction(k),
            self._write_strength(x),
            readout=self.readout,
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
            **self.options,
        )

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        k = self.project(x_BTD)[1]
        impl = "chunk" if self.impl in ("reference", "scan") else self.impl
        key, write, _ = vla_directions(
            k,
            self._penalty_direction(k),
            self._write_strength(x_BTD),
            chunk_size=self.chunk_size,
            impl=impl,
            **self.options,
        )
        return None, write, key

    def _penalty_direction(self, k: Tensor) -> Tensor | None:
        if self.direction is None:
            return None
        u = self.direction(k.flatten(2)).unflatten(-1, (self.kv_heads, self.d_head))
        return (unit(u, impl=self.impl) * self.d_head**-0.5).to(k.dtype)

    def _write_strength(self, x: Tensor) -> Tensor | None:
        return None if self.beta is None else self.beta(x).sigmoid()
