import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from fxsplit_encoder.compile.passes.conv_to_linear import conv_to_linear
from fxsplit_encoder.compile.rewriting import call_function, derivation, mark_parameters

from .aten_graphs import Mlp, aten_graph, rewritten

CONVOLUTION = torch.ops.aten.convolution.default
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class ImageEmbedding(nn.Module):
    """Of whole images: (images, channels * frames * height * width) to (images, patches, width)."""

    def __init__(
        self, sizes: tuple[int, ...], kernel: tuple[int, ...], channels_last: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        convolution = nn.Conv3d if len(kernel) == 3 else nn.Conv2d
        self.convolution = convolution(3, 10, kernel, stride=kernel, bias=bias)
        self.sizes = sizes
        self.channels_last = channels_last

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:
            images = x.view(-1, *self.sizes, 3).movedim(-1, 1)
        else:
            images = x.view(-1, 3, *self.sizes)
        return (self.convolution(images) * 2).flatten(2).transpose(1, 2) + 1

    @property
    def example(self) -> Tensor:
        return torch.randn(3, 3 * math.prod(self.sizes))


@pytest.mark.parametrize(("channels_last", "bias"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ((12, 10), (4, 5)),
        ((4, 3), (1, 3)),
        ((4, 12, 6), (2, 4, 3)),
        ((14, 14), (4, 5)),  # a remainder on both sides
        ((5, 9, 8), (2, 4, 3)),
    ],
)
def test_the_patches_of_an_image_are_rows_of_one_product(
    sizes: tuple[int, ...], kernel: tuple[int, ...], channels_last: bool, bias: bool
) -> None:
    embedding = ImageEmbedding(sizes, kernel, channels_last, bias)
    graph = rewritten(conv_to_linear, embedding, embedding.example, **CLOSE)
    assert graph.count(CONVOLUTION) == 0


def test_a_remainder_is_not_read() -> None:
    embedding = ImageEmbedding((11, 9), (4, 4))
    images = torch.full((2, 3, 11, 9), math.nan)
    images[:, :, :8, :8] = torch.randn(2, 3, 8, 8)
    graph = rewritten(conv_to_linear, embedding, images.flatten(1), **CLOSE)
    assert graph.run().isfinite().all()


class WithoutClassToken(nn.Module):
    """SigLIP's beginning: nothing is joined to the patches, so the residual stream keeps their layout."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, 2, stride=2)
        self.positions = nn.Embedding(4, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Mlp(F.gelu, width, 24) for _ in range(2))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embedding(pixels).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


@pytest.mark.parametrize("side", [4, 5])
def test_a_residual_stream_without_a_class_token_is_stored_row_by_row(side: int) -> None:
    tower, pixels = WithoutClassToken(), torch.randn(5, 3, side, side)
    graph = aten_graph(tower, pixels)

    def stored_by_feature() -> int:
        sums = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        return sum(node.meta["val"].stride(-1) != 1 for node in sums)

    assert stored_by_feature() == 3
    assert conv_to_linear(graph.module) == 1
    assert stored_by_feature() == 0
    torch.testing.assert_close(graph.run(), tower(pixels), **CLOSE)


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_of_a_single_window_the_stride_says_nothing(stride: int) -> None:
    def forward(x: Tensor) -> Tensor:
        images = x.view(-1, 3, 4, 4 + min(stride - 1, 3))
        return F.conv2d(images, torch.ones(5, 3, 4, 4), stride=stride)

    rewritten(conv_to_linear, forward, torch.randn(7, 12 * (4 + min(stride - 1, 3))), **CLOSE)


def on_cuda(images: int, pixels: int) -> fx.GraphModule:
    """A patch embedding of so many pixels a side. No device is needed to trace."""
    graph, mode = fx.Graph(), FakeTensorMode()
    inputs = [graph.placeholder(name) for name in ("weight", "bias", "pixels")]
    shapes = ((32, 3, pixels, pixels), (32,), (images, 3, 28, 28))
    for node, shape in zip(inputs, shapes, strict=True):
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    mark_parameters(graph, [0, 1])
    arguments = (inputs[2], *inputs[:2], [pixels, pixels], [0, 0], [1, 1], False, [0, 0], 1)
    graph.output((call_function(graph, CONVOLUTION, *arguments),))
    return fx.GraphModule(nn.Module(), graph)


def test_on_cuda_rows_of_an_odd_width_are_padded_for_the_product() -> None:
    """588 features of 14 x 14 pixels are 8 bytes too many."""
    graph = (module := on_cuda(images=2, pixels=14)).graph
    assert conv_to_linear(module) == 1
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert [tuple(n.meta["val"].shape) for n in product.args] == [(32,), (8, 592), (592, 32)]
    (derived,) = [node for node in graph.nodes if derivation(node) is not None]
    assert derived.meta["val"].shape == (32, 592)


def test_on_cuda_convolutions_of_one_pixel_stay_where_inductor_chooses_layouts() -> None:
    assert conv_to_linear(on_cuda(images=1, pixels=1)) == 0


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: F.conv2d(x.view(-1, 3, 4, 4), torch.ones(5, 3, 2, 2), stride=1),
        lambda x: F.conv2d(x.view(-1, 3, 2, 8), torch.ones(5, 3, 2, 3), stride=(2, 4)),
        lambda x: F.conv2d(x.view(-1, 3, 4, 4), torch.ones(5, 3, 4, 4), padding=1),
        lambda x: F.conv2d(x.view(-1, 4, 2, 6), torch.ones(6, 2, 2, 6), groups=2),
        lambda x: F.conv2d(x.view(-1, 3, 4, 4), torch.ones(5, 3, 2, 2), dilation=2),
        lambda x: F.conv_transpose2d(x.view(-1, 3, 4, 4), torch.ones(3, 5, 4, 4)),
    ],
    ids=["overlapping", "gaps", "padding", "groups", "dilation", "transposed"],
)
def test_other_convolutions_stay(forward: Any) -> None:
    graph = rewritten(conv_to_linear, forward, torch.randn(7, 48), times=0)
    assert graph.count(CONVOLUTION) == 1
