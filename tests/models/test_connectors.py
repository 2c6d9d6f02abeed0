"""Encoders of checkpoints. One of them runs in tests/connector/processes/test_process_encoder.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.models.connectors import (
    checkpoint_connector,
    checkpoint_encoder,
    checkpoint_process,
    config_for,
    weightless_tower,
)
from fxsplit_encoder.models.media import media_processor

from .checkpoints import CHECKPOINTS, save


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_tower_without_weights_counts_and_declares_as_one_with_them(
    name: str, photograph: Path, tmp_path: Path
) -> None:
    _, directory = save(tmp_path / "checkpoint", name)
    tower = weightless_tower(directory)
    assert all(parameter.is_meta for parameter in tower.parameters())
    here, apart = checkpoint_encoder(directory), checkpoint_process(directory)
    for modality in ("image", "video", "audio"):
        assert apart.row_bytes(modality) == here.row_bytes(modality)
    processor = media_processor(tower, directory)
    item = MediaItem("image", photograph)
    prepared = processor.prepare(item)
    (feature,) = here.encode([prepared])
    assert processor.count_tokens(item) == prepared.num_tokens == feature.shape[0]
    assert feature.nbytes == feature.shape[0] * (apart.row_bytes("image") or 0)


def test_settings_and_dtypes_are_taken(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", "siglip")
    settings = tmp_path / "config.yaml"
    settings.write_text("mode: full\ntoken_budgets: [4]\n", encoding="utf-8")
    assert checkpoint_encoder(directory).manager.dtype is torch.float32  # the checkpoint's
    encoder = checkpoint_encoder(directory, settings, dtype="bfloat16")
    assert (encoder.manager.config.mode, encoder.manager.dtype) == ("full", torch.bfloat16)
    apart = checkpoint_process(directory, settings, dtype="bfloat16")
    assert apart.row_bytes("image") == encoder.row_bytes("image")
    assert apart.program.arguments["config"] == str(settings)


@pytest.mark.parametrize("dtype", ["float", "int32", "nn", "no such"])
def test_a_dtype_that_is_none_is_an_error(dtype: str, tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", "siglip")
    if dtype == "float":  # as torch has it
        assert checkpoint_encoder(directory, dtype=dtype).manager.dtype == torch.float32
        return
    for make in (checkpoint_encoder, checkpoint_process):
        expected = f"dtype: expected auto or a floating-point dtype of torch, such as bfloat16; got '{dtype}'"
        with pytest.raises(InputError, match=expected):
            make(directory, dtype=dtype)


def test_encoders_of_a_connector_capture_nothing_while_requests_come(tmp_path: Path) -> None:
    assert config_for(None, torch.device("cuda")) == EncoderConfig(capture_recurring=False)
    assert config_for(None, torch.device("cpu")).mode == "none"
    given = EncoderConfig(mode="full")
    assert config_for(given, torch.device("cuda")) is given
    file = tmp_path / "settings.yaml"
    file.write_text("capture_recurring: true\n", encoding="utf-8")
    assert config_for(file, torch.device("cuda")).capture_recurring


FAST = "token_budgets: [64, 256]\nmax_items_per_batch: 2\nmode: breakable\npiece_compiler: eager\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, directory = save(tmp_path_factory.mktemp("checkpoint"), "qwen2_vl")
    (directory / "encoder.yaml").write_text(FAST)
    return directory


def test_what_is_wrong_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="devices: expected at least one"):
        checkpoint_connector(checkpoint, [])
    with pytest.raises(InputError, match=r"no config\.json"):
        checkpoint_encoder(tmp_path)
    (tmp_path / "bad.yaml").write_text("mode: fastest\n")
    with pytest.raises(ConfigError, match="mode"):
        checkpoint_encoder(checkpoint, tmp_path / "bad.yaml")
