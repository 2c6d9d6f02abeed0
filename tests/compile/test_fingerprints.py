"""Sampled bits of tensors: which writes through `.data` are found, and in which layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.compile.derived import SAMPLES, Fingerprints

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int64, torch.complex64]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "columns": lambda tensor: tensor[:, 1::2],
    "expanded": lambda tensor: tensor[:1].expand(7, -1),
    "a number": lambda tensor: tensor[0, 0],
    "empty": lambda tensor: tensor[:0],
}


def sampled(count: int) -> list[int]:
    """Positions as the module's first words have them: the first, the last, and evenly between."""
    if count <= SAMPLES:
        return list(range(count))
    return [number * (count - 1) // (SAMPLES - 1) for number in range(SAMPLES)]


def flip(tensor: Tensor, position: int) -> None:
    """Changes the lowest bit of an element, in the order of dimensions, without a version."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits, index = tensor.data.view(integers), []
    for size in reversed(tensor.shape):
        index.append(position % size)
        position //= size
    bits[tuple(reversed(index))] ^= 1


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 40), st.integers(2, 40), st.sampled_from(DTYPES), st.sampled_from([*LAYOUTS]), st.data()
)
def test_a_write_to_a_sampled_element_is_found(
    rows: int, columns: int, dtype: torch.dtype, layout: str, data: Any
) -> None:
    tensor = LAYOUTS[layout](torch.randn(rows, columns).to(dtype))
    fingerprints = Fingerprints()
    fingerprints.take([torch.ones(3), tensor])
    assert not fingerprints.have_changed()
    if not tensor.numel():
        return
    version, position = tensor._version, data.draw(st.sampled_from(sampled(tensor.numel())))
    for changes in (True, False, True):
        flip(tensor, position)
        assert fingerprints.have_changed() == changes
    assert tensor._version == version
    fingerprints.take([torch.ones(3), tensor])
    assert not fingerprints.have_changed()


def test_nan_is_equal_to_itself_and_zeros_have_a_sign() -> None:
    tensor = torch.tensor([float("nan"), 0.0])
    fingerprints = Fingerprints()
    fingerprints.take([tensor])
    assert not fingerprints.have_changed()
    tensor.data[1] = -0.0
    assert fingerprints.have_changed()
