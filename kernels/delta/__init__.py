"""The delta scan: `S_t = g_t S_{t-1} + a_t (v_t - S_{t-1}^T p_t)^T`, `o_t = S_t^T q_t`."""

from linattn_cli.kernels.delta.api import delta_scan

__all__ = ["delta_scan"]
