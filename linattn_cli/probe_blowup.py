"""Gates that are not normalised, in the setting of the paper's `10^32 after 25 steps`, through the operators.

VLA (arXiv 2605.11196), after Proposition 2: without dividing by norms the gate is `A_t k_t` with a raw key, and the
norm of a step grows as `d_head / lambda0`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.penalty import penalty_gain
from linattn_cli.probe_jacobians import matrix_norm

D_HEAD, LAMBDA0, STEPS = 96, 5.0, 25
DRAWS = 8

PUBLISHED_LOG10 = STEPS * math.log10(D_HEAD / LAMBDA0)
"""The paper's figure: `(d_head / lambda0)^25 = 19.2^25`, the product of the lengths of gate and key."""


@dataclass(frozen=True)
class BlowUp:
    """log10 of the spectral norm of the product of the first n Jacobians, `[25]`, n = 1 ... 25.

    repeated  one raw key of length sqrt(d_head), again and again
    random    keys drawn from N(0, 1), the median of the draws at each n
    """

    repeated: Tensor
    random: Tensor


def blow_up(*, seed: int = 0) -> BlowUp:
    """Measure both: d_head 96, lambda0 5, u = 0, nothing normalised.

    A step is run on the identity in place of the state and with no values, so what it leaves is the product of
    Jacobians. With u = 0 the gate is `k / lambda0`, and for a repeated key the product is `(1 - |k|^2 / lambda0)^n`
    along it: 18.2^25, a little less than the paper's 19.2^25.

    >>> [round(float(x), 2) for x in blow_up().repeated[[0, 24]]]
    [1.26, 31.5]
    """
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(D_HEAD, generator=generator, dtype=torch.float64)
    repeated = (direction * math.sqrt(D_HEAD) / direction.norm()).expand(1, STEPS, 1, D_HEAD)
    random = torch.randn(DRAWS, STEPS, 1, D_HEAD, generator=generator, dtype=torch.float64)
    return BlowUp(_log10_products(repeated)[:, 0], _log10_products(random).median(1).values)


def _log10_products(k: Tensor) -> Tensor:
    """`[25, draws]` for raw keys k `[draws, 25, 1, K]`."""
    gate = penalty_gain(torch.zeros_like(k), k, lambda0=LAMBDA0, impl="reference").o
    state = torch.eye(D_HEAD, dtype=torch.float64).expand(k.shape[0], 1, D_HEAD, D_HEAD)
    norms = []
    for t in range(k.shape[1]):
        now = slice(t, t + 1)
        no_values = torch.zeros_like(k[:, now])
        step = delta_scan(no_values, k[:, now], gate[:, now], no_values, initial_state=state, impl="reference")
        state = step.final_state
        norms.append(matrix_norm(state)[:, 0].log10())
    return torch.stack(norms)
