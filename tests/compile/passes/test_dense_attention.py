from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.compile.options import DENSE_ATTENTION, splitting_targets
from fxsplit_encoder.compile.passes.own_kernels import dense_attention
from fxsplit_encoder.kernels.attention import dense_attention as op

from .aten_graphs import aten_graph, rewritten

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
HEADS, TOKENS, HEAD_DIM = 2, 5, 8
torch_attention = torch.nn.functional.scaled_dot_product_attention


def example(dtype: torch.dtype = torch.bfloat16, batch: int = 3) -> Tensor:
    return torch.randn(batch, TOKENS, 3 * HEADS * HEAD_DIM, dtype=dtype)


def projected(qkv: Tensor) -> list[Tensor]:
    """Queries, keys and values as a fused linear layer leaves them."""
    return [part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]


def attention(qkv: Tensor, **options: float) -> Tensor:
    return torch_attention(*projected(qkv), **options).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_over_a_batch_is_replaced(dtype: torch.dtype, scale: float | None) -> None:
    x = example(dtype)
    options = {} if scale is None else {"scale": scale}
    graph = aten_graph(lambda qkv: attention(qkv, **options), x)
    assert dense_attention(graph.module) == 1
    assert (graph.count(op), graph.count(ATTENTION)) == (1, 0)
    result = graph.run().double()
    exact = attention(x.double(), **options)
    ours, torchs = ((y - exact).norm() for y in (result, attention(x, **options).double()))
    assert ours <= 1.1 * torchs


def logarithms_too(qkv: Tensor) -> Tensor:
    attended, logsumexp = ATTENTION(*projected(qkv))
    return attended * logsumexp[..., None].to(attended.dtype)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda qkv: torch_attention(*projected(qkv), attn_mask=qkv[:, None, :, :TOKENS]),
    "causal": lambda qkv: torch_attention(*projected(qkv), is_causal=True),
    "one query": lambda qkv: torch_attention(projected(qkv)[0][:, :, :1], *projected(qkv)[1:]),
    "stored head by head": lambda qkv: torch_attention(*(part.contiguous() for part in projected(qkv))),
    "its logarithms too": logarithms_too,
    "in float32": lambda qkv: attention(qkv.float()),
}


@pytest.mark.parametrize("forward", OTHERS.values(), ids=OTHERS)
def test_what_is_not_plain_attention_over_rows_stays(forward: Callable[[Tensor], Tensor]) -> None:
    rewritten(dense_attention, forward, example(), times=0)


def test_the_graph_is_split_there_too() -> None:
    assert op in splitting_targets([DENSE_ATTENTION])
    assert op not in splitting_targets(["fxsplit::varlen_attention"])
