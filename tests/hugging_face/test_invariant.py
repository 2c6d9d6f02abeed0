"""`invariant: true` for accelerated models: the bits of an image alone, never those of the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.hugging_face import served_towers_of
from tests.towers import tiny_towers
from tests.towers.tiny_inputs import Item


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tower() -> Any:
    config = fx.EncoderConfig(invariant=True, mode="full", token_budgets=[16, 64], max_items_per_batch=4)
    return fx.accelerate(tiny_towers.make("Qwen3VLVisionModel"), config)


def test_images_get_the_bits_that_they_get_alone_and_other_calls_are_refused(tower: Any) -> None:
    items = [Item("image", (1, side, 6), side) for side in (2, 4, 8)]
    inputs = tiny_towers.QWEN

    def encoded(chosen: list[Item]) -> list[torch.Tensor]:
        given = inputs.make(chosen)
        with torch.no_grad():
            output = tower(given["pixel_values"], given["image_grid_thw"])
        return list(output.pooler_output.split([inputs.tokens(item) for item in chosen]))

    together = encoded(items)
    for item, result in zip(items, together, strict=True):
        assert torch.equal(encoded([item])[0], result)
    assert served_towers_of(tower)
    assert fx.stats(tower).hit_rate == 1.0
    given = inputs.make(items)
    with (
        torch.autocast("cpu"),
        torch.no_grad(),
        pytest.raises(InputError, match=r"invariant: .*\(autocast\)"),
    ):
        tower(given["pixel_values"], given["image_grid_thw"])
    with pytest.raises(InputError, match=r"invariant: .*\(gradients\)"):
        tower(given["pixel_values"].requires_grad_(), given["image_grid_thw"])
