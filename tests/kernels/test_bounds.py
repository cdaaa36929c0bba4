"""No kernel reads or writes outside the tensors of its launch: the interpreter is asked about every address.

On a GPU `compute-sanitizer python benchmarks/gpu_sanitizer.py` does that; here what it would find is found without one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the interpreter is for tensors of a CPU", allow_module_level=True)
pytest.importorskip("triton", reason="triton has no wheel for this system")
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    from linattn_cli.kernels import dispatch
    from linattn_cli.kernels.forms.hla2 import hla2
    from linattn_cli.kernels.forms.hla3 import hla3
    from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
    from linattn_cli.latency_arms import arm_of, run_through
    from linattn_cli.latency_cases import Setting

    for operator in PRIMITIVES:  # now, before a test of something else imports them to run on a GPU
        dispatch.load(operator, "triton")

pytestmark = pytest.mark.usefixtures("interpreter")

NAMES = [name for name in (*PRIMITIVES, *MIXERS) if name != "softmax"]
TOKENS = 37


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Fails at an address outside; counts the addresses that it let through, by kernel."""
    seen: dict[str, int] = {}
    allowed: list[tuple[int, int]] = []
    name = ""
    to_host = triton_interpreter.GridExecutor._init_args_hst

    def noting(self, tensors, options):
        nonlocal name
        name = self.fn.__name__
        arguments, options = to_host(self, tensors, options)
        allowed[:] = [extent(x) for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
        return arguments, options

    def check(pointers, mask) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.asarray(pointers.data)[np.asarray(mask.data).astype(bool)].astype(np.int64)
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in allowed:
            inside |= (addresses >= low) & (addresses + size <= high)
        assert inside.all(), f"{name}: {(~inside).sum()} addresses outside its tensors"
        seen[name] = seen.get(name, 0) + addresses.size

    builder = type(triton_interpreter.interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(triton_interpreter.GridExecutor, "_init_args_hst", noting)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    return seen


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the one behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@pytest.mark.parametrize("name", NAMES)
def test_forward_backward_and_decoding_stay_inside(name: str, bounds: dict[str, int]) -> None:
    setting = Setting(1, 2, 20, torch.float32, torch.device("cpu"), "train")
    run_through(arm_of(name, "triton", setting), setting, TOKENS)
    assert len(bounds) >= 3, "kernels of a forward, a backward and a step were looked at"


@pytest.mark.parametrize(
    ("form", "options"), [(hla2, {"readout": "ratio"}), (hla3, {"readout": "ratio"}), (hla3, {"variant": "published"})]
)
def test_values_wider_than_keys_stay_inside(form, options: dict[str, str], bounds: dict[str, int]) -> None:
    """32 keys and 33 or 64 values: what ended in illegal accesses on a GPU, with tiles that were not square."""
    q, k, v = (torch.randn(1, TOKENS, 2, 32, requires_grad=True) for _ in range(3))
    form(q, k, v, **options, impl="triton").o.sum().backward()
    assert sum(bounds.values()) > 0


def test_an_address_outside_is_found(bounds: dict[str, int]) -> None:
    @triton.jit
    def double(p_x, p_y, N, BLOCK: tl.constexpr):
        o = tl.arange(0, BLOCK)
        tl.store(p_y + o, tl.load(p_x + o, mask=o < N) * 2, mask=o < N)

    storage = torch.arange(8.0)
    x, y = storage[:5], torch.zeros(8)
    double[(1,)](x, y, 5, BLOCK=8)
    assert y.tolist() == [0, 2, 4, 6, 8, 0, 0, 0]
    assert bounds == {"double": 10}
    with pytest.raises(Exception, match="double: 1 addresses outside"):
        double[(1,)](x, y, 6, BLOCK=8)
