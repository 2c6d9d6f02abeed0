from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.connector.transport.layout import (
    ALIGNMENT,
    DTYPES,
    MOST_TENSORS,
    TensorLayout,
    check_layouts,
    copy_out,
    lay_out,
)
from fxsplit_encoder.errors import InputError, TransportError


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (3, 4), (2, 3, 5)], ids=str)
def test_every_dtype_and_shape_lies_in_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 7).to(dtype)
    memory = torch.full((4096,), 255, dtype=torch.uint8)
    (first, second), end = lay_out({"one": torch.ones(3), "tensor": tensor}, start=5)
    assert (first.offset, second.offset, end % ALIGNMENT) == (ALIGNMENT, 2 * ALIGNMENT, 0)
    second.view(memory).copy_(tensor)
    again = second.view(memory)
    assert (again.shape, again.dtype) == (tensor.shape, dtype)
    assert torch.equal(again.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert end <= 4096


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, device="meta"),
        torch.ones(2, 2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        "text",
        torch.ones([1] * 17),
    ],
    ids=["meta", "sparse", "quantized", "text", "dimensions"],
)
def test_what_is_no_plain_tensor_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"buffers\.pixels: expected"):
        lay_out({"pixels": tensor})


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="at most"):
        lay_out(dict.fromkeys(map(str, range(MOST_TENSORS + 1)), torch.ones(1)))


SIZES = st.one_of(st.integers(-2, 70), st.integers(-(2**70), 2**70))


@settings(max_examples=60)
@given(SIZES.map(lambda size: 64 * size), st.lists(SIZES, max_size=4), st.text(max_size=9))
def test_no_layout_leads_outside_its_memory(offset: int, shape: list[int], dtype: str) -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    for name in (dtype, "float32", "uint8", "complex128"):
        layout = TensorLayout("x", name, tuple(shape), offset)
        try:
            check_layouts([layout], ALIGNMENT, memory.numel())
        except TransportError:
            continue
        assert layout.view(memory).nbytes == layout.num_bytes
        assert ALIGNMENT <= offset <= offset + layout.num_bytes <= 1024


def test_a_tensor_may_end_where_its_memory_ends() -> None:
    layout = TensorLayout("x", "float32", (16,), 64)
    check_layouts([layout], 64, 128)
    for other in ({"shape": (17,)}, {"offset": 0}, {"offset": 96}, {"dtype": "float"}, {"shape": (-1, -16)}):
        with pytest.raises(TransportError):
            check_layouts([dataclasses.replace(layout, **other)], 64, 128)


def test_copies_go_into_what_is_given_or_are_new() -> None:
    source = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}
    into = {"a": torch.empty(3, 2).t(), "b": torch.empty((), dtype=torch.int64)}
    for copies in (copy_out(source, None), copy_out(source, into)):
        assert all(torch.equal(copies[name], source[name]) for name in source)
        assert copies["a"].data_ptr() != source["a"].data_ptr()
    assert torch.equal(into["a"], source["a"])


@pytest.mark.parametrize(
    "into",
    [
        {"a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(2)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(1, dtype=torch.int64)},
    ],
    ids=["missing", "shape", "dtype"],
)
def test_nothing_is_copied_into_what_does_not_fit(into: dict[str, torch.Tensor]) -> None:
    source = {"a": torch.ones(2, 3), "b": torch.ones(1)}
    with pytest.raises(InputError, match="into"):
        copy_out(source, into)
    assert not into["a"].any()
