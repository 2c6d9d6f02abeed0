"""Prepared images to embeddings: the manager's, in order, whatever happens to some of them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import fxsplit_encoder as fx
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.service.encoder import Preparer, QueuedEncoder
from fxsplit_encoder.service.settings import ImageEncoderSettings, ServingSettings

from ..models.checkpoints import save
from .photographs import encoded, photograph, settings_of

FAMILIES = ("siglip", "clip_vision_model", "dinov2", "qwen2_5_vl", "internvl")


@pytest.mark.parametrize(("name", "is_later"), [*((name, True) for name in FAMILIES), ("siglip", False)])
def test_embeddings_are_those_of_the_manager(
    name: str, is_later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_later:
        monkeypatch.setattr("fxsplit_encoder.service.encoder.pixel_table", lambda *_: None)
    _, directory = save(tmp_path / "checkpoint", name)
    encoder = QueuedEncoder(settings_of(directory))
    images = [photograph(size=(60 + 14 * i, 90)) for i in range(5)]
    prepared = [encoder.preparer.prepare(image) for image in images]
    embeddings = encoder.encode(prepared)
    family, config = read_family(Checkpoint.locate(directory))
    plain = family.prepare(config, Checkpoint.locate(directory).processors())
    for image, ready, embedding in zip(images, prepared, embeddings, strict=True):
        (expected,) = encoder.first.manager.execute(dict(plain.image(image).tensors))
        assert isinstance(embedding, np.ndarray)
        assert embedding.dtype == np.float32
        np.testing.assert_allclose(embedding, expected.numpy(), rtol=0, atol=1e-5)
        assert encoder.first.count_tokens(ready) == len(embedding)


@pytest.mark.parametrize("name", ["siglip", "clip_vision_model", "qwen2_5_vl", "internvl"])
def test_embeddings_are_the_same_where_the_device_resizes(name: str, tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", name)
    files = [encoded(photograph(size=(60 + 14 * i, 90)), kind) for i, kind in enumerate(("JPEG", "PNG"))]
    plain, raw = (QueuedEncoder(settings_of(directory, on_device=step)) for step in ("normalize", "resize"))
    made = [[*map(each.preparer.load, files)] for each in (plain, raw)]
    assert [each.layout for each in made[0]] == [each.layout for each in made[1]]
    assert sum(raw.preparer.steps.on_host.values()) == (2 if name == "internvl" else 0)
    for before, after in zip(plain.encode(made[0]), raw.encode(made[1]), strict=True):
        assert isinstance(before, np.ndarray) and isinstance(after, np.ndarray)
        np.testing.assert_array_equal(before, after)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("siglip"), "siglip")[1]


def test_an_embedding_may_be_the_mean_of_its_rows_and_of_half_the_bits(siglip: Path) -> None:
    rows = QueuedEncoder(settings_of(siglip))
    pooled = QueuedEncoder(settings_of(siglip, pooling="mean", output_dtype="float16"))
    prepared = [rows.preparer.prepare(photograph())]
    (whole,), (mean,) = rows.encode(prepared), pooled.encode(prepared)
    assert isinstance(whole, np.ndarray) and isinstance(mean, np.ndarray)
    assert mean.dtype == np.float16
    np.testing.assert_allclose(mean, whole.mean(axis=0, keepdims=True), atol=2e-3)


def test_an_error_of_the_device_is_everybodys(siglip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = QueuedEncoder(settings_of(siglip))

    broken = mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(fx.EncoderCudaGraphManager, "execute", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        encoder.encode([encoder.preparer.prepare(photograph())])


def test_settings_are_sent_to_other_processes() -> None:
    settings = ImageEncoderSettings(model="m", config={"mode": "full", "token_budgets": [4]}, max_pixels=1000)
    sent = pickle.loads(pickle.dumps(settings))
    assert sent == settings
    assert hash(sent) == hash(settings)
    assert sent.config == fx.EncoderConfig(mode="full", token_budgets=[4])


def test_who_serves_captures_nothing_later() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert ImageEncoderSettings(model="m").resolved_config(cuda) == fx.EncoderConfig()
    assert ServingSettings(model="m").resolved_config(cuda) == fx.EncoderConfig(capture_recurring=False)
    assert ServingSettings(model="m").resolved_config(cpu) == fx.EncoderConfig(mode="none")
    for given, expected in ({}, False), ({"capture_recurring": True}, True):
        settings = ServingSettings(model="m", config={"mode": "full", **given})
        expected_config = fx.EncoderConfig(mode="full", capture_recurring=expected)
        assert settings.resolved_config(cuda) == settings.resolved_config(cpu) == expected_config


def test_an_error_says_nothing_that_differs_from_run_to_run(siglip: Path) -> None:
    preparer = Preparer(settings_of(siglip))
    for data in (b"no image", encoded(photograph())[:400], encoded(photograph(), "JPEG")[:400]):
        with pytest.raises(MediaError) as first:
            preparer.load(data)
        kept = io.BytesIO(data)  # so that another is elsewhere in memory
        with pytest.raises(MediaError) as second:
            preparer.load(bytes(kept.getvalue()))
        assert str(first.value) == str(second.value)
        assert "0x" not in str(first.value)


def test_what_cannot_be_prepared_is_a_media_error(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", "qwen2_5_vl")
    with pytest.raises(MediaError, match="aspect ratio"):
        Preparer(settings_of(directory)).prepare(Image.new("RGB", (2000, 4)))
