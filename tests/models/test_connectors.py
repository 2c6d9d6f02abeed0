"""A checkpoint behind the connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.connector.request import EncodeRequest
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.models.connectors import checkpoint_connector, checkpoint_encoder

from .checkpoints import save

FAST = "token_budgets: [64, 256]\nmax_items_per_batch: 2\nmode: breakable\npiece_compiler: eager\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, directory = save(tmp_path_factory.mktemp("checkpoint"), "qwen2_vl")
    (directory / "encoder.yaml").write_text(FAST)
    return directory


@pytest.fixture(scope="module")
def connector(checkpoint: Path) -> Iterator[Connector]:
    with checkpoint_connector(checkpoint, ["cpu", "cpu"], checkpoint / "encoder.yaml") as made:
        yield made


def test_images_become_features(connector: Connector, checkpoint: Path) -> None:
    image = Image.effect_noise((120, 90), 50).convert("RGB")
    ticket = connector.submit(EncodeRequest("r", [MediaItem("image", image)]))
    assert ticket.wait(60) == "ready", ticket.error
    encoder = checkpoint_encoder(checkpoint, checkpoint / "encoder.yaml")
    (expected,) = encoder.encode([connector.processor.prepare(ticket.items[0].media)])
    with connector.read(ticket) as rows:
        torch.testing.assert_close(rows[0].rows, expected)
        assert rows[0].metadata["grid"]
    assert len(connector.workers()) == 2


def test_a_worker_that_is_started_again_loads_the_checkpoint_again(connector: Connector) -> None:
    connector.drain_worker("worker 1")
    connector.restart_worker("worker 1")
    ticket = connector.submit(EncodeRequest("r", [MediaItem("image", Image.new("RGB", (64, 64)))]))
    assert ticket.wait(60) == "ready", ticket.error
    assert connector.audit() == []


def test_the_checkpoints_dtype_is_the_default(checkpoint: Path) -> None:
    assert checkpoint_encoder(checkpoint).manager.dtype is torch.float32
    assert checkpoint_encoder(checkpoint, dtype="bfloat16").manager.dtype is torch.bfloat16


def test_what_is_wrong_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match="dtype: expected auto or a floating-point dtype of torch, such as bfloat16; got 'int8'",
    ):
        checkpoint_encoder(checkpoint, dtype="int8")
    with pytest.raises(InputError, match="devices: expected at least one"):
        checkpoint_connector(checkpoint, [])
    with pytest.raises(InputError, match=r"no config\.json"):
        checkpoint_encoder(tmp_path)
    (tmp_path / "bad.yaml").write_text("mode: fastest\n")
    with pytest.raises(ConfigError, match="mode"):
        checkpoint_encoder(checkpoint, tmp_path / "bad.yaml")
