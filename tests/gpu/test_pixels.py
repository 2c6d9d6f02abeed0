"""Images that the GPU prepares: Pillow's pixels from pixels, and nearly those from files."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fxsplit_encoder.connector.pixels import decode_jpegs, prepared_pixels
from fxsplit_encoder.media import MediaSettings, load_image
from fxsplit_encoder.media.images import PIXEL_PLAN, OnHost
from fxsplit_encoder.models.prepare import HALF, ImageSteps, ProcessorSettings
from fxsplit_encoder.models.registry import architecture
from fxsplit_encoder.service.encoder import QueuedEncoder
from fxsplit_encoder.service.settings import ImageEncoderSettings
from fxsplit_encoder.towers.inputs import PixelValues

from ..models.checkpoints import save
from ..service.photographs import encoded
from .support import no_synchronization

pytestmark = pytest.mark.gpu

LIMITS, CUDA = MediaSettings(), torch.device("cuda", 0)
SIZES = [(448, 448), (640, 480), (1344, 1008), (333, 777), (37, 1200), (4032, 3024)]


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colors, and edges."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    made = np.array(small.resize((width, height), Image.Resampling.BICUBIC))
    made[height // 3 : height // 2, width // 4 : width // 2] = draw.integers(0, 256, 3)
    return Image.fromarray(made)


def prepared(name: str, step: Any, media: list[Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixels of the model's processor, on the GPU, and those that the GPU prepares."""
    known = architecture(name)
    whole, later = (
        known.family.prepare(known.settings(1), each)
        for each in (ProcessorSettings(), ProcessorSettings().normalizing_later())
    )
    expected = [whole.image(load_image(each, LIMITS)).tensors["pixel_values"] for each in media]
    raw = [ImageSteps(step).image(later, LIMITS, each).tensors for each in media]
    normalization = getattr(getattr(whole, "image_format", None), "normalization", HALF)
    values = PixelValues(normalization.values(), dtype, CUDA)
    sources, plans = ([each[key] for each in raw] for key in ("pixel_values", PIXEL_PLAN))
    made = prepared_pixels(sources, plans, values, CUDA, OnHost())
    with no_synchronization() if step == "resize" else contextlib.nullcontext():
        again = prepared_pixels(sources, plans, values, CUDA, OnHost())
    assert torch.equal(made, again)
    return torch.cat(expected).to(CUDA, dtype), made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen2.5-vl-7b", "siglip-so400m-384"])
def test_pixels_are_those_of_the_processor(name: str, dtype: torch.dtype) -> None:
    expected, made = prepared(name, "resize", [photograph(*size) for size in SIZES], dtype)
    assert torch.equal(expected, made)


def test_files_are_decoded_nearly_as_by_pillow() -> None:
    pytest.importorskip("torchvision")
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(photograph(*size), "JPEG", subsampling=0) for size in SIZES]
    files.append(encoded(photograph(640, 480), "JPEG", subsampling=0, exif=exif))
    files.append(encoded(photograph(640, 480), "JPEG", subsampling=0, progressive=True))
    expected, made = prepared("qwen3-vl-8b", "decode", files, torch.float32)
    error = (expected - made).abs() * 127.5
    assert error.max() <= 6 and error.mean() < 0.5, (error.max(), error.mean())
    halved = [encoded(photograph(*size), "JPEG", subsampling=2) for size in SIZES]  # blurred edges
    expected, made = prepared("qwen3-vl-8b", "decode", halved, torch.float32)
    assert ((expected - made).abs() * 127.5).mean() < 1


def test_files_that_the_gpu_cannot_decode_are_decoded_by_the_host() -> None:
    pytest.importorskip("torchvision")
    good, buffer = encoded(photograph(64, 48), "JPEG"), io.BytesIO()
    photograph(64, 48).save(buffer, "PNG")
    files = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in (good, buffer.getvalue())]
    first, second = decode_jpegs(files, CUDA, on_host := OnHost())
    assert first.shape == second.shape == (48, 64, 3) and on_host.total() == 1
    assert torch.equal(second.cpu(), torch.from_numpy(np.array(photograph(64, 48))))


def test_decoded_pixels_stay_until_a_busy_stream_has_read_them() -> None:
    pytest.importorskip("torchvision")
    images = [Image.new("RGB", (512, 512), (value,) * 3) for value in range(0, 250, 10)]
    files = [torch.frombuffer(bytearray(encoded(image, "JPEG")), dtype=torch.uint8) for image in images]
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for file in files:
            (pixels,) = decode_jpegs([file], CUDA, OnHost())
            torch.cuda._sleep(20_000_000)
            found.append(pixels.float().mean())
            del pixels
    torch.cuda.synchronize()
    assert [round(float(each)) for each in found] == pytest.approx([*range(0, 250, 10)], abs=1)


@pytest.mark.parametrize("step", ["resize", "decode"])
def test_a_service_gives_the_same_embeddings(step: Any, tmp_path: Path) -> None:
    if step == "decode":
        pytest.importorskip("torchvision")
    _, directory = save(tmp_path / "checkpoint", "siglip")
    given: Any = {"model": str(directory), "dtype": "float32", "config": {"enabled": False}}
    files = [encoded(photograph(*size), "JPEG", subsampling=0) for size in SIZES[:4]] * 8
    rows = []
    for each in ("normalize", step):
        encoder = QueuedEncoder(ImageEncoderSettings(**given, device="cuda:0", on_device=each))
        rows.append(np.concatenate([*encoder.encode([*map(encoder.preparer.load, files)])]))  # type: ignore[arg-type]
        assert not encoder.preparer.steps.on_host
        encoder.close()
    if step == "resize":
        np.testing.assert_array_equal(*rows)
    np.testing.assert_allclose(*rows, rtol=0, atol=5e-2 * np.abs(rows[0]).max())
