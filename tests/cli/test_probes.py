"""Jacobian norms are measured, from the tensors a layer uses, and state norms found in nested states."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from linattn_cli.kernels.types import PenaltyState
from linattn_cli.probes import jacobian_norm, jacobian_norms, matrix_norms, state_norms


class State(NamedTuple):
    S: torch.Tensor
    z: torch.Tensor
    penalty: PenaltyState


def unit(*shape, seed):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


def test_the_norm_is_that_of_the_published_closed_form_for_unit_vectors():
    a, p = unit(2, 5, 3, 7, seed=0), unit(2, 5, 3, 7, seed=1)
    c = (a * p).sum(-1)
    torch.testing.assert_close(jacobian_norm(None, a, p), (1 + (5 - 4 * c).sqrt()) / 2, rtol=1e-12, atol=1e-12)


def test_a_step_along_the_key_itself_has_norm_one_and_decay_scales_it():
    k = unit(1, 4, 2, 8, seed=0)
    decay = torch.full((1, 4, 2), -0.5, dtype=torch.float64)
    assert torch.allclose(jacobian_norm(None, k, k), torch.ones(1, 4, 2, dtype=torch.float64))
    scaled = decay.exp()[..., None] * k
    assert torch.allclose(jacobian_norm(decay, k, scaled), decay.exp())


def test_it_is_a_real_derivative():
    """Against autograd of one step of the recurrence, for vectors of any length and a decay."""
    a, p = 3 * unit(1, 1, 1, 4, seed=0), 0.7 * unit(1, 1, 1, 4, seed=1)
    decay = torch.tensor([[[-0.2]]], dtype=torch.float64)
    v = torch.randn(5, dtype=torch.float64)

    def step(state):
        return decay.exp().squeeze() * state + torch.outer(a.flatten(), v - state.T @ p.flatten())

    state = torch.randn(4, 5, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(step, state).reshape(20, 20)
    expected = torch.linalg.matrix_norm(jacobian, 2)
    torch.testing.assert_close(jacobian_norm(decay, a, p).squeeze(), expected)


def test_a_linear_recurrence_has_the_norm_of_its_decay():
    assert jacobian_norm(torch.tensor([[[0.0, -1.0]]]), None, None).tolist() == [
        [[1.0, pytest.approx(0.36788, abs=1e-5)]]
    ]


def test_a_sum_without_decay_is_the_identity():
    assert jacobian_norm(None, None, None).tolist() == [[[1.0]]]


def test_one_of_two_vectors_is_refused():
    with pytest.raises(ValueError, match="needs a and p together, or neither"):
        jacobian_norm(None, torch.ones(1, 1, 1, 2), None)


class Delta(nn.Module):
    def forward(self, x_BTD):
        return 2 * x_BTD

    def jacobian_factors(self, x_BTD):
        a = x_BTD[:, :, None, :].double()
        return None, a, a


class Softmax(nn.Module):
    def forward(self, x_BTD):
        return x_BTD

    def jacobian_factors(self, x_BTD):
        return None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Delta(), Softmax(), Delta()])

    def forward(self, tokens):
        x = tokens[..., None].float().expand(-1, -1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


def test_every_layer_is_probed_on_what_it_was_really_given():
    found = jacobian_norms(Model().train(), torch.tensor([[1, 2]]))
    assert [layer.layer for layer in found] == ["layers.0", "layers.2"]
    # a = p = (x, x): the norm of I - a a^T is max(1, |1 - 2 x^2|), x doubled by the first layer
    assert found[0].norms.flatten().tolist() == pytest.approx([1, 7])
    assert found[1].norms.flatten().tolist() == pytest.approx([7, 31])
    assert found[1].largest == pytest.approx(31)


def test_norms_of_a_nested_state():
    penalty = PenaltyState(torch.zeros(2, 3, 4, 4), torch.eye(4).expand(2, 3, 4, 4))
    state = State(torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4), penalty)
    norms = matrix_norms(state)
    assert {name: tuple(norm.shape) for name, norm in norms.items()} == {
        "S": (2, 3),
        "mass": (2, 3),
        "inverse": (2, 3),
    }
    larger = state._replace(S=2 * state.S)
    assert state_norms([state, larger]) == {"S": pytest.approx(2 * 20**0.5), "A": pytest.approx(2.0)}
