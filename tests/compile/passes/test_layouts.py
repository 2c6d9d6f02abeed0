"""Whatever a pass changes, what can see sizes, strides and offsets of a value sees those that eager gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxsplit_encoder.compile.passes import PASSES
from fxsplit_encoder.compile.passes.own_kernels import fixed_products
from fxsplit_encoder.compile.rewriting import mark_cuts
from fxsplit_encoder.kernels.attention import dense_attention, varlen_attention

from .aten_graphs import Graph, Layers, Mlp, aten_graph, by_ours, by_torch, rotated, tanh_gelu
from .test_decomposed_bias import GridAttention
from .test_decomposed_bias import example as grid_example
from .test_folded_adapters import Adapted
from .test_wide_heads import Packed

WIDTH, TOKENS = 16, 6
_library: Any = torch.library.Library("layouts_test", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("in_memory(Tensor value) -> Tensor")
_library.impl("in_memory", lambda value: in_memory(value).clone(), "CompositeExplicitAutograd")
torch.library.register_fake(
    "layouts_test::in_memory", lambda value: value.new_empty(value[0].numel()), lib=_library
)


def in_memory(value: Tensor) -> Tensor:
    """As many entries as the first item has, in the order in which they are stored."""
    return torch.as_strided(value, (value[0].numel(),), (1,), value.storage_offset())


CONSUMERS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda value: value,
    "memory": in_memory,
    "memory of a part": lambda value: in_memory(value[..., 1:]),
    "reshape": lambda value: value.reshape(value.shape[0], -1) + 1,
    "group norm": lambda value: F.group_norm(value.reshape(value.shape[0], value.shape[1], -1), 1),
    "transpose": lambda value: value.transpose(0, -1),
    "other library": lambda value: torch.ops.layouts_test.in_memory(value.cos()),
    "random": torch.rand_like,
    "channels last": lambda value: (
        value.to(memory_format=torch.channels_last) if value.dim() == 4 else value.contiguous()
    ),
}


class Images(nn.Module):
    """Two convolutions whose windows do not overlap."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, size, stride=size)
        self.second = nn.Conv2d(8, 6, size, stride=size)

    def forward(self, x: Tensor) -> list[Tensor]:
        first = self.first(x)
        return [first, self.second(first.relu())]


class Blocks(Layers):
    """Attentions, and layers after each that nothing but the outputs reads."""

    def __init__(
        self,
        attend: Callable[..., Tensor],
        activation: Callable[[Tensor], Tensor] = F.gelu,
        head_dim: int = 8,
        *,
        depth: int = 1,
    ) -> None:
        super().__init__(width=WIDTH, head_dim=head_dim)
        self.attend, self.depth = attend, depth
        self.mlp = Mlp(activation, WIDTH, gated=activation is F.silu)

    def forward(self, x: Tensor) -> list[Tensor]:
        values: list[Tensor] = []
        for _ in range(self.depth):
            q, k, v = (each.transpose(1, 2) for each in self.parts(x))
            attended = self.attend(q * 0.5, k, v)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            values += [q, k, v, attended, self.mlp(x), x]
        return values


class Rows(Packed):
    """Attention over one segment, whose queries and keys are computed with in between."""

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        q, k, v = self.parts(x)
        cu_seqlens = torch.arange(2, dtype=torch.int32) * x.shape[0]
        attended = varlen_attention(rotated(q), rotated(k), v, cu_seqlens, 64, 0.3)
        return [q, k, v, rotated(q), attended, self.out(attended.flatten(1))]


class Seen(nn.Module):
    """What a module computes, as consumers see it, and its last value."""

    def __init__(self, body: nn.Module, consumers: Sequence[tuple[int, str]]) -> None:
        super().__init__()
        self.body, self.consumers = body, consumers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.body(x)
        values = found if isinstance(found, list) else [found]
        seen = (CONSUMERS[name](values[number % len(values)]) for number, name in self.consumers)
        return (*seen, values[-1])


SHORT = torch.bfloat16


class Case(NamedTuple):
    body: Callable[[], nn.Module]
    example: Callable[[], Tensor] = lambda: torch.randn(3, TOKENS, WIDTH)
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4


def blocks(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return functools.partial(Blocks, *args, **kwargs)


CASES: dict[str, list[Case]] = {
    "folded_adapters": [Case(functools.partial(Adapted, 4), lambda: torch.randn(3, TOKENS, 32))],
    "conv_to_linear": [
        Case(Images, lambda: torch.randn(3, 3, 8, 8)),
        Case(functools.partial(Images, 1), lambda: torch.randn(3, 3, 4, 2)),
        Case(Images, lambda: torch.randn(3, 3, 4, 4)),
    ],
    "pad_mlp_width": [Case(blocks(by_torch)), Case(blocks(by_ours, F.silu))],
    "decomposed_bias": [Case(lambda: GridAttention((4, 6)), lambda: grid_example((4, 6)))],
    "dense_attention": [Case(blocks(by_torch), dtype=SHORT, tolerance=0.1)],
    "merged_projections": [Case(blocks(by_torch)), Case(blocks(by_ours))],
    "wide_heads": [Case(blocks(by_ours, head_dim=72)), Case(Rows, lambda: torch.randn(9, 20))],
    "gelu_epilogue": [Case(blocks(by_torch, tanh_gelu))],
    "measured_activations": [Case(blocks(by_torch)), Case(blocks(by_ours, F.silu))],
    "output_branch": [Case(blocks(by_ours, depth=2))],
    "fixed_products": [Case(blocks(by_torch))],
}
NUM_PLACES = {"conv_to_linear": 4, "output_branch": 3, "fixed_products": 14}
"""In two of a case, where not one in each."""
ALL: dict[str, Any] = {**PASSES, "fixed_products": fixed_products}


def graph_of(case: Case, consumers: Sequence[tuple[int, str]]) -> Graph:
    torch.manual_seed(0)
    graph = aten_graph(Seen(case.body(), consumers).to(case.dtype), case.example().to(case.dtype))
    mark_cuts(graph.module, frozenset({dense_attention}))
    return graph


def results(graph: Graph) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    found: tuple[Tensor, ...] = graph.run()
    return found


def test_every_pass_has_a_case() -> None:
    assert CASES.keys() == ALL.keys()


class Twice(nn.Module):
    """The last values of a module and of another like it, from the same input."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.other = Seen(make(), []), Seen(make(), [])

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)[-1] + self.other(x * 0.5)[-1]


@pytest.mark.parametrize("name", CASES)
def test_a_pass_changes_its_cases_at_every_place(name: str) -> None:
    for case in CASES[name]:
        graph = graph_of(case._replace(body=functools.partial(Twice, case.body)), [])
        expected = results(graph)
        assert graph.apply(ALL[name]) == NUM_PLACES.get(name, 2)
        torch.testing.assert_close(results(graph), expected, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3)
@given(data=st.data())
def test_layouts_are_those_without_the_pass(name: str, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES[name]))
    some = st.tuples(st.integers(0, 11), st.sampled_from([*CONSUMERS]))
    consumers = data.draw(st.lists(some, min_size=1, max_size=4))
    graph = graph_of(case, consumers)
    plain = results(graph)
    graph.apply(ALL[name])
    graph.module.graph.eliminate_dead_code()
    for got, expected in zip(results(graph), plain, strict=True):
        assert (got.shape, got.stride()) == (expected.shape, expected.stride())
        assert got.storage_offset() == expected.storage_offset()
        torch.testing.assert_close(got, expected, rtol=case.tolerance, atol=case.tolerance)


class StridesOfPatches(nn.Module):
    """Patches read by strides; the value itself is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 8, 4, stride=4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        patches = self.embedding(x)
        return torch.as_strided(patches, (4, 6), (2, 1), 1) + 1, patches.flatten(2).transpose(1, 2)


@torch.no_grad()
def test_the_backend_gives_the_layouts_of_eager() -> None:
    module, x = StridesOfPatches().eval(), torch.randn(2, 3, 8, 8)
    expected, got = module(x), torch.compile(module, backend="encoder_cg")(x)
    torch.testing.assert_close(got, expected, check_stride=True)
