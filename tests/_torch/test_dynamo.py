from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder._torch.dynamo import Marks, mark_static, mark_unbacked, not_traced


def _write(tensor: Tensor) -> None:
    mark_unbacked(tensor, 0)
    mark_static(tensor, list(range(1, tensor.dim())))


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
def test_every_alias_has_the_marks_of_the_first(shape: tuple[int, ...]) -> None:
    marks, expected = Marks(_write), torch.zeros(shape)
    _write(expected)
    for _ in range(3):
        tensor = torch.zeros(shape)
        alias = marks.on_alias(tensor)
        assert alias.data_ptr() == tensor.data_ptr()
        assert vars(alias) == vars(expected) != {}
        assert vars(tensor) == {}


def test_marks_are_written_once_for_each_number_of_dimensions() -> None:
    written: list[int] = []

    def write(tensor: Tensor) -> None:
        written.append(tensor.dim())
        _write(tensor)

    marks = Marks(write)
    for _ in range(2):
        marks.on_alias(torch.zeros(2, 3))
        marks.on_alias(torch.zeros(2, 3, 4))
    assert written == [2, 3]


class Subclass(Tensor):
    pass


def test_a_subclass_is_marked_by_torch() -> None:
    marks = Marks(_write)
    for _ in range(2):
        alias = marks.on_alias(torch.zeros(2, 3).as_subclass(Subclass))
        assert type(alias) is Subclass
        assert "_dynamo_static_indices" in vars(alias)


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_a_function_that_is_not_traced_calls_is() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def inner(value: Tensor) -> Tensor:
        return value.sin()

    @not_traced
    def outer(value: Tensor) -> Tensor:
        return inner(value.cos())

    compiled, value = torch.compile(outer, backend=backend), torch.ones(2)
    assert torch.equal(compiled(value), value.cos().sin())
    (graph,) = graphs
    assert [node.name for node in graph.graph.find_nodes(op="call_method")] == ["sin"]
