"""Jacobians, their products and gradients against dense matrices of the whole state."""

from __future__ import annotations

import pytest
import torch

from linattn_cli import probe_measure
from linattn_cli.config import load_run_config
from linattn_cli.probe_jacobians import Step, acts_on_columns, build_matrix, closed_form, joint_with_penalty
from linattn_cli.probe_measure import measure
from linattn_cli.probe_products import gradient_flow, lengths, matrix_products
from linattn_cli.probe_source import operator_subject
from linattn_cli.probe_states import A, leaves, memory, with_leaves

CPU = torch.device("cpu")
TOKENS = 11

MATRIX = [
    ("linear", {}),
    ("deltanet", {}),
    ("decay_delta", {}),
    ("gated_deltanet", {}),
    ("vla", {}),
    ("vla", {"penalty": "none"}),
    ("vla", {"penalty": "key", "lambda0": 1.0}),
    ("vla", {"normalise_gate": False, "lambda0": 1.0}),
    ("vla", {"beta": "sigmoid", "readout": "raw"}),
    ("rls", {}),
    ("mesa", {}),
]
JOINT = [
    ("hla2", {}),
    ("hla2", {"decay": "mask"}),
    ("hla2", {"state_form": "paper"}),
    ("hla2", {"readout": "ratio", "feature_map": "elu1"}),
    ("ahla", {}),
    ("ahla", {"decay": "cascade"}),
    ("hla3", {}),
    ("hla3", {"decay": "moment"}),
    ("hla3", {"variant": "published"}),
]


def subject(name: str, options: dict | None = None, tokens: int = TOKENS, **model):
    settings = {f"model.options.{key}": value for key, value in (options or {}).items()}
    shape = {"model.heads": 1, "model.d_head": 3} | {f"model.{key}": value for key, value in model.items()}
    config = load_run_config(overrides={"model.name": name} | shape | settings)
    return operator_subject(config, seq_len=tokens, seed=1, device=CPU, dtype=torch.float64)


def dense(exact, start: int, stop: int) -> torch.Tensor:
    """The Jacobian of the memory after tokens start ... stop - 1 in that before, by torch's own jacobian."""
    state = exact.empty() if start == 0 else exact.run(exact.slice(0, start), None, impl="reference").state
    names = memory(state)
    shapes = [leaves(state)[name].shape for name in names]
    sizes = [shape.numel() for shape in shapes]

    def run(flat):
        parts = dict(zip(names, (p.view(s) for p, s in zip(flat.split(sizes), shapes, strict=True)), strict=True))
        after = leaves(exact.run(exact.slice(start, stop), with_leaves(state, parts), impl="reference").state)
        return torch.cat([after[name].flatten() for name in names])

    return torch.autograd.functional.jacobian(run, torch.cat([leaves(state)[name].flatten() for name in names]))


def norm(J: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(J, 2))


def radius(J: torch.Tensor) -> float:
    return float(torch.linalg.eigvals(J).abs().max())


@pytest.mark.parametrize(("name", "options"), MATRIX + JOINT, ids=str)
def test_norms_radii_products_and_gradients_are_those_of_the_dense_jacobian(name, options):
    made = subject(name, options)
    found = measure(made, "chunk")
    j = found.jacobians
    assert j.names == memory(made.exact.empty())
    assert (j.names == ["S"]) == ((name, options) in MATRIX)
    assert j.steps == list(range(1, TOKENS + 1))
    assert j.error < 1e-12
    for step, value, size in zip(j.steps, j.norms[:, 0].tolist(), j.radii[:, 0].tolist(), strict=True):
        J = dense(made.exact, step - 1, step)
        assert value == pytest.approx(norm(J), rel=1e-9), step
        assert size == pytest.approx(radius(J), abs=1e-5), step
    for n in lengths(TOKENS):
        windows = [norm(dense(made.exact, start, start + n)) for start in range(0, TOKENS - n + 1, n)]
        assert 10 ** j.products.largest[n] == pytest.approx(max(windows), rel=3e-3), n
    assert found.flow.error < 1e-9


@pytest.mark.parametrize("name", ["vla", "hla3"])
def test_the_gradient_is_that_of_the_output(name):
    made = subject(name)
    flow = gradient_flow(made.exact, "reference", None)
    exact, w = made.exact, torch.randn(1, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for n in lengths(TOKENS):
        start = TOKENS - n
        state = exact.empty() if start == 0 else exact.run(exact.slice(0, start), None, impl="reference").state
        inputs = [leaves(state)[name].detach().requires_grad_() for name in memory(state)]
        state = with_leaves(state, dict(zip(memory(state), inputs, strict=True)))
        out = exact.run(exact.slice(start, TOKENS), state, impl="reference").o[:, -1]
        grads = torch.autograd.grad((out * w / w.norm()).sum(), inputs)
        size = torch.cat([grad.flatten() for grad in grads]).norm()
        assert flow.norms[n] == pytest.approx(float(size), rel=1e-9), n


def test_vla_is_measured_to_be_the_closed_form_in_float64():
    found = measure(subject("vla", tokens=300, heads=4, d_head=16), "chunk").jacobians
    assert found.closed_error < 1e-12
    assert found.norms.max() > 1.05
    assert found.norms.max() < (1 + 5**0.5) / 2
    assert (found.radii - 1).abs().max() < 1e-12
    torch.testing.assert_close(closed_form(found.cosine), found.norms, rtol=1e-12, atol=0)


def test_without_a_penalty_the_norm_is_one_as_the_paper_says():
    found = measure(subject("vla", {"penalty": "none"}, tokens=50), "chunk").jacobians
    assert (found.norms - 1).abs().max() < 1e-7
    assert found.closed_error < 1e-7


def test_no_closed_form_where_gate_or_strength_are_not_unit_vectors():
    for options in ({"normalise_gate": False}, {"beta": "sigmoid"}):
        found = measure(subject("vla", options), "chunk").jacobians
        assert found.cosine is None
        assert found.closed_error is None


def test_grouped_heads_share_a_joint_jacobian():
    """Two query heads on one key head: their moments are one state."""
    made = subject("hla2", heads=2, kv_heads=1)
    found = measure(made, "chunk").jacobians
    assert found.norms.shape == (TOKENS, 1)
    for step in (1, 6, TOKENS):
        assert float(found.norms[step - 1, 0]) == pytest.approx(norm(dense(made.exact, step - 1, step)), rel=1e-9)


def test_values_narrower_and_wider_than_keys():
    made = subject("vla")
    for width in (1, 2, 7):
        tokens = dict(made.exact.tokens) | {"v": torch.ones(1, TOKENS, 1, width, dtype=torch.float64)}
        exact = type(made.exact)(tokens, made.exact.run)
        before = exact.run(exact.slice(0, 4), None, impl="reference").state
        step = Step(exact, exact.slice(4, 5), before, memory(before))
        assert acts_on_columns(step)
        assert norm(build_matrix(step)[0, 0]) == pytest.approx(norm(dense(exact, 4, 5)), rel=1e-12)


def test_a_and_s_together_in_symmetric_changes_of_a():
    made = subject("vla")
    exact = made.exact
    before = exact.run(exact.slice(0, 6), None, impl="reference").state
    flat = joint_with_penalty(exact, exact.slice(6, 7), before).flat()
    have, K = leaves(before), 3
    # an orthonormal basis of symmetric matrices, so that the norm of what is left is that of the map
    basis = []
    for i in range(K):
        for j in range(i + 1):
            E = torch.zeros(K, K, dtype=torch.float64)
            E[i, j] = E[j, i] = 1.0 if i == j else 0.5**0.5
            basis.append(E.flatten())
    symmetric = torch.block_diag(torch.stack(basis).T, torch.eye(have["S"].numel(), dtype=torch.float64))

    def run(flat):
        parts = {A: flat[: K * K].view_as(have[A]), "S": flat[K * K :].view_as(have["S"])}
        after = leaves(exact.run(exact.slice(6, 7), with_leaves(before, parts), impl="reference").state)
        return torch.cat((after[A].flatten(), after["S"].flatten()))

    J = torch.autograd.functional.jacobian(run, torch.cat((have[A].flatten(), have["S"].flatten())))
    assert float(flat.norm().values) == pytest.approx(norm(symmetric.T @ J @ symmetric), rel=1e-8)
    assert flat.adjoint_error() < 1e-12


def test_products_neither_overflow_nor_vanish():
    J = torch.eye(4, dtype=torch.float64).expand(700, 1, 1, 4, 4)
    assert matrix_products(1e3 * J).largest[700] == pytest.approx(2100)
    assert matrix_products(1e-3 * J).smallest_whole == pytest.approx(-2100)


def test_the_order_of_a_product():
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(13, 1, 1, 3, 3, generator=generator, dtype=torch.float64)
    whole = torch.eye(3, dtype=torch.float64)
    for step in J[:, 0, 0]:
        whole = step @ whole
    found = matrix_products(J)
    assert 10 ** found.largest[13] == pytest.approx(norm(whole), rel=1e-10)
    pairs = [norm(J[i + 1, 0, 0] @ J[i, 0, 0]) for i in range(0, 12, 2)]
    assert 10 ** found.largest[2] == pytest.approx(max(pairs), rel=1e-10)
    assert list(found.largest) == [1, 2, 4, 8, 13]


def test_condition_numbers_of_the_inverse():
    made = subject("rls")
    found = measure(made, "chunk")
    key = torch.nn.functional.normalize(torch.nn.functional.silu(made.exact.tokens["k"]), dim=-1)[0, :, 0]
    mass = torch.eye(3, dtype=torch.float64) + key.T @ key
    assert float(found.condition[-1, 0]) == pytest.approx(float(torch.linalg.cond(mass)), rel=1e-9)


def test_far_too_much_is_refused_before_it_is_measured(monkeypatch):
    from linattn_cli.output import CliError

    monkeypatch.setattr(probe_measure, "MOST_BYTES", 1000)
    with pytest.raises(CliError, match=r"the Jacobians of 11 steps with 1 heads of dimension 3 would take") as error:
        measure(subject("vla"), "chunk")
    assert error.value.exit_code == 4
