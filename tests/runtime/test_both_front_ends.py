"""The same tower and inputs through the manager and through torch.compile: one ladder, the same hits, misses
and bits.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.backend import BudgetDispatcher, dispatchers
from fxsplit_encoder.runtime.statistics import Statistics

from ..small_tower import FEATURES, SmallAdapter
from ..towers.tiny_inputs import PackedInputs, items

# More than one output token each: a product of a single row may be summed in another order.
SIZES = ((1, 4, 6), (1, 2, 8), (1, 8, 8), (1, 12, 12))


def compiled_tower(tower: Any, config: fx.EncoderConfig, example: list[Any]) -> tuple[Any, BudgetDispatcher]:
    known = set(dispatchers())
    compiled = torch.compile(tower, backend="encoder_cg", options={"config": config})
    compiled(*example)
    (dispatcher,) = set(dispatchers()) - known
    dispatcher.clear()
    dispatcher.statistics = Statistics(log_interval=0)
    return compiled, dispatcher


def replays(stats: fx.ManagerStats) -> dict[Any, tuple[int, int, int]]:
    counts = {
        key: (each.replays, each.real_tokens, each.padded_tokens) for key, each in stats.budgets.items()
    }
    return {key: each for key, each in counts.items() if any(each)}


@pytest.mark.parametrize("settings", [{}, {"mode": "exact"}, {"mode": "piecewise"}], ids=str)
@torch.no_grad()
def test_the_same_ladder_hits_misses_and_bits(settings: dict[str, Any], fresh_dynamo: None) -> None:
    tower, inputs = SmallAdapter(), PackedInputs(patch_shape=(FEATURES,))
    config = fx.EncoderConfig(token_budgets=(8, 16), piece_compiler="eager", **settings)
    requests = [inputs.make([each]) for each in items("image", SIZES) for _ in range(3)]
    arguments = [list(request.values())[:2] for request in requests]
    manager = fx.EncoderCudaGraphManager(tower, config)
    manager.capture()
    compiled, dispatcher = compiled_tower(tower, config, arguments[0])
    for request, example in zip(requests, arguments, strict=True):
        (expected,) = manager.execute(request)
        torch.testing.assert_close(compiled(*example), expected, rtol=0, atol=0)
    stats = manager.stats()
    assert (stats.hits, Counter(stats.misses)) == (dispatcher.hits, dispatcher.misses)
    assert stats.hits + sum(stats.misses.values()) == len(requests)
    assert replays(fx.stats(compiled)) == replays(stats)
    (path,) = manager.paths_by_key.values()
    for program in dispatcher.programs.values():
        assert program.budgets == path.budgets
        assert program.captured.keys() <= path.captured.keys()
        assert program.unpadded.sizes == path.unpadded.sizes
        assert all(captured.mode == path.captured[b].mode for b, captured in program.captured.items())
