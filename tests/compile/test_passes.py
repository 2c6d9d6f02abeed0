from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder.compile.passes import PASSES, convolution_to_linear

FEATURES = 3 * 2 * 4 * 4
CONVOLUTION = torch.ops.aten.convolution.default


def aten_graph(forward: Any, *examples: Tensor) -> tuple[fx.GraphModule, list[Any]]:
    """The inference graph of a function, as the compiler sees it, and its inputs."""
    from torch._dynamo.backends.common import aot_autograd

    found: list[Any] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        found.append(module)

        def run(*args: Any) -> Any:
            found.append(list(args))
            return module(*args)

        return run

    torch._dynamo.reset()
    compiled: Any = torch.compile(forward, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep))
    for example in examples:
        torch._dynamo.mark_dynamic(example, 0)
    with torch.no_grad():
        compiled(*examples)
    return found[0], found[1]


def count(module: fx.GraphModule, target: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_patch_embedding_becomes_a_linear(dimensions: int, with_bias: bool) -> None:
    kernel = (2, 4, 4)[3 - dimensions :]
    weight = torch.randn(10, 3, *kernel)
    bias = torch.randn(10) if with_bias else None
    convolve = F.conv3d if dimensions == 3 else F.conv2d

    def forward(x: Tensor) -> Tensor:
        return convolve(x.view(-1, 3, *kernel), weight, bias, stride=kernel).flatten(1) * 2

    x = torch.randn(7, weight[0].numel())
    module, args = aten_graph(forward, x)
    assert count(module, CONVOLUTION) == 1
    assert convolution_to_linear(module) == 1
    module.recompile()
    module.graph.lint()
    assert count(module, CONVOLUTION) == 0
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(module(*args)[0], forward(x), rtol=1e-5, atol=1e-5)


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
    module, args = aten_graph(forward, x)
    before = count(module, CONVOLUTION)
    assert before == 1
    applied = convolution_to_linear(module)
    module.recompile()
    assert count(module, CONVOLUTION) == before - applied
    torch.testing.assert_close(module(*args)[0], forward(x))


def test_the_passes_run_in_every_build(trace: Any, inputs: Any) -> None:
    weight = torch.randn(6, 2, 2, 2)
    assert PASSES["convolution_to_linear"] is convolution_to_linear

    def forward(y: Tensor, i: Any) -> Tensor:
        return F.conv2d(y.view(-1, 2, 2, 2), weight).flatten(1)

    seen: list[str] = []

    def compile_piece(module: fx.GraphModule, values: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    bound = trace(forward, piece_compiler=compile_piece)
    assert "aten.mm.default" in seen
    assert "aten.convolution.default" not in seen
    attention = trace(lambda y, i: y * 1)
    torch.testing.assert_close(bound(inputs(20)), forward(attention(inputs(20)), {}))
