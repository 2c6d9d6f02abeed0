from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.measured_activations import measured_activations
from fxsplit_encoder.compile.passes.merged_projections import merged_projections
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_mlp_width
from fxsplit_encoder.compile.passes.wide_heads import wide_heads
from fxsplit_encoder.kernels.attention import dense_attention, varlen_attention
from fxsplit_encoder.kernels.products.measured import linear

from .aten_graphs import Graph, Mlp, aten_graph, rewritten, rotated

aten = torch.ops.aten

WIDTH, HEADS, HEAD_DIM = 32, 2, 8
LENGTHS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


def same(x: Tensor) -> Tensor:
    return x


class Layers(nn.Module):
    """Query, key and value from layers of their own."""

    def __init__(self, *, biases: str = "qkv", head_dim: int = HEAD_DIM) -> None:
        super().__init__()
        self.head_dim, features = head_dim, HEADS * head_dim
        self.q, self.k, self.v = (nn.Linear(WIDTH, features, bias=name in biases) for name in "qkv")
        self.out = nn.Linear(features, WIDTH)


class Packed(Layers):
    """Attention over segments of rows."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (layer(x).view(-1, HEADS, self.head_dim) for layer in (self.q, self.k, self.v))
        return rotated(q), rotated(k), v

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.out(varlen_attention(*self.parts(x), cu_seqlens, 5, 0.3).flatten(1))


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def by_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense_attention(q, k, v, 0.3)


class Batched(Layers):
    """Attention over a batch of images."""

    def __init__(
        self, attend: Callable[..., Tensor], compute: Callable[[Tensor], Tensor] = same, **options: Any
    ) -> None:
        super().__init__(**options)
        self.attend, self.compute = attend, compute

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        q, k, v = (
            each.unflatten(-1, (HEADS, self.head_dim)).transpose(1, 2) for each in (self.compute(q), k, v)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def merged(module: nn.Module, times: int = 1) -> Graph:
    """The graph of attention over segments, after the pass."""
    return rewritten(merged_projections, module, torch.randn(9, WIDTH), LENGTHS, times=times)


def merged_batch(module: nn.Module, dtype: torch.dtype = torch.float32) -> Graph:
    return rewritten(merged_projections, module.to(dtype), torch.randn(3, 7, WIDTH, dtype=dtype))


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_merged_too(dtype: torch.dtype) -> None:
    merged_batch(Batched(by_torch, biases="qv"), dtype)


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

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (layer(x).view(9, -1, HEAD_DIM) for layer in (self.q, self.k, self.v))
        return q, k.expand(-1, HEADS, -1), v.expand(-1, HEADS, -1)


class Moved(Packed):
    """Each of other rows, or some of the same."""

    def __init__(self, *offsets: int, head_dim: int = HEAD_DIM) -> None:
        super().__init__(head_dim=head_dim)
        self.offsets = offsets

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = (x + offset if offset else x for offset in self.offsets)
        layers = zip((self.q, self.k, self.v), rows, strict=True)
        q, k, v = (layer(given).view(-1, HEADS, self.head_dim) for layer, given in layers)
        return q, k, v


class GatedQueries(Packed):
    """Queries that are a product of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS * HEAD_DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().parts(x)
        return q * F.silu(self.gate(x)).view(-1, HEADS, HEAD_DIM), k, v


class LowRank(Packed):
    """Queries to which an adapter adds."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, HEADS * HEAD_DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().parts(x)
        return q + self.up(self.down(x)).view(-1, HEADS, HEAD_DIM), k, v


@pytest.mark.parametrize(
    ("make", "products"), [(Grouped, 2), (lambda: Moved(1, 0, 0), 3), (GatedQueries, 4), (LowRank, 5)]
)
def test_the_layers_that_fit_are_merged(make: Callable[[], nn.Module], products: int) -> None:
    assert num_products(merged(make())) == products


class ReadTwice(Packed):
    """Keys are a result as well."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        attended = varlen_attention(q, k, v, cu_seqlens, 5, 0.3)
        return self.out((attended + k - v).flatten(1))


class Shared(Layers):
    """Two attentions of the same keys and values."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (layer(x).view(-1, HEADS, HEAD_DIM) for layer in (self.q, self.k, self.v))
        results = (varlen_attention(each, k, v, cu_seqlens, 5, 0.3) for each in (q, q * 2))
        return self.out(sum(results).flatten(1))


@pytest.mark.parametrize("make", [ReadTwice, Shared])
def test_whatever_reads_a_layer_reads_its_part(make: Callable[[], nn.Module]) -> None:
    assert merged_projections(merged(make()).module) == 0


class Fused(Layers):
    """One layer already."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        parts = self.qkv(x).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        return self.out(varlen_attention(*parts, cu_seqlens, 5, 0.3).flatten(1))


class HeadsAsRows(Packed):
    """Heads become rows without a copy, which those of a common result cannot."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (
            layer(x).view(-1, HEAD_DIM).view(-1, HEADS, HEAD_DIM) for layer in (self.q, self.k, self.v)
        )
        return q, k, v


class OneBias(Packed):
    """One number for all features."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.q, self.k, self.v):
            layer.bias = nn.Parameter(torch.randn(1))


@pytest.mark.parametrize(
    "make",
    [Fused, lambda: Moved(0, 1, 2), HeadsAsRows, lambda: Moved(0, 0, 0, head_dim=5), OneBias],
    ids=["fused", "rows of their own", "heads as rows", "unaligned", "one bias"],
)
def test_other_graphs_stay_as_they_are(make: Callable[[], nn.Module]) -> None:
    merged(make(), times=0)


def test_weights_that_are_no_parameters_stay_apart() -> None:
    graph = aten_graph(Packed(), torch.randn(9, WIDTH), LENGTHS)
    for node in graph.module.graph.find_nodes(op="placeholder"):
        node.meta["is_parameter"] = False
    assert merged_projections(graph.module) == 0


class Block(Packed):
    """Attention and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(F.silu, WIDTH, gated=True)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = x + super().forward(x, cu_seqlens)
        return x + self.mlp(x)


def test_an_mlp_is_left_to_other_passes() -> None:
    module, x = Block(), torch.randn(9, WIDTH)
    graph = rewritten(pad_mlp_width, module, x, LENGTHS)
    assert graph.apply(merged_projections) == 1
    assert graph.apply(measured_activations) == 1
    assert graph.count(linear) == 1 and num_products(graph) == 3
    torch.testing.assert_close(graph.run(), module(x, LENGTHS))


@pytest.mark.parametrize("rotary", [False, True])
def test_heads_are_made_wide_in_the_common_layer(rotary: bool) -> None:
    module = Batched(by_ours, rotated if rotary else same, head_dim=72)
    graph = merged_batch(module)
    assert graph.apply(wide_heads) == 1
    assert num_products(graph) == 2
    assert graph.count(aten.constant_pad_nd.default) == rotary  # the others' zeros are in the weights
    read = [node for node in graph.derived if node.users]
    assert len(read) == 3  # not those that are as wide as they were
    torch.testing.assert_close(graph.run(), module(graph.args[-1]))
