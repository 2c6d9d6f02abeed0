"""Rows in another order, and inputs that are derived from parameters, in a graph whose blocks are equal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxsplit_encoder.compile.rewriting import derivation, derived_parameter, mark_parameters, permute_rows

made: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True)
def none_made() -> None:
    made.clear()


def columns_first(weight: Tensor, step: int) -> Tensor:
    made.append(tuple(weight.shape))
    return weight[:, ::step].t()


def graph_of(*shapes: tuple[int, int]) -> tuple[fx.Graph, list[fx.Node]]:
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder(f"weight_{number}") for number in range(len(shapes))]
    for node, shape in zip(nodes, shapes, strict=True):
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16)
    mark_parameters(graph, range(len(shapes)))
    return graph, nodes


def test_what_equal_blocks_derive_is_made_once_and_each_has_a_value_of_its_own() -> None:
    graph, weights = graph_of((6, 4), (6, 4), (8, 4), (6, 4))
    derived = [derived_parameter(graph, functools.partial(columns_first, step=2), each) for each in weights]
    assert made == [(6, 4), (8, 4)]
    values: list[Any] = [node.meta["val"] for node in derived]
    assert [tuple(value.shape) for value in values] == [(2, 6), (2, 6), (2, 8), (2, 6)]
    assert [value.stride() for value in values] == [(2, 4), (2, 4), (2, 4), (2, 4)]
    assert all(value.dtype == torch.bfloat16 for value in values)
    assert len({id(value) for value in values}) == 4
    assert [derivation(node)[1] for node in derived] == [(each,) for each in weights]  # type: ignore[index]
    assert [node.name for node in graph.find_nodes(op="placeholder")][4:] == [
        f"derived_{i}" for i in range(4)
    ]


@given(st.permutations(range(7)), st.sampled_from([(), (3,), (2, 3)]))
def test_rows_come_in_the_order_asked_for(order: list[int], trailing: tuple[int, ...]) -> None:
    rows = torch.randn(7, *trailing)
    index = torch.tensor(order)
    result = permute_rows(rows, index)
    assert torch.equal(result, rows[index])
    assert result.data_ptr() != rows.data_ptr()
    assert torch.equal(permute_rows(result, index.argsort()), rows)


def test_an_order_of_other_rows_is_refused() -> None:
    with pytest.raises(RuntimeError, match="permute_rows: 3 rows and a permutation of 2"):
        permute_rows(torch.ones(3, 2), torch.tensor([1, 0]))


def test_the_op_is_what_it_declares() -> None:
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(permute_rows, (rows, torch.tensor([3, 1, 4, 0, 2])))


@pytest.mark.parametrize("order", [[2, 0, 1, 3], [1, 1, 0, 3]])
def test_gradients_go_back_to_their_rows(order: list[int]) -> None:
    rows, index = torch.randn(4, 3, requires_grad=True), torch.tensor(order)
    factor = torch.randn(4, 3)
    (gradient,) = torch.autograd.grad((permute_rows(rows, index) * factor).sum(), rows)
    (expected,) = torch.autograd.grad((rows[index] * factor).sum(), rows)
    torch.testing.assert_close(gradient, expected)
