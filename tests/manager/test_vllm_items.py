"""What vLLM's towers say of their items in ways of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.item_facts import ItemFacts
from fxsplit_encoder.planning import MissReason

from .mock_towers import Config, ItemSpec, PackedModel, alone, assert_equal_items, batch


def captured(model: Any) -> fx.EncoderCudaGraphManager:
    config = fx.EncoderConfig(token_budgets=(4, 8), max_items_per_batch=4, mode="breakable")
    manager = fx.EncoderCudaGraphManager(model, config, log_interval=0)
    manager.capture()
    return manager


class NamesOfItsOwn(PackedModel):
    names: tuple[str, ...] = ("vision_chunk",)

    def get_encoder_cudagraph_config(self) -> Config:
        config = super().get_encoder_cudagraph_config()
        config.modalities = list(self.names)
        return config


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("vision_chunk",), None),
        (("image",), None),
        (("video",), MissReason.UNSUPPORTED_INPUT),
        ((), MissReason.UNSUPPORTED_INPUT),
    ],
)
def test_a_modality_of_another_name_is_served(names: tuple[str, ...], reason: MissReason | None) -> None:
    model = NamesOfItsOwn()
    model.names = names
    manager = captured(model)
    inputs = batch(3, 1)
    assert_equal_items(manager.execute(inputs), alone(model, inputs))
    stats = manager.stats()
    assert (stats.hits, dict(stats.misses)) == ((2, {}) if reason is None else (0, {reason: 2}))


class ComputedSizes(PackedModel):
    """As vLLM's Step3-VL, whose sizes are elements of a tensor."""

    make: Any = torch.tensor

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[ItemSpec]:
        sizes = [type(self).make(n) for n in mm_kwargs["lengths"]]
        return [ItemSpec(size, size, {"default": size}) for size in sizes]


@pytest.mark.parametrize("make", [torch.tensor, np.int64])
def test_sizes_may_be_elements_of_a_tensor(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputedSizes, "make", staticmethod(make))
    model = ComputedSizes()
    manager = captured(model)
    inputs = batch(3, 1)
    assert_equal_items(manager.execute(inputs), alone(model, inputs))
    assert manager.stats().hits == 2


@pytest.mark.parametrize("size", [torch.tensor([1, 2]), torch.tensor(-1), torch.tensor(float("nan"))])
def test_sizes_that_no_item_has_are_refused(size: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputedSizes, "make", staticmethod(lambda n: size))
    with pytest.raises(InputError, match="reads item 0 as one of"):
        captured(ComputedSizes()).execute(batch(1))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"video_grid_thw": torch.tensor([[2, 4, 4], [7, 2, 2]])}, [2, 7]),
        ({"video_grid_thw": [[2, 4, 4], [7, 2, 2]]}, [2, 7]),
        ({"video_grid_thw": [[2, 4, 4]]}, [1, 1]),
        ({"image_grid_thw": [[1, 4, 4], [1, 2, 2]]}, [1, 1]),
    ],
)
def test_grids_of_videos_tell_their_frames(inputs: dict[str, Any], expected: list[int]) -> None:
    tower: Any = PackedModel()
    assert ItemFacts(tower).segments(inputs, 2) == expected
