from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fxsplit_encoder.compile.blocks import put_together, take_apart
from fxsplit_encoder.errors import CompileError

Pair = collections.namedtuple("Pair", ["x", "y"])

tensors_or_constants = st.one_of(
    st.builds(torch.empty, st.integers(0, 3)),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
)
arguments = st.recursive(
    tensors_or_constants,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
)


def assert_same(one: Any, other: Any) -> None:
    """Equal values of the same types; tensors are the same object."""
    (leaves, structure), (others, same) = tree_flatten(one), tree_flatten(other)
    assert structure == same
    for a, b in zip(leaves, others, strict=True):
        assert type(a) is type(b)
        assert a is b if isinstance(a, Tensor) else a == b


@settings(max_examples=40)
@given(arguments)
def test_what_is_taken_apart_is_put_together_again_also_with_other_tensors_and_numbers(value: Any) -> None:
    tensors: list[Tensor] = []
    numbers: list[int] = []
    structure = take_apart(value, tensors, numbers)
    assert_same(put_together(structure, tensors, numbers), value)
    others = put_together(structure, [torch.ones(5) for _ in tensors], [n + 1 for n in numbers])
    assert take_apart(others, [], []) == structure


@pytest.mark.parametrize("value", [Pair(1, 2), torch.float16, {1, 2}, b"bytes"], ids=str)
def test_what_no_op_can_take_is_refused(value: Any) -> None:
    with pytest.raises(CompileError, match=f"a block takes a {type(value).__name__}"):
        take_apart([value], [], [])
