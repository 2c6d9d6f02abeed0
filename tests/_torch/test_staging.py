"""Copies on the host: right for every dtype, and small ones without torch's threads."""

from __future__ import annotations

import pytest
import torch

from fxsplit_encoder._torch.staging import copy_on_host, to_device
from fxsplit_encoder.connector.manager_encoder import staged

from ..dispatched import Dispatched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (16384, 4)])
def test_a_small_copy_has_the_values_and_is_made_by_one_thread(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source = torch.randint(0, 2, shape).to(dtype)
    target = torch.full_like(source, 1)
    with Dispatched() as called:
        assert copy_on_host(target, source) is target
    assert torch.equal(target, source)
    assert "aten.copy_" not in dict(called.calls)


def test_a_small_copy_converts_and_takes_any_strides() -> None:
    source = torch.arange(-6, 6).view(3, 4).t()
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        target = torch.empty(4, 3, dtype=dtype)
        assert torch.equal(copy_on_host(target, source), source.to(dtype))
    halves = torch.randn(4, 6).bfloat16()[:, ::2]
    assert torch.equal(copy_on_host(torch.empty(4, 3, dtype=torch.bfloat16), halves), halves)
    assert torch.equal(copy_on_host(torch.empty(4, 3), halves), halves.float())


def test_a_large_copy_is_torchs() -> None:
    source = torch.randn(1 << 19, requires_grad=True)
    with torch.no_grad(), Dispatched() as called:
        assert torch.equal(copy_on_host(torch.empty(1 << 19), source), source)
    assert "aten.copy_" in dict(called.calls)


def test_a_tensor_that_is_there_stays() -> None:
    tensor = torch.randn(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
    assert to_device(tensor, torch.device("cpu"), torch.float64).dtype == torch.float64


@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (40, 1000), (3, 2, 11_000)])
def test_a_staged_tensor_is_the_same_in_another_dtype(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    made = staged(tensor, torch.bfloat16, is_pinned=False)
    assert torch.equal(made, tensor.bfloat16())
    turned = tensor.transpose(0, -1)
    assert torch.equal(staged(turned, torch.float64, is_pinned=False), turned.double())
    assert staged(made, torch.bfloat16, is_pinned=False) is made
