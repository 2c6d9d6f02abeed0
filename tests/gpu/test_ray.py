"""Actors of Ray with a GPU: the connector's workers, and `map_batches`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray.data", reason="has an environment of its own")

import ray

import fxsplit_encoder as fx
from fxsplit_encoder.connector import ConnectorConfig, EncodeRequest, MediaItem
from fxsplit_encoder.models.connectors import checkpoint_encoder
from fxsplit_encoder.service.encoder import QueuedEncoder
from fxsplit_encoder.service.ray import RayOptions, encode_images
from fxsplit_encoder.service.settings import ImageEncoderSettings

from ..models.checkpoints import save
from ..service.photographs import EXAMPLES, photograph

pytestmark = pytest.mark.gpu

CONFIG = {"token_budgets": [64, 256], "piece_compiler": "eager", "mode": "full"}
CLOSE = {"rtol": 0.05, "atol": 0.05}
"""Of bfloat16, whose batches are formed otherwise."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("checkpoint"), "qwen2_5_vl")[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_connectors_workers_share_a_gpu(cluster: None, model: Path, workers: int) -> None:
    pytest.importorskip("blake3", reason="of the extra `connector`")
    from fxsplit_encoder.service.ray.connector import ray_connector

    config, options = fx.EncoderConfig(**CONFIG), RayOptions(num_gpus=1 / workers)
    here = checkpoint_encoder(model, config, "cuda")
    here.start()
    settings = ConnectorConfig(timeout_s=300.0)
    with ray_connector(model, workers, config, settings, options) as connector:
        items = [MediaItem("image", photograph(size=(56 + 28 * n, 84))) for n in range(6)]
        tickets = [connector.submit(EncodeRequest("r", [item])) for item in items]
        for item, ticket in zip(items, tickets, strict=True):
            assert ticket.wait(300) == "ready", ticket.error
            (expected,) = here.encode([connector.processor.prepare(item)])
            with connector.read(ticket) as found:
                rows = found[0].rows
                assert rows.dtype is expected.dtype is torch.bfloat16
                torch.testing.assert_close(rows.cpu(), expected.cpu(), **CLOSE)


def test_map_batches_encodes_on_the_gpu(cluster: None, model: Path) -> None:
    settings: dict[str, Any] = {"model": str(model), "config": CONFIG}
    encoder = QueuedEncoder(ImageEncoderSettings(**settings))
    paths = sorted(EXAMPLES.iterdir())
    results = encoder.encode([encoder.preparer.load(path.read_bytes()) for path in paths])
    expected = {path.name: result for path, result in zip(paths, results, strict=True)}
    images = ray.data.from_items([{"path": path.name, "bytes": path.read_bytes()} for path in paths])
    rows = encode_images(images, batch_size=4, **settings).take_all()
    assert {Path(row["path"]).name for row in rows} == expected.keys()
    for row in rows:
        assert row["error"] is None
        found = np.array(row["embedding"]).reshape(row["tokens"], row["width"])
        np.testing.assert_allclose(found, expected[Path(row["path"]).name], **CLOSE)
