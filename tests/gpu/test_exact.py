"""Captures at exact shapes, and of the untouched module, with real graphs: right for any images, bounded,
and without a leak.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.models.eager import rms_error
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.models.registry import architecture

from .support import poison, settled

pytestmark = pytest.mark.gpu

# Images of 1 to 64 output tokens, so that 50 counts come soon.
SIDES = range(2, 18, 2)
DTYPES = (torch.bfloat16, torch.float32)
LIMITS = {"token_budgets": (64, 256), "max_items_per_batch": 8, "max_frames_per_batch": 0}


# A manager's settings by the mode that is tested: everything is to be served by a capture.
MODES: dict[str, dict[str, Any]] = {
    "exact": {"mode": "exact", "exact_min_hits": 1},
    "breakable": {"mode": "breakable"},
}
BATCHES = 1000
EAGER_BATCHES = 100


def make_manager(tower: Any, **settings: Any) -> fx.EncoderCudaGraphManager:
    config = fx.EncoderConfig(**{**LIMITS, "mode": "exact", "packing": "greedy", **settings})
    manager = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
    manager.capture()
    assert not manager.reports
    return manager


def images(grids: list[tuple[int, int, int]], features: int) -> dict[str, Any]:
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(rows, features, device="cuda").bfloat16()
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def random_images(source: random.Random, features: int) -> dict[str, Any]:
    count = source.randint(1, 4)
    return images([(1, source.choice(SIDES), source.choice(SIDES)) for _ in range(count)], features)


@pytest.fixture(scope="module", params=["qwen3-vl-8b", "qwen2.5-vl-7b"])
def family(request: pytest.FixtureRequest) -> Iterator[Any]:
    """(wrapped tower, Hugging Face's, the same in float32)."""
    eager = demo_tower(3, "cuda", torch.bfloat16, model=request.param)
    known = architecture(request.param).family
    theirs = [known.eager_tower(copy.deepcopy(eager).to(dtype)) for dtype in DTYPES]
    yield fx.wrap(eager), *theirs
    torch.cuda.empty_cache()


def pools(manager: fx.EncoderCudaGraphManager) -> list[GraphPool]:
    """Those that captures are made in."""
    exact = manager.paths["default"].unpadded
    generations = exact.generations
    return [manager.pool, *(generation.pool for generation in generations)]


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_thousand_batches_stay_within_eagers_error(mode: str, family: Any) -> None:
    """Every batch against Hugging Face's tower in float32; the error of its own bfloat16 is a tenth's."""
    tower, plain, exact = family
    manager = make_manager(tower, **MODES[mode])
    source = random.Random(0)
    ours, theirs = [], []
    for number in range(BATCHES):
        inputs = random_images(source, tower.patch_features)
        if number % 100 == 50:
            for pool in pools(manager):
                poison(pool)
        output = manager.execute(inputs)
        expected = exact(inputs)
        ours.append(rms_error(output, expected))
        if number % (BATCHES // EAGER_BATCHES) == 0:
            theirs.append(rms_error(plain(inputs), expected))
    assert max(ours) <= 1.5 * max(theirs), "one batch is wrong"
    assert statistics.fmean(ours) <= 1.1 * statistics.fmean(theirs)
    assert manager.stats().hit_rate == 1
    if mode == "exact":
        shapes = manager.paths["default"].unpadded
        assert len(shapes.sizes) <= shapes.max_captures
        assert not shapes.refused
    manager.clear()


@torch.no_grad()
def test_ten_thousand_replays_over_fifty_counts_leak_nothing(family: Any) -> None:
    tower = family[0]
    manager = make_manager(tower, exact_min_hits=1)
    batches = [images([(1, 2, 2 * (10 + n))], tower.patch_features) for n in range(50)]

    def turns(count: int) -> tuple[int, int]:
        """Allocated and reserved bytes after so many."""
        for _ in range(count):
            for inputs in batches:
                manager.execute(inputs)
        return settled()

    allocated, reserved = turns(3)
    now_allocated, now_reserved = turns(200)
    assert now_allocated <= allocated
    assert now_reserved == reserved
    stats = manager.stats()
    assert stats.hit_rate == 1
    manager.clear()


@torch.no_grad()
def test_evicting_frees_what_was_promised(family: Any) -> None:
    tower = family[0]
    manager = make_manager(tower, exact_min_hits=1)
    shapes = manager.paths["default"].unpadded
    shapes.max_captures = 4  # generations of one

    def serve() -> None:
        for side in (60, 58, 56, 54):
            manager.execute(images([(1, side, side)], tower.patch_features))

    def reserved() -> int:
        settled()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    serve()
    assert len(shapes.sizes) == 4
    manager.clear()
    before = reserved()  # libraries' workspace for the stream of captures and the images' metadata stay
    manager.capture()
    serve()
    held, promised = reserved(), shapes.generations[0].pool.used_bytes
    assert promised > 0
    shapes.evict()
    assert held - reserved() >= 0.95 * promised
    manager.clear()
    assert reserved() <= before + 16 * 2**20
