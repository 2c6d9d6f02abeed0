import functools
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fxsplit_encoder.compile.passes.decomposed_bias import decomposed_bias
from fxsplit_encoder.compile.rewriting import call_function
from fxsplit_encoder.towers.tiles import MASKED_ATTENTION_TAKES_UNKNOWN_SIZES

from .aten_graphs import aten_graph, rewritten

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default

HEADS, HEAD_DIM = 2, 16
Bias = Callable[[Tensor, Tensor], Tensor]


def joined(rows: Tensor, columns: Tensor) -> Tensor:
    """As SAM does: (images, heads, y, x, rows) and (images, heads, y, x, columns) to (.., queries, keys)."""
    return (rows[..., :, None] + columns[..., None, :]).flatten(4, 5).flatten(2, 3)


def columns_first(rows: Tensor, columns: Tensor) -> Tensor:
    return (columns[..., None, :] + rows[..., :, None]).flatten(4, 5).flatten(2, 3)


class GridAttention(torch.nn.Module):
    """(images, rows, columns, 3 * width) to (images, rows * columns, width), with terms made from queries."""

    def __init__(
        self, grid: tuple[int, int], bias: Bias = joined, head_dim: int = HEAD_DIM, **options: object
    ) -> None:
        super().__init__()
        self.grid, self.bias, self.options = grid, bias, options
        self.rows, self.columns = (torch.nn.Parameter(torch.randn(side, side, head_dim)) for side in grid)

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.flatten(1, 2).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        of_grid = q.unflatten(2, self.grid)
        rows = torch.einsum("nayxc,ykc->nayxk", of_grid, self.rows)
        columns = torch.einsum("nayxc,xkc->nayxk", of_grid, self.columns)
        mask = self.bias(rows, columns)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)  # type: ignore[arg-type]
        return attended.transpose(1, 2).flatten(2)


def example(grid: tuple[int, int], head_dim: int = HEAD_DIM, images: int = 3) -> Tensor:
    return torch.randn(images, *grid, 3 * HEADS * head_dim)


@pytest.mark.parametrize(
    ("grid", "bias"),
    [((5, 5), joined), ((4, 6), columns_first), ((8, 8), joined)],
    ids=["padded to 32", "oblong", "as wide as is"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_terms_become_features(grid: tuple[int, int], bias: Bias, dtype: torch.dtype) -> None:
    attention, x = GridAttention(grid, bias).to(dtype), example(grid).to(dtype)
    graph = aten_graph(attention, x)
    assert decomposed_bias(graph.module) == 1
    graph.module.graph.eliminate_dead_code()
    (node,) = graph.module.graph.find_nodes(op="call_function", target=ATTENTION)
    assert node.kwargs == {"scale": HEAD_DIM**-0.5}
    assert node.args[0].meta["val"].shape[-1] == -(-(HEAD_DIM + sum(grid)) // 8) * 8
    assert graph.count(aten.add.Tensor) == 0
    result = graph.run()
    if dtype == torch.float32:
        torch.testing.assert_close(result, attention(x))
        more = example(grid, images=7)
        torch.testing.assert_close(graph.run(more), attention(more))
        return
    exact = GridAttention(grid, bias).double()
    exact.load_state_dict(attention.state_dict())
    expected = exact(x.double())
    ours, eager = ((y.double() - expected).norm() for y in (result, attention(x)))
    assert ours <= eager


OTHER_BIASES: dict[str, Bias] = {
    "a further sum": lambda rows, columns: joined(rows, columns) + 1,
    "another factor": lambda rows, columns: (
        torch.add(rows[..., :, None], columns[..., None, :], alpha=2).flatten(4, 5).flatten(2, 3)
    ),
    "turned": lambda rows, columns: joined(rows, columns).transpose(2, 3),
    "broadcast": lambda rows, columns: joined(rows, columns)[:, :1],
    "a mask": lambda rows, columns: joined(rows.masked_fill(rows > 1, -torch.inf), columns),
    "no columns": lambda rows, columns: (
        (rows[..., :, None] + rows[..., :, None].expand(-1, -1, -1, -1, -1, 5)).flatten(4, 5).flatten(2, 3)
    ),
}


@pytest.mark.parametrize(
    "attention",
    [
        *(GridAttention((5, 5), bias) for bias in OTHER_BIASES.values()),
        GridAttention((5, 5), head_dim=12),
        GridAttention((5, 5), scale=0.3),
        GridAttention((239, 2)),
        GridAttention((5, 5)).half(),  # terms might overflow
    ],
    ids=[*OTHER_BIASES, *("no power of two", "no power of two given", "too wide", "float16")],
)
def test_others_stay(attention: GridAttention) -> None:
    head_dim = attention.rows.shape[-1]
    x = example(attention.grid, head_dim, images=2).to(attention.rows.dtype)
    rewritten(decomposed_bias, attention, x, times=0)


@pytest.mark.skipif(not MASKED_ATTENTION_TAKES_UNKNOWN_SIZES, reason="this torch cannot trace it")
def test_a_grid_of_any_number_of_rows_stays() -> None:
    def attend(x: Tensor) -> Tensor:
        q = x.flatten(0, 1).unflatten(-1, (HEADS, HEAD_DIM)).transpose(0, 1)[None]
        rows, columns = (q @ line[:, :HEAD_DIM].t() for line in (x[:, 0], x[0]))
        mask = (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    graph = aten_graph(attend, torch.randn(6, 5, HEADS * HEAD_DIM))
    assert graph.count(ATTENTION) == 1
    assert decomposed_bias(graph.module) == 0


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize(("dtype", "changed"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_on_cuda_cudnn_takes_over(kernel: str, dtype: torch.dtype, changed: int) -> None:
    """As AOT leaves it: the bias of 25 keys is aligned to 32 and cut again. No device is needed to trace."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def given(name: str, *shape: int) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
        return node

    call = functools.partial(call_function, graph)
    qkv = [given(name, 3, HEADS, 25, HEAD_DIM) for name in "qkv"]
    products = [
        call(aten.bmm.default, given(f"left_{name}", 6, 25, 16), given(f"right_{name}", 6, 16, 5))
        for name in ("rows", "columns")
    ]
    rows = call(aten.view.default, products[0], [3, HEADS, 5, 5, 5, 1])
    columns = call(aten.view.default, products[1], [3, HEADS, 5, 5, 1, 5])
    bias = call(aten.view.default, call(aten.add.Tensor, rows, columns), [3, HEADS, 25, 25])
    aligned = call(aten.slice.Tensor, call(aten.constant_pad_nd.default, bias, [0, 7]), -1, 0, 25)
    results = call(getattr(aten, f"_scaled_dot_product_{kernel}_attention").default, *qkv, aligned, False)
    attended = call(operator.getitem, results, 0)
    before = attended.meta["val"]
    graph.output((call(aten.transpose.int, attended, 1, 2),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert decomposed_bias(module) == changed
    graph.eliminate_dead_code()
    cudnn = graph.find_nodes(op="call_function", target=aten._scaled_dot_product_cudnn_attention.default)
    assert len([node for node in cudnn if node.args[3] is None]) == changed
    (result,) = graph.output_node().args[0]  # type: ignore[misc, union-attr]
    after = result.args[0].meta["val"]
    assert (after.shape, after.stride(), after.device) == (before.shape, before.stride(), before.device)
