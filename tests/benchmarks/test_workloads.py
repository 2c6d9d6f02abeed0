from __future__ import annotations

from collections.abc import Callable

import pytest
from models import PackedModel, kind_of, tower_names
from workloads import QUICK_WORKLOADS, WORKLOADS, Request

# Patches of Qwen3-VL: a side of 16 pixels, merged by two.
PATCHES = {
    "1x224": 196,
    "1x448": 784,
    "1x896": 3136,
    "1x1344": 7056,
    "mixed8": 12588,
    "mixed8_big": 17244,
    "20x336": 20 * 400,
    "clip16": 8 * 16 * 28,
    "clip64": 32 * 16 * 28,
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_workload_has_the_patches_of_its_pixels(name: str, make_model: Callable[[], PackedModel]) -> None:
    model = make_model()
    (request,) = WORKLOADS["packed"][name].requests
    grids = [model.grid(1, *size) for size in request.images]
    grids += [model.grid(frames, *size) for frames, size in request.clips]
    assert sum(t * h * w for t, h, w in grids) == PATCHES[name]


def test_photographs_are_many_requests_of_several_sizes() -> None:
    requests = WORKLOADS["packed"]["photos"].requests
    assert len(requests) >= 10
    assert 1 <= min(len(r.images) for r in requests) < max(len(r.images) for r in requests) <= 16
    sizes = {size for request in requests for size in request.images}
    assert len(sizes) > 0.9 * sum(len(request.images) for request in requests)


@pytest.mark.parametrize("tower", tower_names())
def test_every_tower_has_workloads(tower: str) -> None:
    for listed in (WORKLOADS, QUICK_WORKLOADS):
        for name, workload in listed[kind_of(tower)].items():
            assert workload.name == name
            assert all(request != Request() for request in workload.requests)
