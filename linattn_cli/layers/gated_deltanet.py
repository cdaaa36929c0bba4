"""The gated delta rule as a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from linattn_cli.kernels.forms.features import feature_map as phi_named
from linattn_cli.kernels.forms.features import unit
from linattn_cli.kernels.forms.gated_deltanet import gated_deltanet
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Backbone, Mixer
from linattn_cli.layers.decay import SelectiveDecay

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GatedDeltaNet(Mixer):
    """The gated delta rule (arXiv 2412.06464) with `beta_t = sigmoid(w . x_t)` per head; see `gated_deltanet`."""

    def __init__(self, d_model: int, heads: int, d_head: int | None = None, **backbone: Unpack[Backbone]) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.beta = nn.Linear(d_model, self.kv_heads, bias=False)
        self.decay = SelectiveDecay(d_model, self.kv_heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return gated_deltanet(
            q,
            k,
            v,
            self.beta(x).sigmoid(),
            self.decay(x),
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
        )

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        key = unit(phi_named("silu")(self.project(x_BTD)[1]))
        log_decay = self.decay(x_BTD)
        read = log_decay.exp().unsqueeze(-1).to(key.dtype) * key
        return log_decay, self.beta(x_BTD).sigmoid().unsqueeze(-1) * key, read
