import math

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import (
    FloorDiv,
    IntTrueDiv,
    Max,
    Mod,
    OpaqueUnaryFn_sqrt,
    PythonMod,
    ToFloat,
)

from fxsplit_encoder.compile.sizes import Size, expression, shape_exprs, symbol_of
from fxsplit_encoder.errors import CompileError

T, B = sympy.Symbol("T", integer=True, positive=True), sympy.Symbol("B", integer=True, positive=True)


@given(st.integers(1, 10_000), st.integers(1, 50))
def test_expressions_evaluate_as_python_does(tokens: int, images: int) -> None:
    values = {"T": tokens, "B": images}
    assert Size.of(T)(values) == tokens
    assert Size.of(FloorDiv(T, 4))(values) == tokens // 4
    assert Size.of(64 * FloorDiv(T, FloorDiv(T + 4, 4)))(values) == 64 * (tokens // ((tokens + 4) // 4))
    assert Size.of(T * B + 3)(values) == tokens * images + 3
    assert Size.of(Mod(T, 7))(values) == tokens % 7
    assert Size.of(PythonMod(T, 7))(values) == tokens % 7
    assert Size.of(Max(T, B))(values) == max(tokens, images)


@given(st.integers(1, 10_000))
def test_numbers_that_are_not_whole_keep_their_fraction(tokens: int) -> None:
    values = {"T": tokens}
    assert Size.of(IntTrueDiv(1, T))(values) == pytest.approx(1 / tokens)
    assert Size.of(ToFloat(T) * 0.5)(values) == pytest.approx(tokens * 0.5)
    assert Size.of(OpaqueUnaryFn_sqrt(T))(values) == pytest.approx(math.sqrt(tokens))


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(CompileError, match="depends on B"):
        Size.of(T * B)({"T": 3})


def traced(*dims: DimDynamic) -> Tensor:
    """(12, 8) with these sizes dynamic or static."""
    context = StatelessSymbolicContext(dynamic_sizes=[*dims])
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(12, 8), symbolic_context=context)


def test_traced_sizes_become_expressions() -> None:
    fake = traced(DimDynamic.DYNAMIC, DimDynamic.STATIC)
    rows, columns = shape_exprs(fake)
    assert rows.is_Symbol
    assert columns == 8
    assert expression(fake.shape[0] // 4) == FloorDiv(rows, 4)
    assert symbol_of(fake.shape[0]) == str(rows)
    assert symbol_of(fake.shape[0] * 2 + 1) == str(rows)
    assert symbol_of(fake.shape[1]) is None
    assert Size.of(fake.shape[0] * 3)({str(rows): 5}) == 15


def test_a_token_count_of_several_symbols_is_refused() -> None:
    fake = traced(DimDynamic.DYNAMIC, DimDynamic.DYNAMIC)
    with pytest.raises(CompileError, match="several symbols"):
        symbol_of(fake.shape[0] * fake.shape[1])
