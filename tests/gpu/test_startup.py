"""How a start compiles on a device: equal blocks traced once, and pieces out of Inductor's cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxsplit_encoder as fx

pytestmark = pytest.mark.gpu


def test_a_second_compile_traces_blocks_once_and_compiles_no_piece(towers: Any, inlined: list[int]) -> None:
    made = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = fx.EncoderConfig(
            mode="full", token_budgets=(64, 1024), max_items_per_batch=4, max_frames_per_batch=4
        )
        made.append(fx.EncoderCudaGraphManager(towers[2], config))
        made[-1].compile()
        assert not made[-1].reports
    program = made[-1].programs["default"].program
    inductor = torch._dynamo.utils.counters["inductor"]
    assert inductor["fxgraph_cache_hit"] == program.num_distinct
    assert inductor["fxgraph_cache_miss"] == 0
    assert inlined[0] == inlined[1] > 0
