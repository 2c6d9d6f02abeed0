from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.conv_to_linear import conv_to_linear

from .aten_graphs import aten_graph

CONVOLUTION = torch.ops.aten.convolution.default


class PatchEmbedding(nn.Module):
    def __init__(self, dimensions: int, bias: bool) -> None:
        super().__init__()
        self.kernel = (2, 4, 4)[3 - dimensions :]
        convolution = nn.Conv3d if dimensions == 3 else nn.Conv2d
        self.convolution = convolution(3, 10, self.kernel, stride=self.kernel, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.view(-1, 3, *self.kernel)).flatten(1) * 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_patch_embedding_becomes_a_linear(dimensions: int, bias: bool) -> None:
    embedding = PatchEmbedding(dimensions, bias)
    x = torch.randn(7, embedding.convolution.weight[0].numel())
    graph = aten_graph(embedding, x)
    assert graph.count(CONVOLUTION) == 1
    assert conv_to_linear(graph.module) == 1
    assert graph.count(CONVOLUTION) == 0
    torch.testing.assert_close(graph.run(), embedding(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: F.conv2d(x.view(-1, 3, 4, 4), torch.ones(5, 3, 2, 2), stride=2),
        lambda x: F.conv2d(x.view(-1, 3, 4, 4), torch.ones(5, 3, 4, 4), padding=1),
        lambda x: F.conv2d(x.view(-1, 4, 2, 6), torch.ones(6, 2, 2, 6), groups=2),
        lambda x: F.conv2d(x.view(-1, 3, 4, 4), torch.ones(5, 3, 2, 2), dilation=2),
        lambda x: F.conv_transpose2d(x.view(-1, 3, 4, 4), torch.ones(3, 5, 4, 4)),
        lambda x: F.conv2d(x.view(-1, 4, 4, 3).permute(0, 3, 1, 2), torch.ones(5, 3, 4, 4)),
    ],
    ids=["several patches", "padding", "groups", "dilation", "transposed", "channels last"],
)
def test_other_convolutions_stay(forward: Any) -> None:
    x = torch.randn(7, 48)
    graph = aten_graph(forward, x)
    assert conv_to_linear(graph.module) == 0
    assert graph.count(CONVOLUTION) == 1
    torch.testing.assert_close(graph.run(), forward(x))
