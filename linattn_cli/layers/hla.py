"""Higher-order linear attention as layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from linattn_cli.kernels.forms.ahla import ahla
from linattn_cli.kernels.forms.hla2 import hla2
from linattn_cli.kernels.forms.hla3 import hla3
from linattn_cli.kernels.types import FormOutput
from linattn_cli.layers.base import Backbone, Mixer
from linattn_cli.layers.decay import SelectiveDecay

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HigherOrder(Mixer):
    """What the three orders share: their form, a forget gate where a decay is asked for, and the scale of queries.

    Queries are divided by sqrt(d_head), so that scores start near 1. Un-normalised outputs grow with the position
    like t^1.5: keep the output norm unless the read-out is a ratio.
    """

    form: Any = None

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        options: dict[str, Any],
        **backbone: Unpack[Backbone],
    ) -> None:
        super().__init__(d_model, heads, d_head, **backbone)
        self.options = options
        self.decay = None if options["decay"] == "none" else SelectiveDecay(d_model, self.kv_heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, mask: Tensor | None, initial_state: Any) -> FormOutput:
        return type(self).form(
            q * self.d_head**-0.5,
            k,
            v,
            log_decay=None if self.decay is None else self.decay(x),
            mask=mask,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            impl=self.impl,
            **self.options,
        )


class HLA2(HigherOrder):
    """Second-order attention (arXiv 2510.27258); see the form `hla2` for the recurrence.

    masked       count a key only for values at or after it
    readout      `raw`, or `ratio` that divides by the same sums with v = 1
    ridge        ridge added to S, >= 0
    decay        forget gate: none, moment, cascade, mask, or the paper's leaking `published`
    state_form   carried state: `summary` (S, H), or the `paper`'s (S, C, G)
    feature_map  of queries and keys: elu1, silu or identity
    backbone     what every layer takes: see `Mixer`

    >>> import torch
    >>> HLA2(d_model=64, heads=4, decay="mask")(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    form = staticmethod(hla2)

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        masked: bool = True,
        readout: str = "raw",
        ridge: float = 0.0,
        decay: str = "none",
        state_form: str = "summary",
        feature_map: str = "identity",
        **backbone: Unpack[Backbone],
    ) -> None:
        options = {
            "masked": masked,
            "readout": readout,
            "ridge": ridge,
            "decay": decay,
            "state_form": state_form,
            "feature_map": feature_map,
        }
        super().__init__(d_model, heads, d_head, options=options, **backbone)


class AHLA(HigherOrder):
    """Asymmetric second-order attention (arXiv 2510.27258); see the form `ahla` for the recurrence.

    readout      `raw`, or `ratio` that divides by the same sums with v = 1
    decay        forget gate on both stages: none or cascade
    feature_map  of queries and keys: elu1, silu or identity
    """

    form = staticmethod(ahla)

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        readout: str = "raw",
        decay: str = "none",
        feature_map: str = "identity",
        **backbone: Unpack[Backbone],
    ) -> None:
        options = {"readout": readout, "decay": decay, "feature_map": feature_map}
        super().__init__(d_model, heads, d_head, options=options, **backbone)


class HLA3(HigherOrder):
    """Third-order attention (arXiv 2510.27258); see the form `hla3` for the recurrences.

    variant      `causal`, or the set that the paper's form sums, `published`
    readout      `raw`, or `ratio` that divides by the same sums with v = 1
    decay        forget gate: none, moment, cascade or mask
    feature_map  of queries and keys: elu1, silu or identity
    """

    form = staticmethod(hla3)

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int | None = None,
        *,
        variant: str = "causal",
        readout: str = "raw",
        decay: str = "none",
        feature_map: str = "identity",
        **backbone: Unpack[Backbone],
    ) -> None:
        options = {"variant": variant, "readout": readout, "decay": decay, "feature_map": feature_map}
        super().__init__(d_model, heads, d_head, options=options, **backbone)
