from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import PackedModel, PagesModel, TilesModel, kind_of, most_square, rows_of, tower_names
from worker import count_flops, relative_error
from workloads import QUICK_WORKLOADS, WORKLOADS, Request

from ..towers.tiny_towers import make

REQUEST = Request(images=((128, 96), (64, 64)), clips=((4, (64, 96)),))


@torch.no_grad()
def test_prepared_forward_equals_eager(make_model: Callable[[], PackedModel]) -> None:
    model = make_model()
    batch = model.batch(REQUEST)
    expected = rows_of(model.eager(batch))  # before the adapter replaces attention
    items = model.forward(model.prepare(batch))
    assert [item.shape[0] for item in items] == [12, 4, 2 * 6]
    assert relative_error(rows_of(items), expected) < 1e-5
    assert batch.patches == expected.shape[0] * 4


def test_inputs_are_random_and_the_same_for_every_variant(make_model: Callable[[], PackedModel]) -> None:
    first, second = (make_model().batch(REQUEST).mm_kwargs["pixel_values"] for _ in range(2))
    assert torch.equal(first, second)
    assert 0.9 < float(first.std()) < 1.1


@torch.no_grad()
def test_counted_operations_are_those_of_the_configuration(make_model: Callable[[], PackedModel]) -> None:
    model = make_model()
    grids = [(1, 8, 6), (1, 4, 4), (2, 4, 6)]
    rows = sum(t * h * w for t, h, w in grids)
    batch = model.batch(REQUEST)
    config = model.module.config
    width = config.hidden_size
    block = 2 * rows * (4 * width**2 + 2 * width * config.intermediate_size)
    # A frame is a segment: 4 T^2 D for logits and values together.
    attention = sum(t * 4 * (h * w) ** 2 * width for t, h, w in grids)
    merged = 4 * width
    mergers = 1 + len(config.deepstack_visual_indexes)
    merge = 2 * (rows // 4) * (merged**2 + merged * config.out_hidden_size)
    embedding = 2 * rows * model.features * width
    expected = config.depth * (block + attention) + mergers * merge + embedding
    prepared = model.prepare(batch)
    assert count_flops(lambda: model.forward(prepared)) == expected


class _Internvl(torch.nn.Linear):
    """As much of InternVL's model as the inputs of a batch depend on."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        vision: dict[str, Any] = {"num_channels": 3, "image_size": (28, 28), "patch_size": (14, 14)}
        self.config = type("Config", (), {"vision_config": type("Vision", (), vision)})


def test_tiles_are_given_as_the_processor_gives_them() -> None:
    model = TilesModel("tiny", _Internvl())
    batch = model.batch(Request(tiles=(1, 3)))
    assert batch.mm_kwargs["pixel_values"].shape == (4, 3, 28, 28)
    assert batch.mm_kwargs["num_patches"] == [1, 3]
    assert batch.patches == 4 * 4
    assert model.batch(Request(clips=((5, (28, 28)),))).mm_kwargs["num_patches"] == [5]


@torch.no_grad()
def test_pages_are_whole_and_in_crops() -> None:
    model = PagesModel("tiny", make("DeepseekOcrVisionModel"))
    batch = model.batch(Request(tiles=(0, 6)))
    assert batch.mm_kwargs["images_spatial_crop"].tolist() == [[1, 1], [3, 2]]
    assert batch.patches == 2 * 256 + 6 * 144
    items = model.eager(batch)
    assert [item.shape[0] for item in items] == [4 * 5 + 1, 6 * 10 + 4 * 5 + 1]
    assert count_flops(lambda: model.forward(model.prepare(batch))) > 0


@pytest.mark.parametrize(("count", "grid"), [(0, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (3, 2)), (9, (3, 3))])
def test_crops_form_the_most_square_grid(count: int, grid: tuple[int, int]) -> None:
    assert most_square(count) == grid


@pytest.mark.parametrize("tower", tower_names())
def test_every_tower_has_workloads(tower: str) -> None:
    for listed in (WORKLOADS, QUICK_WORKLOADS):
        for requests in listed[kind_of(tower)].values():
            assert requests and all(request != Request() for request in requests)
