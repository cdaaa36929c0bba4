"""Feature maps and the ratio read-out, row by row beside the scans: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from tests.kernels.on_triton import DEVICE, EPS, kernels_imported

with kernels_imported():
    from linattn_cli.kernels.ratio_triton import ratio_readout_triton
    from linattn_cli.kernels.rows_triton import features_triton


pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("name", ["elu1", "silu", "identity"])
def test_features(name: str, unit: bool) -> None:
    from linattn_cli.kernels.forms.features import FEATURE_MAPS

    torch.manual_seed(0)
    x, upstream = torch.randn(2, 3, 2, 11), torch.randn(2, 3, 2, 11)
    x[0, 0, 0] = 0.0
    ours = x.to(DEVICE).requires_grad_()
    y = features_triton(ours, name, unit=unit)
    (d_ours,) = torch.autograd.grad(y, ours, upstream.to(DEVICE))
    wide = x.double().requires_grad_()
    exact = FEATURE_MAPS[name](wide)
    exact = normalize(exact, dim=-1, eps=1e-12) if unit else exact
    (d_exact,) = torch.autograd.grad(exact, wide, upstream.double())
    real = x.abs().sum(-1) > 0 if unit else torch.ones(2, 3, 2, dtype=torch.bool)  # no slope at a zero vector
    torch.testing.assert_close(y.cpu(), exact.float(), rtol=0, atol=4 * EPS * exact.abs().max().item())
    scale = d_exact[real].abs().max().item()
    torch.testing.assert_close(d_ours.cpu()[real], d_exact[real].float(), rtol=0, atol=8 * EPS * scale)


@pytest.mark.parametrize("impl", ["reference", "scan", "chunk", "triton"])
def test_rows_run_where_the_scans_beside_them_do(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`impl="chunk"` on a GPU runs no Triton at all: the implementation decides, not the device."""
    from linattn_cli.kernels import ratio_triton, rows_triton
    from linattn_cli.kernels.forms.vla import vla

    used = []
    for module, name in ((rows_triton, "features_triton"), (ratio_triton, "ratio_readout_triton")):
        function = getattr(module, name)
        noted = lambda *x, _f=function, _n=name, **options: (used.append(_n), _f(*x, **options))[1]  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    q, k, v, u = (torch.randn(1, 5, 2, 4).to(DEVICE) for _ in range(4))
    beta = torch.ones(1, 5, 2, device=DEVICE)  # with it the parts run, not the one fused operator
    vla(q, k, v, u, beta, impl=impl)
    assert set(used) == ({"features_triton", "ratio_readout_triton"} if impl == "triton" else set())


def test_ratio_readout() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, 37, 4, 9),
        torch.randn(1, 37, 4, 12).abs(),
        torch.randn(1, 37, 2, 12).abs(),
        torch.randn(1, 2, 12).abs(),
    ]
    tensors[1][0, 5] = -1.0  # a negative denominator is clamped, and has no gradient
    upstream, d_last = torch.randn(1, 37, 4, 9), torch.randn(1, 2, 12)
    upstream[0, 5] = 0.0  # the quotient there is 1e4 times the others
    results = []
    for dtype in (torch.float32, torch.float64):
        o, q, k, z = (x.to(DEVICE, dtype).requires_grad_() for x in tensors)
        if dtype == torch.float32:
            y, den, last = ratio_readout_triton(o, q, k, z, 1e-4)
            clamped = (den < 1e-4).sum().item()
        else:
            sums = z.unsqueeze(1) + k.cumsum(1)
            den = (q * sums.repeat_interleave(2, dim=2)).sum(-1, keepdim=True)
            y, last = o / den.clamp_min(1e-4), sums[:, -1]
            assert clamped == (den < 1e-4).sum().item() == 4
        loss = (y * upstream.to(DEVICE, dtype)).sum() + (last * d_last.to(DEVICE, dtype)).sum()
        results.append((y, last, *torch.autograd.grad(loss, (o, q, k, z))))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=16 * EPS * exact.abs().max().item())
