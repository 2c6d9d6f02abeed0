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


def pad_plane(captured: torch.Tensor, value: torch.Tensor) -> None:
    captured.fill_(0)
    captured[:, : value.shape[1]].copy_(value)


class InPlanes(PackedModel):
    """As vLLM's MiniMax-M3, one of whose inputs has its rows in the second dimension."""

    def get_encoder_cudagraph_config(self) -> Config:
        config = super().get_encoder_cudagraph_config()
        config.padding_logics["item"] = pad_plane
        return config

    def prepare_encoder_cudagraph_capture_inputs(self, *args: Any, **kwargs: Any) -> Any:
        made = super().prepare_encoder_cudagraph_capture_inputs(*args, **kwargs)
        made.values["item"] = made.values["item"].expand(2, -1).contiguous()
        return made

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any, **kwargs: Any) -> Any:
        made = super().prepare_encoder_cudagraph_replay_buffers(*args, **kwargs)
        made.values["item"] = made.values["item"].expand(2, -1)
        return made

    def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Any:
        return super().encoder_cudagraph_forward({**inputs, "item": inputs["item"][1]}, path)


def test_inputs_are_padded_along_any_dimension_by_their_padding_logic() -> None:
    model = InPlanes()
    manager = captured(model)
    for inputs in (batch(3, 1, 2), batch(4, 4), batch(1), batch(5)):
        assert_equal_items(manager.execute(inputs), alone(model, inputs))
    assert manager.stats().misses == {}


class FewerRows(PackedModel):
    """Makes captures of as many rows as a function says."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    def prepare_encoder_cudagraph_capture_inputs(self, token_budget: int, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_encoder_cudagraph_capture_inputs(self.rows(token_budget), *args, **kwargs)

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any, **kwargs: Any) -> Any:
        made = super().prepare_encoder_cudagraph_replay_buffers(*args, **kwargs)
        made.values["divisor"].fill_(2)  # wherever an item lies in a batch
        return made


@pytest.mark.parametrize(
    ("rows", "held"),
    [
        (lambda budget: budget, {4: 4, 7: 7, 16: 16}),
        (lambda budget: budget // 4 * 4, {4: 4, 7: 4, 16: 16}),  # vLLM's GLM-4.1V
        (lambda budget: max(budget // 6, 1) * 6, {4: 4, 7: 6, 16: 12}),  # InternVL
        (lambda budget: min(budget // 2, 3) * 2, {4: 4, 7: 6, 16: 6}),  # Gemma 3
        (lambda budget: -(-budget // 4) * 4, {4: 4, 7: 7, 16: 16}),  # Qwen
        (lambda budget: budget // 4 * 3, {4: 4, 7: 4, 16: 16}),  # DeepSeek-OCR, which adds rows later
    ],
)
def test_what_captures_hold_is_what_the_tower_makes_inputs_for(rows: Any, held: dict[int, int]) -> None:
    config = fx.EncoderConfig(token_budgets=tuple(held), max_items_per_batch=4, mode="breakable")
    manager = fx.EncoderCudaGraphManager(FewerRows(rows), config, log_interval=0)
    manager.capture()
    assert manager.paths["default"].costs.max_tokens == held


def test_no_batch_is_packed_that_captures_do_not_hold() -> None:
    model = FewerRows(lambda budget: min(budget, 6))
    manager = captured(model)
    inputs = batch(3, 4, 2, 3)
    assert_equal_items(manager.execute(inputs), alone(model, inputs))
    assert manager.stats().hits == 4
    manager.execute(batch(7))
    assert manager.stats().misses == {MissReason.EXTENT_EXCEEDED: 1}
