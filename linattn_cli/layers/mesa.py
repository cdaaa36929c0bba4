"""Exact online ridge regression as layers: recursive least squares, and the mesa read-out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from linattn_cli.kernels.forms.features import feature_map as phi_named
from linattn_cli.kernels.forms.features import unit
from linattn_cli.kernels.forms.mesa import LAMBDA0, mesa, rls
from linattn_cli.kernels.penalty import penalty_gain
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Backbone, Mixer
from linattn_cli.layers.gates import zero_decay

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Regression(Mixer):
    """What `RLS` and `Mesa` share; the two give the same output through different primitives."""

    form: Any = None

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        lambda0: float = LAMBDA0,
        feature_map: str = "silu",
        **backbone: Unpack[Backbone],
    ) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.lambda0, self.feature_map = lambda0, feature_map

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return type(self).form(
            q,
            k,
            v,
            lambda0=self.lambda0,
            feature_map=self.feature_map,
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
        )


class RLS(Regression):
    """Recursive least squares; see the form `rls` for the recurrence."""

    form = staticmethod(rls)

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        key = unit(phi_named(self.feature_map)(self.project(x_BTD)[1]))
        impl = "chunk" if self.impl in ("reference", "scan") else self.impl
        gain = penalty_gain(key, key, lambda0=self.lambda0, chunk_size=self.chunk_size, impl=impl)
        return None, gain.o, key


class Mesa(Regression):
    """The mesa layer, solved exactly; see the form `mesa` for the recurrence."""

    form = staticmethod(mesa)

    def jacobian_factors(self, x_BTD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        return zero_decay(x_BTD, self.kv_heads), None, None
