import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.contiguous_rows import contiguous_rows

from .aten_graphs import Graph, Mlp, aten_graph

WIDTH = 12


class Tower(nn.Module):
    """SigLIP's beginning: no class token, so the residual stream keeps the layout of the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.positions = nn.Embedding(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Mlp(F.gelu, WIDTH, 24) for _ in range(3))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embedding(pixels).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


def by_feature(graph: Graph) -> int:
    """The residual additions that write with a stride."""
    nodes = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    return sum(node.meta["val"].stride(-1) != 1 for node in nodes)


def test_the_whole_stream_follows_one_copy() -> None:
    tower, pixels = Tower(), torch.randn(5, 3, 4, 4)
    graph = aten_graph(tower, pixels)
    assert by_feature(graph) == 4
    assert contiguous_rows(graph.module) == 1
    assert by_feature(graph) == 1  # the first, which the copy follows
    result = graph.run()
    assert result.is_contiguous()
    torch.testing.assert_close(result, tower(pixels))
    assert contiguous_rows(graph.module) == 0


def test_rows_that_lie_well_stay() -> None:
    for forward, shape in (
        (lambda x: x * 2 + 1, (5, 4, 12)),
        (lambda x: x.transpose(0, 1) * 2, (5, 4, 12)),
        (lambda x: x.view(5, 2, 2, 12).permute(0, 3, 1, 2) * 2, (5, 4, 12)),
        (lambda x: x[..., :1] * 2, (5, 4, 12)),
    ):
        graph = aten_graph(forward, torch.randn(shape))
        assert contiguous_rows(graph.module) == 0
