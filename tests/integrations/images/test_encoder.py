"""Prepared images to embeddings: the manager's, in order, whatever happens to some of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.integrations.images import ImageEncoder
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.towers.inputs import PixelValues

from ...models.checkpoints import CPU, save
from .photographs import photograph, settings_of

FAMILIES = ("siglip", "clip_vision_model", "dinov2", "qwen2_5_vl", "internvl")


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_those_of_the_manager(name: str, tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", name)
    encoder = ImageEncoder(settings_of(directory), batch_bytes=20_000)
    images = [photograph(size=(60 + 14 * i, 90)) for i in range(5)]
    prepared = [encoder.preparer.prepare(image) for image in images]
    embeddings = encoder.encode(prepared)
    family, config = read_family(Checkpoint.locate(directory))
    plain = family.prepare(config, Checkpoint.locate(directory).processors())
    for image, ready, embedding in zip(images, prepared, embeddings, strict=True):
        (expected,) = encoder.manager.execute(dict(plain.image(image).tensors))
        assert isinstance(embedding, np.ndarray)
        assert embedding.dtype == np.float32
        np.testing.assert_allclose(embedding, expected.numpy(), rtol=0, atol=1e-5)
        assert encoder.count_tokens(ready) == len(embedding)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("siglip"), "siglip")[1]


def test_an_embedding_may_be_the_mean_of_its_rows_and_of_half_the_bits(siglip: Path) -> None:
    rows = ImageEncoder(settings_of(siglip))
    pooled = ImageEncoder(settings_of(siglip, pooling="mean", output_dtype="float16"))
    prepared = [rows.preparer.prepare(photograph())]
    (whole,), (mean,) = rows.encode(prepared), pooled.encode(prepared)
    assert isinstance(whole, np.ndarray) and isinstance(mean, np.ndarray)
    assert mean.dtype == np.float16
    np.testing.assert_allclose(mean, whole.mean(axis=0, keepdims=True), atol=2e-3)


def test_one_that_the_tower_refuses_costs_the_others_nothing(
    siglip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = ImageEncoder(settings_of(siglip))
    prepared = [encoder.preparer.prepare(photograph(size=(40 + i, 50))) for i in range(5)]
    expected = encoder.encode(prepared)
    execute = fx.EncoderCudaGraphManager.execute
    largest: list[int] = []

    def refusing(self: fx.EncoderCudaGraphManager, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        largest.append(len(inputs["pixel_values"]))
        if any(torch.equal(tile, bad) for tile in inputs["pixel_values"]):
            raise (
                torch.OutOfMemoryError("of the test") if len(inputs["pixel_values"]) > 1 else InputError("no")
            )
        return execute(self, inputs)

    values = PixelValues(encoder.preparer.values, torch.float32, CPU)
    bad = values(torch.from_numpy(prepared[2].inputs["pixel_values"]))[0]
    monkeypatch.setattr(fx.EncoderCudaGraphManager, "execute", refusing)
    results = encoder.encode(prepared)
    assert isinstance(results[2], InputError)
    for index in (0, 1, 3, 4):
        np.testing.assert_allclose(results[index], expected[index], rtol=0, atol=1e-5)
    assert largest == [5, 2, 3, 1, 2]


def test_an_error_of_the_device_is_everybodys(siglip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ImageEncoder(settings_of(siglip))

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fx.EncoderCudaGraphManager, "execute", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        encoder.encode([encoder.preparer.prepare(photograph())])
