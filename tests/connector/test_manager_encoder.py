"""A real tower behind the connector: what its manager makes of the items, and no other values."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import PIXEL_TABLE, MediaItem, PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.inputs import PixelValues

from . import tiny_vision
from .scenes import wait


@pytest.fixture(scope="module")
def encoder() -> ManagerEncoder:
    return tiny_vision.encoder()


def prepared(number: int = 0, size: tuple[int, int] | None = None) -> PreparedItem:
    """An image."""
    image = tiny_vision.crop(number)
    return tiny_vision.processor().prepare(MediaItem("image", image.resize(size) if size else image))


def test_features_are_those_of_the_tower(encoder: ManagerEncoder) -> None:
    processor = tiny_vision.processor()
    images = [MediaItem("image", tiny_vision.crop(number)) for number in range(4)]
    videos = [MediaItem("video", tiny_vision.clip(number)) for number in range(2)]
    mixed = [videos[0], *images[:2], videos[1], *images[2:]]
    tokens = [1, *(9 if item.modality == "image" else 8 for item in mixed), 2]
    placeholders = PositionMap(tokens, [item.modality for item in mixed], {"image": 9, "video": 8})
    items = [processor.prepare(item) for item in mixed]
    expected = [tiny_vision.eager_rows(item) for item in items]
    with Connector(processor, [lambda: encoder], ConnectorConfig(device_bytes=4096)) as each:
        ticket = each.submit(EncodeRequest("r", mixed, placeholders))
        assert ticket.token_counts == tuple(len(rows) for rows in expected)
        assert wait(ticket) == "ready", ticket.error
        with each.read(ticket) as features:
            for index, rows in enumerate(expected):
                torch.testing.assert_close(features[index].rows, rows, rtol=0, atol=1e-5)
                assert features[index].metadata == items[index].metadata
        length = placeholders.merged_length(ticket.token_counts)
        text, levels = torch.zeros(length, tiny_vision.WIDTH), []
        for start in range(0, length, 17):
            stop = min(start + 17, length)
            levels.append(each.merge(ticket, (start, stop), text[start:stop]).levels)
        merged = torch.cat([text[1:-1], *torch.cat(levels, 1)], dim=1)
        torch.testing.assert_close(merged, torch.cat(expected), rtol=0, atol=1e-5)
        assert {str(ticket.residence(index)) for index in range(6)} == {"device", "host"}
        stats = encoder.manager.stats()
        assert stats.items >= 6 and not stats.misses
        assert each.audit() == []


def test_pixels_that_are_normalized_by_the_encoder_give_the_same_rows(encoder: ManagerEncoder) -> None:
    images = [tiny_vision.crop(number) for number in range(3)]
    items = [MediaItem("image", image) for image in images]
    items.insert(1, MediaItem("video", [images[0].resize((64, 32))] * 5))
    whole, later = (tiny_vision.processor(normalize_later=is_later) for is_later in (False, True))
    now, then = ([each.prepare(item) for item in items] for each in (whole, later))
    assert [item.digest for item in now] == [item.digest for item in then]
    for before, after in zip(now, then, strict=True):
        assert {tensor.dtype for tensor in after.inputs.values()} == {torch.uint8, torch.int64, torch.float32}
        assert after.num_bytes < before.num_bytes / 2
        assert encoder.predict_cost(before) == encoder.predict_cost(after)
        assert torch.equal(encoder.stage(after).inputs[PIXEL_TABLE], after.inputs[PIXEL_TABLE])
    for before, after in zip(encoder.encode(now), encoder.encode([*map(encoder.stage, then)]), strict=True):
        assert torch.equal(before, after)


def test_images_that_the_encoder_resizes_give_the_same_rows(encoder: ManagerEncoder) -> None:
    images = [tiny_vision.crop(number) for number in range(3)]
    items = [MediaItem("image", image, {"scale": 0.7}) for image in images]
    items += [MediaItem("video", [images[0].resize((64, 32))] * 5), *(MediaItem("image", i) for i in images)]
    plain, raw = tiny_vision.processor(), tiny_vision.processor(on_device="resize")
    now, then = ([each.prepare(item) for item in items] for each in (plain, raw))
    assert not {item.digest for item in now} & {item.digest for item in then}
    for before, after in zip(now, then, strict=True):
        assert (before.num_tokens, before.metadata) == (after.num_tokens, after.metadata)
        assert encoder.predict_cost(before) == encoder.predict_cost(after)
    for before, after in zip(encoder.encode(now), encoder.encode([*map(encoder.stage, then)]), strict=True):
        assert torch.equal(before, after)


def test_items_with_tables_of_their_own_are_normalized_by_those(encoder: ManagerEncoder) -> None:
    item = tiny_vision.processor(normalize_later=True).prepare(MediaItem("image", tiny_vision.crop(0)))
    inverted = replace(
        item,
        inputs={
            **item.inputs,
            "pixel_values": 255 - item.inputs["pixel_values"],
            PIXEL_TABLE: item.inputs[PIXEL_TABLE].flip(1),
        },
    )
    alone, same, together = encoder.encode([item, inverted, item])
    assert torch.equal(alone, together)
    torch.testing.assert_close(alone, same, rtol=0, atol=1e-6)
    for number in range(20):
        other = replace(item, inputs={**item.inputs, PIXEL_TABLE: item.inputs[PIXEL_TABLE] + number})
        encoder.encode([other])
    assert sum(type(each) is PixelValues for each in gc.get_objects()) < 20


def in_double(item: PreparedItem) -> PreparedItem:
    return replace(item, inputs={**item.inputs, "pixel_values": item.inputs["pixel_values"].double()})


def test_staged_items_are_encoded_to_the_same_rows(encoder: ManagerEncoder) -> None:
    encoder.start()
    items = [in_double(prepared(number)) for number in range(4)]
    staged = [encoder.stage(item) for item in items]
    for before, after in zip(items, staged, strict=True):
        assert after.inputs["pixel_values"].dtype == torch.float32
        assert after.inputs["image_grid_thw"] is before.inputs["image_grid_thw"]
        assert after.digest == before.digest
        assert encoder.stage(after).inputs["pixel_values"] is after.inputs["pixel_values"]
    for before, after in zip(encoder.encode(items), encoder.encode(staged), strict=True):
        assert torch.equal(before, after)


def test_rows_are_as_wide_as_the_tower_says(encoder: ManagerEncoder) -> None:
    assert encoder.row_bytes("image") == encoder.row_bytes("video") == 2 * tiny_vision.WIDTH * 4
    assert encoder.row_bytes("audio") is None
    assert ManagerEncoder(encoder.manager, modalities=["image"]).row_bytes("video") is None


def test_items_of_one_modality_have_the_same_inputs(encoder: ManagerEncoder) -> None:
    odd = PreparedItem("image", b"", {"pixel_values": torch.zeros(4, 8)}, 1)
    with pytest.raises(InputError, match="image: expected items of the same inputs"):
        encoder.encode([prepared(), odd])
