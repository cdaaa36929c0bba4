"""The delta-rule layers without a penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from linattn_cli.kernels.forms.deltanet import decay_delta, deltanet
from linattn_cli.kernels.forms.features import feature_map as phi_named
from linattn_cli.kernels.forms.features import unit
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Backbone, Mixer
from linattn_cli.layers.gates import log_sigmoid_decay

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DeltaNet(Mixer):
    """The delta rule with `beta_t = sigmoid(w . x_t)` per head (Yang et al. 2024); see `deltanet`."""

    def __init__(self, d_model: int, heads: int, d_head: int | None = None, **backbone: Unpack[Backbone]) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.beta = nn.Linear(d_model, self.kv_heads, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return deltanet(
            q,
            k,
            v,
            self.beta(x).sigmoid(),
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
        )

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        key = unit(phi_named("silu")(self.project(x_BTD)[1]))
        return None, self.beta(x_BTD).sigmoid().unsqueeze(-1) * key, key


class DecayDelta(Mixer):
    """The delta rule with a forget gate `g_t = sigmoid(w . x_t + b)` per head; see `decay_delta`.

    The bias starts at 4, a gate of 0.982: a state that forgets faster has nothing to learn from.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        feature_map: str = "elu1",
        **backbone: Unpack[Backbone],
    ) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.feature_map = feature_map
        self.forget = nn.Linear(d_model, self.kv_heads)
        nn.init.constant_(self.forget.bias, 4.0)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return decay_delta(
            q,
            k,
            v,
            log_sigmoid_decay(self.forget(x)),
            feature_map=self.feature_map,
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
        )

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        key = unit(phi_named(self.feature_map)(self.project(x_BTD)[1]))
        return log_sigmoid_decay(self.forget(x_BTD)), key, key
