"""The penalty gain: `A_t = (lambda0 I + sum_{s<=t} u_s u_s^T)^-1`, `x_t = A_t k_t`."""

from linattn_cli.kernels.penalty.api import penalty_gain

__all__ = ["penalty_gain"]
