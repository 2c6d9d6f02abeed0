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
from ..towers.tiny_towers import tiny

QWEN3, QWEN25 = "Qwen3VLVisionModel", "Qwen2_5_VisionTransformerPretrainedModel"

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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (None, {"token_budgets": (8, 16), "piece_compiler": "eager"}),
        pytest.param(QWEN3, {}, marks=pytest.mark.exhaustive),
        pytest.param(QWEN25, {"token_budgets": (8, 40)}, marks=pytest.mark.exhaustive),
        pytest.param(QWEN3, {"mode": "exact"}, marks=pytest.mark.exhaustive),
        pytest.param(QWEN3, {"mode": "piecewise", "token_budgets": (4, 16)}, marks=pytest.mark.exhaustive),
    ],
)
@torch.no_grad()
def test_the_same_ladder_hits_misses_and_bits(
    name: str | None, options: dict[str, Any], fresh_dynamo: None
) -> None:
    tower: Any = SmallAdapter() if name is None else fx.wrap(tiny(name).make())
    inputs = PackedInputs(patch_shape=(FEATURES,)) if name is None else tiny(name).inputs
    config = fx.EncoderConfig(**options)
    requests = [inputs.make([each]) for each in items("image", SIZES) for _ in range(3)]
    arguments = [list(request.values())[:2] for request in requests]
    manager = fx.EncoderCudaGraphManager(tower, config)
    manager.capture()
    compiled, dispatcher = compiled_tower(tower, config, arguments[0])
    for request, example in zip(requests, arguments, strict=True):
        (expected,) = manager.execute(request)
        got = compiled(*example)
        rows = got if name is None else got.pooler_output
        torch.testing.assert_close(rows, expected[:, : rows.shape[1]], rtol=0, atol=0)
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
