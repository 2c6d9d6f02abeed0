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
from torch.fx.experimental.proxy_tensor import make_fx

from fxsplit_encoder.compile.rewriting import (
    derivation,
    derived_parameter,
    fold_host_constants,
    mark_parameters,
    permute_rows,
)

CPU = torch.device("cpu")

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


def test_what_the_cpu_computes_from_constants_for_a_device_is_a_constant_there() -> None:
    def forward(rows: Tensor) -> Tensor:
        positions = (torch.arange(0.5, 16) + 0.5) / 16
        total = torch.tensor([1.0, 2.0]).sum()
        random = torch.rand(16) * positions
        return rows * positions.to(rows.device) + total.to(rows.device) + random.to(rows.device)

    with torch.no_grad():
        module = make_fx(forward)(torch.empty(16, device="meta"))
    fold_host_constants(module)
    module.recompile()
    on_cpu = [node for node in module.graph.nodes if getattr(node.meta.get("val"), "device", None) == CPU]
    assert {"rand", "arange"} <= {str(node.target.overloadpacket.__name__) for node in on_cpu}
    constants = module.graph.find_nodes(op="get_attr")
    assert [tuple(node.meta["val"].shape) for node in constants] == [(16,), ()]
    assert all(getattr(module, node.target).device.type == "meta" for node in constants)
    assert module(torch.empty(16, device="meta")).shape == (16,)


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
