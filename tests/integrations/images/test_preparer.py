"""Every family's images as uint8, and back to the same floats."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.integrations.images import ImagePreparer
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.towers.inputs import PixelValues

from ...models.checkpoints import CHECKPOINTS, CPU, save
from .photographs import encoded, photograph, settings_of


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_pixels_normalized_later_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", name)
    preparer = ImagePreparer(settings_of(directory))
    assert preparer.normalizes_later
    family, config = read_family(Checkpoint.locate(directory))
    image = photograph(size=(131, 87))
    expected = family.prepare(config, Checkpoint.locate(directory).processors()).image(image)
    prepared = preparer.prepare(image)
    values = PixelValues(preparer.values, torch.float32, CPU)
    assert prepared.inputs.keys() == expected.tensors.keys()
    for key, array in prepared.inputs.items():
        tensor = torch.from_numpy(array)
        assert array.dtype in (np.uint8, np.int64)
        given = values(tensor) if array.dtype == np.uint8 else tensor
        assert torch.equal(given, expected.tensors[key]), key
    assert prepared.layout == expected.layout
    float_bytes = sum(t.nbytes for t in expected.tensors.values() if t.is_floating_point())
    assert sum(a.nbytes for a in prepared.inputs.values() if a.dtype == np.uint8) * 4 == float_bytes


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("siglip"), "siglip")[1]


def test_what_is_not_an_image_or_too_large_is_refused(siglip: Path) -> None:
    preparer = ImagePreparer(settings_of(siglip, max_pixels=1200, max_image_bytes="100KiB"))
    image = photograph(size=(40, 30))
    for media, message in (
        (b"no image", "cannot be read as an image"),
        (b"", "cannot be read as an image"),
        (encoded(image)[:400], "cannot be read as an image"),
        (encoded(image.resize((40, 31))), "limit max_pixels"),
        (bytes(102_401), "limit max_bytes"),
        (np.zeros((40, 31), np.uint8), "limit max_pixels"),
        (np.zeros((30, 40, 3), np.float32), "array of uint8"),
    ):
        with pytest.raises(MediaError, match=message):
            preparer.load(media)


def test_an_error_says_nothing_that_differs_from_run_to_run(siglip: Path) -> None:
    preparer = ImagePreparer(settings_of(siglip))
    for data in (b"no image", encoded(photograph())[:400], encoded(photograph(), "JPEG")[:400]):
        with pytest.raises(MediaError) as first:
            preparer.load(data)
        kept = io.BytesIO(data)  # so that another is elsewhere in memory
        with pytest.raises(MediaError) as second:
            preparer.load(bytes(kept.getvalue()))
        assert str(first.value) == str(second.value)
        assert "0x" not in str(first.value)


def test_pixels_are_taken_as_they_are(siglip: Path) -> None:
    preparer = ImagePreparer(settings_of(siglip))
    image = photograph(size=(40, 30))
    expected = preparer.load(encoded(image)).inputs["pixel_values"]
    for pixels in (np.asarray(image), np.asarray(image.convert("RGBA"))):
        np.testing.assert_array_equal(preparer.load(pixels).inputs["pixel_values"], expected)
    assert preparer.load(np.asarray(image.convert("L"))).inputs["pixel_values"].shape == (1, 3, 28, 28)


def test_what_cannot_be_prepared_is_a_media_error(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "checkpoint", "qwen2_5_vl")
    with pytest.raises(MediaError, match="aspect ratio"):
        ImagePreparer(settings_of(directory)).prepare(Image.new("RGB", (2000, 4)))
