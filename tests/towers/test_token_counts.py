"""Items have as many tokens as the processors of their family reserve for them."""

from __future__ import annotations

from typing import Any

import pytest

import fxsplit_encoder as fx

from . import tiny_towers
from .token_counts import COUNTS

NAMES = fx.supported_towers()


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name in NAMES for number in range(len(COUNTS.get(name, (None,))))],
    ids=str,
)
def test_items_have_the_tokens_that_the_processor_counts(name: str, number: int) -> None:
    assert name in COUNTS, f"{name}: add where its token counts come from to COUNTS in token_counts.py"
    counts = COUNTS[name][number]
    tower: Any = fx.wrap(counts.tower() if counts.tower is not None else tiny_towers.make(name))
    inputs, tokens, patches = counts.count()
    specs = tower.get_encoder_cudagraph_item_specs(inputs)
    assert [spec.output_tokens for spec in specs] == tokens, counts.source
    if patches is not None:
        assert [spec.input_size for spec in specs[: len(patches)]] == patches, counts.source
