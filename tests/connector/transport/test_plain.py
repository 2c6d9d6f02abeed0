from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.transport.layout import from_plain, to_plain
from fxsplit_encoder.errors import InputError, TransportError

names = st.text(min_size=1, max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(names, inner, max_size=4),
    ),
    max_leaves=20,
)


class Kind(Enum):
    IMAGE = "image"


def across(value: object) -> Any:
    return from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(value))))


@given(values)
def test_values_come_back_as_they_were(value: object) -> None:
    assert across(value) == value


def test_tensors_and_arrays_come_back_as_what_they_were() -> None:
    tensors = [torch.arange(6, dtype=torch.int16).view(2, 3), torch.rand(3).bfloat16(), torch.empty(0, 2)]
    tensors += [torch.tensor(True), torch.rand(2, 3).t(), torch.rand(2).to(torch.float8_e4m3fn)]
    for tensor in tensors:
        again = across({"grid": (tensor, 1)})["grid"][0]
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(again.float(), tensor.float())
    array = np.arange(6.0).reshape(3, 2)
    array.flags.writeable = False
    again = across([array, array[:0], np.float32(2.5), np.int64(3), Kind.IMAGE])
    assert np.array_equal(again[0], array)
    assert again[1].shape == (0, 2)
    assert again[2:] == [2.5, 3, "image"]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1: 2},
        {"": 3},
        2**64,
        -(2**63) - 1,
        np.array(["x"]),
        torch.zeros(1 << 20),
        torch.ones(1).to_sparse(),
    ],
    ids=["object", "key", "mark", "large", "small", "strings", "bytes", "sparse"],
)
def test_what_no_message_takes_is_named(value: object) -> None:
    with pytest.raises(InputError, match=r"^meta\.video"):
        to_plain({"video": value})


def test_containers_are_not_endless() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InputError, match="containers"):
        to_plain(value)


@pytest.mark.parametrize(
    "value",
    [
        {"": 1},
        {"": ["tuple"]},
        {"": ["tensor", "float32", [2], b"123"]},
        {"": ["tensor", "float32", [2**40], b""]},
        {"": ["tensor", "float32", [-2], b""]},
        {"": ["tensor", "float32", ["x"], b"1234"]},
        {"": ["tensor", "object", [1], b"1234"]},
        {"": ["array", "bfloat16", [2], b"1234"]},
        {"": ["tensor", "float32", [2], b"1234"], "more": 1},
    ],
    ids=str,
)
def test_what_to_plain_never_makes_is_an_error(value: object) -> None:
    with pytest.raises(TransportError):
        from_plain([value])


def test_deep_values_of_others_are_an_error() -> None:
    value: Any = 1
    for _ in range(900):
        value = [value]
    with pytest.raises(TransportError, match="deep"):
        from_plain(value)
