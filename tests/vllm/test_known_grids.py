"""What vLLM's own towers prepare of grids is kept; results are theirs, also after weights have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.integrations.vllm.known_grids import KeptMetadata
from tests.vllm.test_classes import AS_IT_IS, COMPILED, serve
from tests.vllm.tiny import TINY


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "GLM-4.1V"])
@pytest.mark.parametrize("settings", [AS_IT_IS, COMPILED], ids=["as it is", "compiled"])
def test_grids_that_came_before_are_not_prepared_again(name: str, settings: Any) -> None:
    for served in serve(TINY[name], settings):
        tower = served.model.visual
        assert isinstance(tower.prepare_encoder_metadata, KeptMetadata)
        prepared: list[Any] = []
        prepare = type(tower).prepare_encoder_metadata

        def count(
            grids: Any, tower: Any = tower, prepare: Any = prepare, prepared: Any = prepared, **options: Any
        ) -> Any:
            prepared.append(grids)
            return prepare(tower, grids, **options)

        tower.prepare_encoder_metadata = count
        tower.prepare_encoder_metadata = KeptMetadata(tower)
        batches = [[(1, 8, 8)], [(1, 4, 8), (1, 8, 4)]] * 2
        for expected_number in (2, 0):
            for sizes in batches:
                for got, expected in served.compare("image", sizes):
                    tolerance = 1e-5 * float(expected.abs().max())
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=tolerance)
            # The model's own forward prepares its own each time.
            assert len(prepared) == expected_number + len(batches)
            prepared.clear()
            with torch.inference_mode():
                for parameter in served.model.parameters():
                    parameter.data.mul_(1.5)
            served.manager.manager.check_weights()  # type: ignore[union-attr]
        assert served.hits == (12, 12)
