"""A cluster of this machine, and real photographs at random sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ...models import checkpoints
from ..photographs import EXAMPLES

pytest.importorskip("ray", reason="has an environment of its own: make test-ray")

TILE = {**checkpoints.TILE, "image_size": 224}
"""Tiles as large as real ones under a tower that is not."""

STORE_BYTES = 112 << 20
"""Of Ray's shared memory: a third of the pixels of the photographs."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoints.CHECKPOINTS, "siglip", ({"vision_config": TILE}, "vision_model.", 256))
        return checkpoints.save(tmp_path_factory.mktemp("checkpoint"), "siglip")[1]


@pytest.fixture(scope="module")  # the service starts one of its own, and a process has one at a time
def cluster() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=STORE_BYTES, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 crops of the examples, resized, in two directories; every 250th file is damaged or no image."""
    directory, draw = tmp_path_factory.mktemp("photographs"), random.Random(0)
    whole = [Image.open(path).convert("RGB").resize((200, 200)) for path in sorted(EXAMPLES.iterdir())]
    for number in range(2000):
        folder = directory / f"{number // 1000}"
        folder.mkdir(exist_ok=True)
        path = folder / f"{number:04}.jpg"
        if number % 250 == 249:
            path.write_bytes(
                b"no image" if number % 500 == 249 else (directory / "0" / "0001.jpg").read_bytes()[:600]
            )
            continue
        left, top = draw.randrange(100), draw.randrange(100)
        width, height = draw.randint(40, 100), draw.randint(40, 100)
        crop = draw.choice(whole).crop((left, top, left + width, top + height))
        crop.resize((draw.randint(48, 160), draw.randint(48, 160))).save(path, quality=85)
    return directory
