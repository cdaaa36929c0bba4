"""The kernels of flash-linear-attention as arms: called with what their oracles compute."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from linattn_cli import latency_peers, output
from linattn_cli.kernels.delta.api import delta_scan
from linattn_cli.kernels.linear.api import linear_scan
from linattn_cli.latency import Bench, Plan
from linattn_cli.latency_cases import DECODED, Setting, draw, sdpa_arm
from linattn_cli.latency_gate import Gate
from linattn_cli.roofline import Roof


def setting(mode: str) -> Setting:
    return Setting(1, 2, 16, torch.float64, torch.device("cpu"), mode)


@pytest.mark.parametrize("mode", ["forward", "train", "decode"])
def test_peers_are_called_with_what_their_oracles_compute(monkeypatch, mode):
    """Stand-ins with the signatures of flash-linear-attention 0.6: the wiring is right if the gate passes."""

    def linear(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True):
        assert (scale, normalize, output_final_state) == (1.0, False, True)
        out = linear_scan(q, k, v, initial_state=initial_state)
        return out.o, out.final_state

    def delta(q, k, v, beta, scale=None, initial_state=None, output_final_state=False):
        assert (scale, output_final_state) == (1.0, True)
        out = delta_scan(q, k, k * beta.unsqueeze(-1), v, initial_state=initial_state)
        return out.o, out.final_state

    def solved(q, mass, S, ridge):
        x = torch.linalg.solve(mass + torch.diag_embed(ridge.to(mass.dtype)), q.unsqueeze(-1))
        return (S.mT @ x).squeeze(-1)

    def mesa(q, k, v, g, beta, lamb, output_final_state=False):
        assert (g == 0).all()
        assert (beta == 1).all()
        mass = torch.einsum("bthi,bthj->bthij", k, k).cumsum(1)
        S = torch.einsum("bthi,bthj->bthij", k, v).cumsum(1)
        return solved(q, mass, S, lamb), (mass[:, -1], S[:, -1])

    def mesa_step(q, k, v, g, lamb, beta, prev_h_kk, prev_h_kv):
        mass = prev_h_kk + k.unsqueeze(-1) * k.unsqueeze(-2)
        S = prev_h_kv + k.unsqueeze(-1) * v.unsqueeze(-2)
        return solved(q, mass, S, lamb), mass, S

    functions = {
        "fla.ops.linear_attn": {"chunk_linear_attn": linear, "fused_recurrent_linear_attn": linear},
        "fla.ops.delta_rule": {"chunk_delta_rule": delta, "fused_recurrent_delta_rule": delta},
        "fla.ops.mesa_net": {"chunk_mesa_net": mesa, "mesa_net_decoding_one_step": mesa_step},
    }
    for name, members in functions.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    place = setting(mode)
    makers = (latency_peers._linear, latency_peers._delta, latency_peers._mesa)
    peers = [make(place) for make in makers]
    assert tuple(arm.model for arm in peers) == latency_peers.PEERS
    for arm in peers:
        tensors = draw(arm.names, place, 120 + DECODED)
        assert Gate(place).check(arm, tensors, 120)[0] is None, arm.model


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["vla", "deltanet"], ["fla-delta"]),
        (["hla2"], ["fla-linear"]),
        (["linear", "penalty_gain", "vla"], ["fla-linear", "fla-delta", "fla-mesa"]),
    ],
)
def test_only_the_peers_of_the_models_asked_for_are_timed(monkeypatch, models, expected):
    for name in ("_linear", "_delta", "_mesa"):
        monkeypatch.setattr(latency_peers, name, lambda place, name=name: "fla-" + name[1:])
    monkeypatch.setattr(latency_peers.importlib.util, "find_spec", lambda name: True)
    on_gpu = Setting(1, 2, 16, torch.float32, torch.device("cuda"), "forward")
    assert latency_peers.peer_arms(on_gpu, models) == expected


@pytest.mark.parametrize(
    ("problem", "status"), [(AssertionError("does not support float32"), "not run"), (None, "check failed")]
)
def test_a_peer_that_fails_has_no_time_and_is_no_fault_of_ours(problem, status):
    from linattn_cli.latency import _conclude

    def call(x, state):
        if problem is not None:
            raise problem
        return x["v"] + 1, None

    peer = latency_peers.Arm("fla-delta", "fla", ("v",), call, lambda x, state: x["v"], lambda x: None, peer=True)
    doc = output.Document("latency", quiet=True)
    plan = Plan([sdpa_arm(), peer], [64], setting("forward"), 20, 1.0)
    rows = Bench(plan, Roof(1e10, 1e11), doc).measure(plan.arms, 64)
    _conclude(doc, rows)
    assert [row["status"] for row in rows] == ["ok", status]
    assert rows[1]["latency_ms_p50"] is None
    assert doc.exit_code == 0
