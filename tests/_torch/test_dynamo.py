from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder._torch.dynamo import Marks, drop_guards_on, not_traced


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
def test_every_alias_has_the_marks_of_the_first(shape: tuple[int, ...]) -> None:
    marks, expected = Marks("unbacked"), torch.zeros(shape)
    torch._dynamo.decorators.mark_unbacked(expected, 0)
    torch._dynamo.mark_static(expected, list(range(1, len(shape))))
    for _ in range(3):
        tensor = torch.zeros(shape)
        alias = marks.on_alias(tensor)
        assert alias.data_ptr() == tensor.data_ptr()
        assert vars(alias) == vars(expected) != {}
        assert vars(tensor) == {}


class Subclass(Tensor):
    pass


def test_a_subclass_is_marked_by_torch() -> None:
    marks = Marks("unbacked")
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


class Part(torch.nn.Module):
    place = 0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.place


class Settings:
    def __init__(self, nested: Any = None) -> None:
        self.factor = 2
        self.nested = nested


class Whole(torch.nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(Part() for _ in range(2))
        for part in self.parts:
            part.place = 3  # type: ignore[assignment]
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        nested = self.settings.nested
        return x * self.settings.factor * (1 if nested is None else nested.factor)


def traces(paths: list[str], settings: Settings) -> list[int]:
    """How often Dynamo had traced the call before a part was changed, then, and after a setting was."""
    counts: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(1)
        drop_guards_on(paths, "place", "settings")
        return graph.forward

    module = Whole(settings)
    compiled = torch.compile(module, backend=backend)
    seen = []
    for place, factor in ((3, 2), (3, 2), (4, 2), (4, 5)):
        module.parts[1].place, module.settings.factor = place, factor  # type: ignore[assignment]
        compiled(torch.ones(2))
        seen.append(len(counts))
    return seen


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("paths", "settings", "expected"),
    [
        (["parts.0", "parts.1"], Settings(), [1, 1, 1, 1]),
        (["parts.0", "parts.1"], Settings(Settings()), [1, 1, 1, 2]),
        (["parts.1"], Settings(), [1, 1, 2, 3]),
        (["parts.0", "parts.1", "parts.2"], Settings(), [1, 1, 2, 3]),
        (["others.0", "others.1"], Settings(), [1, 1, 2, 3]),
    ],
    ids=["those", "and what lies deeper", "fewer", "more", "others"],
)
def test_guards_are_dropped_where_all_are_known(
    paths: list[str], settings: Settings, expected: list[int]
) -> None:
    assert traces(paths, settings) == expected
