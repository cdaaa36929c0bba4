"""The counts of the roofline against figures worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
from linattn_cli.roofline import FLOPS, Roof, Work, count, measure_roof

SHAPE = {"batch": 1, "heads": 16, "tokens": 32_768, "key_dim": 64, "value_dim": 64}
TENSOR = 32_768 * 16 * 64 * 2  # bytes of one bf16 tensor [1, 32k, 16, 64]


def test_every_mixer_and_primitive_is_counted():
    assert {*MIXERS, *PRIMITIVES} - {"softmax"} <= set(FLOPS)


def test_linear_attention_moves_four_tensors():
    work = count("linear_scan", mode="forward", input_bytes=3 * TENSOR, output_bytes=TENSOR, **SHAPE)
    assert work.bytes == 268_435_456
    assert work.flops == 32_768 * 16 * 4 * 64 * 64
    seconds, limit = work.bound(Roof(bytes_per_s=4.3e12, flops_per_s=790e12))
    assert limit == "memory"
    assert seconds == pytest.approx(0.0624e-3, rel=0.01)


def test_training_reads_twice_and_writes_a_gradient_for_every_input():
    work = count("delta_scan", mode="train", input_bytes=4 * TENSOR, output_bytes=TENSOR, **SHAPE)
    assert work.bytes == (3 * 4 + 2) * TENSOR
    assert work.flops == 3 * 32_768 * 16 * 6 * 64 * 64


def test_softmax_is_quadratic_and_bound_by_its_products():
    forward = count("softmax", mode="forward", input_bytes=3 * TENSOR, output_bytes=TENSOR, **SHAPE)
    assert forward.flops == 16 * 2 * (32_768 * 32_769 // 2) * 128
    train = count("softmax", mode="train", input_bytes=3 * TENSOR, output_bytes=TENSOR, **SHAPE)
    assert train.flops == 3.5 * forward.flops
    assert forward.bound(Roof(4.3e12, 790e12))[1] == "compute"


def test_softmax_counts_what_torch_counts_without_the_mask():
    q, k, v = torch.randn(3, 2, 1, 7, 8).unbind(0)
    with FlopCounterMode(display=False) as counter:
        torch.softmax(q @ k.mT, -1) @ v
    shape = {"batch": 2, "heads": 1, "key_dim": 8, "value_dim": 8, "input_bytes": 0, "output_bytes": 0}
    one_token = count("softmax", mode="decode", tokens=7, **shape)
    assert 7 * one_token.flops == counter.get_total_flops()


def test_decoding_reads_and_writes_a_state_but_only_reads_a_cache():
    shape = {**SHAPE, "input_bytes": 30, "output_bytes": 10}
    state = count("deltanet", mode="decode", state_bytes=1000, **shape)
    cache = count("softmax", mode="decode", state_bytes=1000, **shape)
    assert (state.bytes, cache.bytes) == (2040, 1040)
    assert state.flops == 16 * 6 * 64 * 64
    assert count("deltanet", mode="decode", state_bytes=1000, **{**shape, "tokens": 1}) == state


def test_a_model_that_is_not_counted_has_no_bound():
    assert count("mystery", mode="forward", input_bytes=1, output_bytes=1, **SHAPE) is None


def test_the_slower_of_moving_and_computing_is_the_bound():
    assert Work(10, 30).bound(Roof(1.0, 2.0)) == (15.0, "compute")
    assert Work(10, 30).bound(Roof(1.0, 3.0)) == (10.0, "memory")


def test_the_roof_of_this_machine_is_a_plausible_number():
    roof = measure_roof(torch.device("cpu"), torch.float32)
    assert 1e8 < roof.bytes_per_s < 1e13
    assert 1e8 < roof.flops_per_s < 1e15
