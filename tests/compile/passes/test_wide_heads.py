from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.wide_heads import wide_heads
from fxsplit_encoder.kernels.attention import dense_attention, varlen_attention

from .aten_graphs import Batched, Graph, Using, by_ours, rewritten, rotated

HEADS, WIDTH, WIDE = 2, 72, 80
SCALE = WIDTH**-0.5


class Packed(nn.Module):
    """Attention over segments, whose queries and keys are computed with in between, or not."""

    def __init__(
        self, width: int = WIDTH, *, order: str = "parts first", bias: bool = True, rotary: bool = True
    ) -> None:
        super().__init__()
        self.width, self.features = width, HEADS * width
        self.order, self.rotary = order, rotary
        self.qkv = nn.Linear(20, 3 * self.features, bias=bias)
        self.out = nn.Linear(self.features, 20, bias=bias)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.order == "heads first":
            return self.qkv(x).view(-1, HEADS, 3, self.width).unbind(2)
        return self.qkv(x).view(-1, 3, HEADS, self.width).permute(1, 0, 2, 3).unbind(0)

    def attended(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        return varlen_attention(q, k, v.unsqueeze(0).squeeze(0), cu_seqlens, 5, SCALE)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.out(self.attended(x, cu_seqlens).unsqueeze(0).view(-1, self.features))


def widened(module: nn.Module, times: int = 1) -> Graph:
    lengths = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    return rewritten(wide_heads, module, torch.randn(9, 20), lengths, times=times)


def widths(graph: Graph) -> set[int]:
    targets = (varlen_attention, dense_attention)
    calls = [node for node in graph.module.graph.nodes if node.target in targets]
    return {given.meta["val"].shape[-1] for call in calls for given in (*call.args[:3], call)}


def num_pads(graph: Graph) -> int:
    return graph.count(torch.ops.aten.constant_pad_nd.default)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_attention_over_segments_gives_the_same(rotary: bool, bias: bool) -> None:
    graph = widened(Packed(rotary=rotary, bias=bias))
    assert widths(graph) == {WIDE}
    assert num_pads(graph) == (2 if rotary else 0)  # the values' zeros are in the weights


def test_heads_may_be_apart_where_nothing_else_reads_them() -> None:
    widened(Packed(order="heads first", rotary=False))


def test_attention_over_a_batch_gives_the_same() -> None:
    graph = rewritten(wide_heads, Batched(by_ours, head_dim=WIDTH), torch.randn(3, 7, 32))
    assert widths(graph) == {WIDE} and num_pads(graph) == 0
    assert len(graph.derived) == 7


def read_twice(packed: Any, *inputs: Tensor) -> Tensor:
    result = packed.attended(*inputs).view(-1, packed.features)
    return packed.out(result) + result[:, :20]


def heads_inside_of_features(packed: Any, *inputs: Tensor) -> Tensor:
    return packed.out(packed.attended(*inputs).transpose(1, 2).reshape(-1, packed.features))


OTHERS = {
    "what is computed with is not stored head by head": Packed(order="heads first"),
    "read twice": Using(Packed(), read_twice),
    "a function": Using(Packed(), lambda each, *given: each.out(each.attended(*given).flatten(1).relu())),
    "heads inside of features": Using(Packed(), heads_inside_of_features),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS)
def test_other_graphs_stay_as_they_are(module: nn.Module) -> None:
    widened(module, times=0)


@pytest.mark.parametrize(
    ("width", "pays"), [(16, False), (20, False), (24, False), (72, True), (88, True), (64, False)]
)
def test_only_widths_that_need_little_are_padded(width: int, pays: bool) -> None:
    widened(Packed(width), times=int(pays))


class Blocks(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Packed() for _ in range(depth))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, cu_seqlens)
        return x


def test_equal_blocks_keep_their_parts_in_one_order() -> None:
    graph = widened(Blocks(8), times=8)
    made = [node.meta["derived"][0].keywords for node in graph.derived]
    arranged = [keywords["pieces"] for keywords in made if "pieces" in keywords]
    assert len(arranged) == 16 and len(set(arranged)) == 1
