"""The replays of a call, as the benchmarks time them."""

from __future__ import annotations

import statistics

import pytest
import torch
from timing import replays_ms, watching_replays

pytestmark = pytest.mark.gpu


def test_the_graphs_of_a_call_are_timed_together() -> None:
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.mm(matrix, matrix)
    graph = torch.cuda.CUDAGraph()
    with watching_replays():
        with torch.cuda.graph(graph):
            torch.mm(matrix, matrix)
        replay = graph.replay  # as a capture keeps it
        once = statistics.median(replays_ms(replay))
        twice = statistics.median(replays_ms(lambda: (replay(), replay())))
        assert 1.5 * once < twice < 2.5 * once
        assert replays_ms(lambda: torch.mm(matrix, matrix)) == []
