"""Linear attention as a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from linattn_cli.kernels.forms.linear import linear_attention
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Backbone, Mixer
from linattn_cli.layers.gates import zero_decay

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Linear(Mixer):
    """Kernelised linear attention (Katharopoulos et al. 2020); see `linear_attention` for the recurrence."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        feature_map: str = "elu1",
        readout: str = "ratio",
        **backbone: Unpack[Backbone],
    ) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.feature_map, self.readout = feature_map, readout

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            readout=self.readout,
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
        )

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        return zero_decay(x_BTD, self.kv_heads), None, None
