from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.merged_projections import merged_projections
from fxsplit_encoder.kernels.attention import varlen_attention

from .aten_graphs import (
    Batched,
    Graph,
    Layers,
    Using,
    aten_graph,
    by_ours,
    by_torch,
    rewritten,
    rotated,
    same,
)

aten = torch.ops.aten

WIDTH, HEADS, HEAD_DIM = 32, 2, 8
LENGTHS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


class Packed(Layers):
    """Attention over segments of rows."""

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.parts(x)
        return rotated(q), rotated(k), v

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.out(varlen_attention(*self.projected(x), cu_seqlens, 5, 0.3).flatten(1))


def merged(module: nn.Module, times: int = 1) -> Graph:
    """The graph of attention over segments, after the pass."""
    return rewritten(merged_projections, module, torch.randn(9, WIDTH), LENGTHS, times=times)


def merged_batch(module: nn.Module) -> Graph:
    return rewritten(merged_projections, module, torch.randn(3, 7, WIDTH))


def num_products(graph: Graph) -> int:
    return graph.count(aten.mm.default) + graph.count(aten.addmm.default)


@pytest.mark.parametrize("biases", ["qkv", "", "qv"])
def test_attention_over_segments_has_one_layer(biases: str) -> None:
    graph = merged(Packed(biases=biases))
    assert num_products(graph) == 2
    assert len(graph.derived) == {"qkv": 2, "": 1, "qv": 3}[biases]  # the zeros are one


@pytest.mark.parametrize("biases", ["qkv", "qv"])
@pytest.mark.parametrize("compute", [same, rotated, lambda q: F.layer_norm(q * 0.1, q.shape[-1:])])
@pytest.mark.parametrize("attend", [by_torch, by_ours])
def test_attention_over_a_batch_has_one_layer(attend: Any, compute: Any, biases: str) -> None:
    assert num_products(merged_batch(Batched(attend, compute, biases=biases))) == 2


@pytest.mark.parametrize("attend", [by_torch, by_ours])
def test_attention_reads_views_of_the_common_result(attend: Any) -> None:
    graph = merged_batch(Batched(attend))
    (attention,) = [node for node in graph.module.graph.nodes if "attention" in str(node.target)]
    features, total = HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM
    for position, given in enumerate(attention.args[:3]):
        value = given.meta["val"]
        assert value.stride() == (7 * total, HEAD_DIM, total, 1)
        assert value.storage_offset() == position * features
    assert graph.count(aten.clone.default) == 0


class Grouped(Packed):
    """Fewer keys and values than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = (nn.Linear(WIDTH, HEAD_DIM) for _ in range(2))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.parts(x)
        return q, k.expand(-1, HEADS, -1), v.expand(-1, HEADS, -1)


class Moved(Packed):
    """Each of other rows, or some of the same."""

    def __init__(self, *offsets: int, head_dim: int = HEAD_DIM) -> None:
        super().__init__(head_dim=head_dim)
        self.offsets = offsets

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = (x + offset if offset else x for offset in self.offsets)
        layers = zip((self.q, self.k, self.v), rows, strict=True)
        q, k, v = (layer(given).view(-1, HEADS, self.head_dim) for layer, given in layers)
        return q, k, v


@pytest.mark.parametrize(("make", "products"), [(Grouped, 2), (lambda: Moved(1, 0, 0), 3)])
def test_the_layers_that_fit_are_merged(make: Callable[[], nn.Module], products: int) -> None:
    assert num_products(merged(make())) == products


def keys_are_a_result_too(packed: Packed, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    q, k, v = packed.projected(x)
    return packed.out((varlen_attention(q, k, v, cu_seqlens, 5, 0.3) + k - v).flatten(1))


def test_whatever_reads_a_layer_reads_its_part() -> None:
    assert merged_projections(merged(Using(Packed(), keys_are_a_result_too)).module) == 0


class HeadsAsRows(Packed):
    """Heads become rows without a copy, which those of a common result cannot."""

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = (layer(x).view(-1, HEAD_DIM) for layer in (self.q, self.k, self.v))
        return tuple(each.view(-1, HEADS, HEAD_DIM) for each in rows)


class OneBias(Packed):
    """One number for all features."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.q, self.k, self.v):
            layer.bias = nn.Parameter(torch.randn(1))


@pytest.mark.parametrize(
    "make",
    [lambda: Moved(0, 1, 2), HeadsAsRows, lambda: Moved(0, 0, 0, head_dim=5), OneBias],
    ids=["rows of their own", "heads as rows", "unaligned", "one bias"],
)
def test_other_graphs_stay_as_they_are(make: Callable[[], nn.Module]) -> None:
    merged(make(), times=0)


def test_weights_that_are_no_parameters_stay_apart() -> None:
    graph = aten_graph(Packed(), torch.randn(9, WIDTH), LENGTHS)
    for node in graph.module.graph.find_nodes(op="placeholder"):
        node.meta["is_parameter"] = False
    assert merged_projections(graph.module) == 0
