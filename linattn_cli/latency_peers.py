"""The kernels of flash-linear-attention as arms, where that package is installed.

They get ready-made features, as our primitives do: what is compared is a kernel with a kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from linattn_cli.kernels.delta.api import delta_scan
from linattn_cli.kernels.linear.api import linear_scan
from linattn_cli.kernels.penalty.api import penalty_gain
from linattn_cli.latency_cases import Arm, Setting, Tensors
from linattn_cli.output import EXIT_DEVICE, CliError

PEERS = ("fla-linear", "fla-delta", "fla-mesa")

DELTA_RULES = {"deltanet", "decay_delta", "gated_deltanet", "vla", "delta_scan"}
INVERSES = {"mesa", "rls", "penalty_gain"}
"""Models whose like among the peers is the delta rule, or mesa; that of all others is linear attention."""

LAMBDA0 = 1.0
"""Ridge of the mesa peer, the default of our `mesa`: its conjugate gradients converge there."""


def peer_arms(setting: Setting, models: Collection[str]) -> list[Arm]:
    """The peers of these models; `CliError` (exit 3) where the package or a GPU is missing.

    A peer takes up to two minutes to choose its kernels, so none is timed that no model is like.
    """
    if importlib.util.find_spec("fla") is None:
        raise _missing("flash-linear-attention is not installed", "pip install flash-linear-attention, or leave it out")
    if setting.device.type != "cuda":
        raise _missing("the kernels of flash-linear-attention need a GPU", "leave --with-fla out on the CPU")
    groups = (set(models) - DELTA_RULES - INVERSES, DELTA_RULES & set(models), INVERSES & set(models))
    makers = (_linear, _delta, _mesa)
    return [make(setting) for make, alike in zip(makers, groups, strict=True) if alike]


def _missing(message: str, hint: str) -> CliError:
    return CliError(f"--with-fla: {message}", hint=hint, exit_code=EXIT_DEVICE, kind="device")


def _linear(setting: Setting) -> Arm:
    from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn

    run = fused_recurrent_linear_attn if setting.mode == "decode" else chunk_linear_attn

    def call(x: Tensors, state: Any) -> tuple[Tensor, Any]:
        return run(
            x["q"], x["k_unit"], x["v"], scale=1.0, initial_state=state, output_final_state=True, normalize=False
        )

    def oracle(x: Tensors, state: Any) -> Tensor:
        return linear_scan(x["q"], x["k_unit"], x["v"], initial_state=state, impl="reference").o

    def prefill(x: Tensors) -> Any:
        return linear_scan(x["q"], x["k_unit"], x["v"]).final_state

    return Arm("fla-linear", "fla", ("q", "k_unit", "v"), call, oracle, prefill, peer=True)


def _delta(setting: Setting) -> Arm:
    from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule

    run = fused_recurrent_delta_rule if setting.mode == "decode" else chunk_delta_rule

    def call(x: Tensors, state: Any) -> tuple[Tensor, Any]:
        return run(x["q"], x["k_unit"], x["v"], x["beta"], scale=1.0, initial_state=state, output_final_state=True)

    def ours(x: Tensors, state: Any, impl: str) -> Any:
        key = x["k_unit"]
        write = (key * x["beta"].unsqueeze(-1)).to(key.dtype)
        return delta_scan(x["q"], key, write, x["v"], initial_state=state, impl=impl)

    return Arm(
        "fla-delta",
        "fla",
        ("q", "k_unit", "v", "beta"),
        call,
        lambda x, state: ours(x, state, "reference").o,
        lambda x: ours(x, None, "auto").final_state,
        peer=True,
    )


def _mesa(setting: Setting) -> Arm:
    from fla.ops.mesa_net import chunk_mesa_net, mesa_net_decoding_one_step

    wide: dict[str, Any] = {"device": setting.device, "dtype": torch.float32}
    ridge = torch.full((setting.heads, setting.d_head), LAMBDA0, **wide)
    constants: dict[int, tuple[Tensor, Tensor]] = {}

    def gates(tokens: int) -> tuple[Tensor, Tensor]:
        """No forgetting and full write strength, made once a length, outside the time of later calls."""
        if tokens not in constants:
            shape = (setting.batch, tokens, setting.heads)
            constants[tokens] = torch.zeros(shape, **wide), torch.ones(shape, **wide)
        return constants[tokens]

    def call(x: Tensors, state: Any) -> tuple[Tensor, Any]:
        q, k, v = x["q_unit"], x["k_unit"], x["v"]
        gate, ones = gates(q.shape[1])
        if state is None:
            return chunk_mesa_net(q, k, v, gate, ones, ridge, output_final_state=True)
        o, *state = mesa_net_decoding_one_step(q[:, 0], k[:, 0], v[:, 0], gate[:, 0], ridge, ones[:, 0], *state)
        return o.unsqueeze(1), tuple(state)

    def oracle(x: Tensors, state: Any) -> Tensor:
        from linattn_cli.kernels.types import PenaltyState

        penalty, S = None, None
        if state is not None:
            mass, S = state
            eye = torch.eye(setting.d_head, dtype=mass.dtype, device=mass.device)
            penalty = PenaltyState(mass, torch.linalg.inv(mass + LAMBDA0 * eye))
        gain = penalty_gain(x["k_unit"], x["q_unit"], lambda0=LAMBDA0, initial_state=penalty, impl="reference").o
        return linear_scan(gain, x["k_unit"], x["v"], initial_state=S, impl="reference").o

    def prefill(x: Tensors) -> Any:
        k = x["k_unit"]
        return linear_scan(k, k, k).final_state, linear_scan(k, k, x["v"]).final_state

    return Arm("fla-mesa", "fla", ("q_unit", "k_unit", "v"), call, oracle, prefill, peer=True)
