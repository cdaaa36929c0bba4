"""The linear scan: `S_t = g_t S_{t-1} + k_t v_t^T`, `o_t = S_t^T q_t`."""

from linattn_cli.kernels.linear.api import linear_scan

__all__ = ["linear_scan"]
