"""A real tower behind the connector: what its manager makes of the items, and no other values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import PIXEL_TABLE, MediaItem, PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.errors import InputError

from ..conftest import TinyTowers
from . import tiny_vision
from .scenes import wait

GRIDS = [(1, 4, 4), (1, 2, 8), (1, 8, 8), (1, 4, 6)]
LEVELS = {"deepstack_levels": 2}
VIDEOS = [(2, 4, 4), (3, 2, 4)]


class GridProcessor:
    """Media are a grid and a seed; pixels are random."""

    def __init__(self, make_batch: Callable[..., dict[str, Any]]) -> None:
        self._make_batch = make_batch

    def count_tokens(self, item: MediaItem) -> int:
        (frames, height, width), _ = item.media  # type: ignore[misc]
        return frames * height * width // 4

    def digest(self, item: MediaItem) -> bytes:
        return hashlib.sha256(f"{item.modality} {item.media}".encode()).digest()

    def prepare(self, item: MediaItem) -> PreparedItem:
        grid, seed = item.media  # type: ignore[misc]
        kinds = {"images": [grid]} if item.modality == "image" else {"videos": [grid]}
        inputs = self._make_batch(**kinds, seed=seed)
        return PreparedItem(
            item.modality, self.digest(item), inputs, self.count_tokens(item), {"grid": grid, **LEVELS}
        )


@pytest.fixture(scope="module")
def encoder(make_manager: Callable[..., Any]) -> ManagerEncoder:
    return ManagerEncoder(make_manager(mode="full"))


@pytest.fixture
def processor(make_batch: Callable[..., dict[str, Any]]) -> GridProcessor:
    return GridProcessor(make_batch)


def test_features_are_those_of_the_tower(
    encoder: ManagerEncoder,
    processor: GridProcessor,
    tiny_towers: TinyTowers,
    encode: Callable[..., list[torch.Tensor]],
) -> None:
    items = [
        *(MediaItem("image", (grid, seed)) for seed, grid in enumerate(GRIDS)),
        *(MediaItem("video", (grid, seed)) for seed, grid in enumerate(VIDEOS)),
    ]
    order = [4, 0, 1, 5, 2, 3]  # videos among images
    mixed = [items[index] for index in order]
    tokens = [1, *(9 if item.modality == "image" else 8 for item in mixed), 2]
    placeholders = PositionMap(tokens, [item.modality for item in mixed], {"image": 9, "video": 8})
    expected = [encode(tiny_towers.reference, dict(processor.prepare(item).inputs))[0] for item in mixed]
    with Connector(processor, [lambda: encoder], ConnectorConfig(device_bytes=40_000)) as each:
        ticket = each.submit(EncodeRequest("r", mixed, placeholders))
        assert ticket.token_counts == tuple(len(rows) for rows in expected)
        assert wait(ticket) == "ready", ticket.error
        with each.read(ticket) as features:
            for index, rows in enumerate(expected):
                torch.testing.assert_close(features[index].rows, rows, rtol=0, atol=1e-5)
                assert features[index].metadata == {"grid": mixed[index].media[0], **LEVELS}
        length = placeholders.merged_length(ticket.token_counts)
        text, levels = torch.zeros(length, 96), []
        for start in range(0, length, 17):
            stop = min(start + 17, length)
            levels.append(each.merge(ticket, (start, stop), text[start:stop]).levels)
        merged = torch.cat([text[1:-1], *torch.cat(levels, 1)], dim=1)
        torch.testing.assert_close(merged, torch.cat(expected), rtol=0, atol=1e-5)
        assert {str(ticket.residence(index)) for index in range(6)} == {"device", "host"}
        stats = encoder.manager.stats()
        assert stats.items >= 6 and not stats.misses
        assert each.audit() == []


@pytest.fixture(scope="module")
def tiny() -> ManagerEncoder:
    config = fx.EncoderConfig(mode="none")
    return ManagerEncoder(fx.EncoderCudaGraphManager(tiny_vision.tower(), config, log_interval=0))


def test_pixels_that_are_normalized_by_the_encoder_give_the_same_rows(tiny: ManagerEncoder) -> None:
    images = [tiny_vision.crop(number) for number in range(3)]
    items = [MediaItem("image", image) for image in images]
    items.insert(1, MediaItem("video", [images[0].resize((64, 32))] * 5))
    whole, later = (tiny_vision.processor(normalize_later=is_later) for is_later in (False, True))
    now, then = ([each.prepare(item) for item in items] for each in (whole, later))
    assert [item.digest for item in now] == [item.digest for item in then]
    for before, after in zip(now, then, strict=True):
        assert {tensor.dtype for tensor in after.inputs.values()} == {
            torch.uint8,
            torch.int64,
            torch.float32,
        }
        assert after.num_bytes < before.num_bytes / 2
        assert tiny.predict_cost(before) == tiny.predict_cost(after)
        assert torch.equal(tiny.stage(after).inputs[PIXEL_TABLE], after.inputs[PIXEL_TABLE])
    for before, after in zip(tiny.encode(now), tiny.encode([*map(tiny.stage, then)]), strict=True):
        assert torch.equal(before, after)


def test_items_with_tables_of_their_own_are_normalized_by_those(tiny: ManagerEncoder) -> None:
    item = tiny_vision.processor(normalize_later=True).prepare(MediaItem("image", tiny_vision.crop(0)))
    inverted = replace(
        item,
        inputs={
            **item.inputs,
            "pixel_values": 255 - item.inputs["pixel_values"],
            PIXEL_TABLE: item.inputs[PIXEL_TABLE].flip(1),
        },
    )
    alone, same, together = tiny.encode([item, inverted, item])
    assert torch.equal(alone, together)
    torch.testing.assert_close(alone, same, rtol=0, atol=1e-6)
    for number in range(20):
        other = replace(item, inputs={**item.inputs, PIXEL_TABLE: item.inputs[PIXEL_TABLE] + number})
        tiny.encode([other])
    assert len(tiny._tables) < 20


def in_double(item: PreparedItem) -> PreparedItem:
    return replace(item, inputs={**item.inputs, "pixel_values": item.inputs["pixel_values"].double()})


def test_costs_add_up_and_rise_with_size(encoder: ManagerEncoder, processor: GridProcessor) -> None:
    small, large = (processor.prepare(MediaItem("image", (grid, 0))) for grid in ((1, 2, 2), (1, 8, 8)))
    assert 0 < encoder.predict_cost(small) < encoder.predict_cost(large)


def test_staged_items_are_encoded_to_the_same_rows(encoder: ManagerEncoder, processor: GridProcessor) -> None:
    """In the tower's dtype; what was so already is the same."""
    encoder.start()
    items = [in_double(processor.prepare(MediaItem("image", (grid, 0)))) for grid in GRIDS]
    staged = [encoder.stage(item) for item in items]
    for before, after in zip(items, staged, strict=True):
        assert after.inputs["pixel_values"].dtype == torch.float32
        assert after.inputs["image_grid_thw"] is before.inputs["image_grid_thw"]
        assert after.digest == before.digest
        assert encoder.stage(after).inputs["pixel_values"] is after.inputs["pixel_values"]
    for before, after in zip(encoder.encode(items), encoder.encode(staged), strict=True):
        assert torch.equal(before, after)


def test_rows_are_as_wide_as_the_tower_says(encoder: ManagerEncoder) -> None:
    assert encoder.row_bytes("image") == encoder.row_bytes("video") == 3 * 96 * 4
    assert encoder.row_bytes("audio") is None
    assert ManagerEncoder(encoder.manager, modalities=["image"]).row_bytes("video") is None


def test_an_item_that_the_manager_refuses_does_not_harm_its_batch(
    encoder: ManagerEncoder, processor: GridProcessor
) -> None:
    class Broken(GridProcessor):
        def prepare(self, item: MediaItem) -> PreparedItem:
            prepared = super().prepare(item)
            if item.media[1] == 13:
                inputs = {**prepared.inputs, "pixel_values": prepared.inputs["pixel_values"][:-1]}
                return PreparedItem("image", prepared.digest, inputs, prepared.num_tokens)
            return prepared

    items = [MediaItem("image", ((1, 4, 4), seed)) for seed in (11, 12, 13, 14)]
    with Connector(Broken(processor._make_batch), [lambda: encoder]) as each:
        tickets = [each.submit(EncodeRequest("r", [item])) for item in items]
        told = [wait(ticket) for ticket in tickets]
        assert told == ["ready", "ready", "unavailable", "ready"]
        assert tickets[2].error is not None and not tickets[2].error.retryable


def test_items_of_one_modality_have_the_same_inputs(
    encoder: ManagerEncoder, processor: GridProcessor
) -> None:
    good = processor.prepare(MediaItem("image", ((1, 2, 2), 0)))
    odd = PreparedItem("image", b"", {"pixel_values": torch.zeros(4, 8)}, 1)
    with pytest.raises(InputError, match="image: expected items of the same inputs"):
        encoder.encode([good, odd])
