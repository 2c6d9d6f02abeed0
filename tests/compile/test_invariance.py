"""Which operations may be in a graph whose rows have to get the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxsplit_encoder.compile.invariance import check_proof, check_rows, row_dependence
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.passes.own_kernels import fixed_products
from fxsplit_encoder.errors import ConfigError

from .passes.aten_graphs import Graph, WithParameters, aten_graph

X, WEIGHT, BIAS = torch.randn(6, 16), torch.randn(24, 16), torch.randn(16)
INDEX = torch.tensor([2, 0, 1, 3, 5, 4])

KEPT: dict[str, Callable[..., Any]] = {
    "a linear layer": lambda x, i, w, b: F.linear(x, w),
    "a layer norm": lambda x, i, w, b: F.layer_norm(x, (16,), b, b),
    "functions of entries": lambda x, i, w, b: F.gelu(x) + x.sigmoid().masked_fill(x > 1, 0),
    "a mean over features": lambda x, i, w, b: x - x.mean(1, keepdim=True),
    "rows looked up": lambda x, i, w, b: x[i] + F.embedding(i, w),
    "parts and views": lambda x, i, w, b: torch.cat(x.view(-1, 2, 8).transpose(1, 2).chunk(2, 1), 2),
    "features flipped": lambda x, i, w, b: x.flip(1),
    "what is computed of parameters alone": lambda x, i, w, b: x + (w @ w.t()).sum() + w.mean(0),
}
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a mean over rows": (lambda x, i, w, b: x - x.mean(0), "mean runs over as many entries"),
    "rows flipped": (lambda x, i, w, b: x.flip(0), "flip runs over"),
    "a scan over rows": (lambda x, i, w, b: x.cumsum(0), "cumsum may choose"),
    "rows times rows": (lambda x, i, w, b: x @ x.t(), "mm may choose an algorithm"),
    "a batch of products": (lambda x, i, w, b: x.view(-1, 1, 16) @ x.view(-1, 16, 1), "bmm may choose"),
    "a convolution": (
        lambda x, i, w, b: F.conv1d(x.view(-1, 2, 8), w[:4, :6].reshape(4, 2, 3)),
        "convolution may choose",
    ),
    "rows added where indices say": (lambda x, i, w, b: x.index_add(0, i, x), "index_add may choose"),
    "attention with a mask": (
        lambda x, i, w, b: F.scaled_dot_product_attention(
            *(x.view(-1, 1, 2, 8),) * 3, attn_mask=torch.zeros(2, 2)
        ),
        "attention",
    ),
}


def traced(forward: Callable[..., Any]) -> Graph:
    return aten_graph(WithParameters(forward, WEIGHT, BIAS), X, INDEX)


def problems(forward: Callable[..., Any]) -> list[str]:
    graph = traced(forward)
    fixed_products(graph.module)
    return [f"{node.name}: {why}" for node, why in row_dependence(graph.module.graph)]


@pytest.mark.parametrize("name", KEPT)
def test_operations_that_keep_rows_apart_are_taken(name: str) -> None:
    assert problems(KEPT[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_may_add_in_another_order_are_named(name: str) -> None:
    forward, why = REFUSED[name]
    found = problems(forward)
    assert found
    assert any(why in each for each in found), found


def test_compilers_whose_kernels_depend_on_rows_are_refused() -> None:
    graph = traced(KEPT["functions of entries"])
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(
        ConfigError, match=r"on CUDA torch's own reductions .*allowed: auto, inductor; got 'eager'"
    ):
        check_rows(graph.module, cuda, "eager")
    check_rows(graph.module, cuda, "auto")
    if torch.get_num_threads() == 1:
        check_rows(graph.module, cpu, "auto")
        with pytest.raises(ConfigError, match="got 'inductor'"):
            check_rows(graph.module, cpu, "inductor")


def test_rows_that_may_read_one_another_are_refused() -> None:
    check_proof(PaddingReport(()), "s0")
    with pytest.raises(ConfigError, match="invariant: add_3: rows may depend on other rows: it mixes"):
        check_proof(PaddingReport((("add_3", "it mixes"),)), "s0")
    with pytest.raises(ConfigError, match="traced for one shape"):
        check_proof(PaddingReport(()), None)
