"""The kernels of a graph, as the profiler sees them."""

from __future__ import annotations

import pytest
import torch
from kernel_times import kernel_times, measure
from tables.kernel_times import ATTENTION, PRODUCTS, kind_of
from timing import device_ms

pytestmark = pytest.mark.gpu


@pytest.mark.alone
def test_the_kernels_inside_a_graph_are_seen() -> None:
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.mm(matrix, matrix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            torch.mm(matrix, matrix)
    rows = kernel_times(graph.replay, matrix.device)
    products = [row for row in rows if kind_of(row["kernel"]) == PRODUCTS]
    assert sum(row["calls"] for row in products) == 8
    replay = 1e3 * device_ms(graph.replay, matrix.device)
    assert 0.3 * replay < sum(row["us"] for row in rows) < 1.3 * replay


@torch.no_grad()
def test_every_block_attends_once(towers: tuple[object, object, object]) -> None:
    (row,) = measure(towers[2], [784])
    calls = [kernel["calls"] for kernel in row["kernels"] if kind_of(kernel["kernel"]) == ATTENTION]
    assert sum(calls) >= 6 and row["replay us"] > 0
