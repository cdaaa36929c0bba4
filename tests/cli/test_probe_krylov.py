"""Krylov iterations against decompositions of the whole matrix."""

from __future__ import annotations

import pytest
import torch

from linattn_cli.probe_krylov import largest_singular_value, spectral_radius


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def times(matrices):
    return lambda x: (matrices @ x.unsqueeze(-1)).squeeze(-1)


def low_rank(count: int, size: int, rank: int, *, scale: float = 1.0) -> torch.Tensor:
    left, right = normal(count, size, rank, seed=1), normal(count, rank, size, seed=2)
    return torch.eye(size, dtype=torch.float64) - scale * left @ right / size


def test_singular_values_of_any_matrices():
    J = normal(7, 9, 9)
    found = largest_singular_value(times(J), times(J.mT), normal(7, 9, seed=3))
    torch.testing.assert_close(found.values, torch.linalg.svdvals(J)[:, 0], rtol=1e-12, atol=0)


def test_a_perturbation_of_low_rank_needs_few_vectors():
    J = low_rank(5, 200, 2)
    calls = []

    def apply(x):
        calls.append(1)
        return times(J)(x)

    found = largest_singular_value(apply, times(J.mT), normal(5, 200, seed=3))
    torch.testing.assert_close(found.values, torch.linalg.svdvals(J)[:, 0], rtol=1e-12, atol=0)
    assert len(calls) <= 6
    assert found.residuals.max() < 1e-9


def test_the_residual_tells_when_it_was_stopped_too_early():
    J = normal(3, 50, 50)
    found = largest_singular_value(times(J), times(J.mT), normal(3, 50, seed=3), most=2)
    exact = torch.linalg.svdvals(J)[:, 0]
    assert (found.values < exact).all()
    assert (found.residuals > 1e-3).all()


def test_zero_maps_and_identities_do_not_break_it():
    zero, one = torch.zeros(2, 4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    for J, value in ((zero, 0.0), (one, 1.0)):
        found = largest_singular_value(times(J), times(J), normal(2, 4))
        radius = spectral_radius(times(J), normal(2, 4))
        assert found.values.tolist() == pytest.approx([value, value], abs=1e-12)
        assert radius.values.tolist() == pytest.approx([value, value], abs=1e-12)
        assert max(found.residuals.max(), radius.residuals.max()) <= 1e-9


@pytest.mark.parametrize("scale", [0.5, 40.0])
def test_spectral_radii(scale):
    J = low_rank(6, 60, 3, scale=scale)
    found = spectral_radius(times(J), normal(6, 60, seed=3))
    torch.testing.assert_close(found.values, torch.linalg.eigvals(J).abs().amax(-1), rtol=1e-9, atol=0)
    assert found.residuals.max() < 1e-9


def test_an_eigenvalue_that_is_there_twice_without_a_second_vector():
    """A Jordan block, as the steps of higher orders are: the radius is 1 although powers grow."""
    J = torch.eye(6, dtype=torch.float64) + torch.diag(torch.ones(3, dtype=torch.float64), -3)
    found = spectral_radius(times(J), normal(1, 6))
    assert float(found.values) == pytest.approx(1.0, abs=1e-7)
