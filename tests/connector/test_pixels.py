"""Images that the encoder's device prepares: the pixels that the model's processor makes on the host."""

from __future__ import annotations

import io
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fxsplit_encoder.connector import pixels
from fxsplit_encoder.connector.pixels import check_decoder, prepared_pixels
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.media import MediaSettings, load_image
from fxsplit_encoder.media.images import PIXEL_PLAN
from fxsplit_encoder.models.prepare import ImageSteps, Preparation, ProcessorSettings
from fxsplit_encoder.models.registry import FAMILIES
from fxsplit_encoder.towers.inputs import PixelValues

from ..kernels.attention.fakes import run_with_triton
from ..models.checkpoints import CHECKPOINTS, CPU
from ..models.processors import noise
from ..service.photographs import encoded

LIMITS = MediaSettings()
VALUES = PixelValues(np.tile(np.arange(256, dtype=np.float32), (3, 1)), torch.float32, CPU)
CUT_BY_A_DEVICE = "qwen2_vl qwen2_5_vl qwen3_vl qwen3_5 glm4v siglip clip_vision_model dinov2".split()


def preparation_of(name: str) -> Preparation:
    settings = {"model_type": name, **CHECKPOINTS[name][0]}
    return FAMILIES[name].prepare(settings, ProcessorSettings().normalizing_later())


def on_device(steps: ImageSteps, preparation: Preparation, media: Any) -> torch.Tensor:
    inputs = steps.image(preparation, LIMITS, media).tensors
    return prepared_pixels([inputs["pixel_values"]], [inputs[PIXEL_PLAN]], VALUES, CPU, steps.on_host)


@pytest.mark.parametrize("name", CUT_BY_A_DEVICE)
@settings(max_examples=8)
@given(width=st.integers(4, 400), height=st.integers(4, 400), is_flat=st.booleans())
def test_a_device_makes_what_the_processor_makes(name: str, width: int, height: int, is_flat: bool) -> None:
    preparation, image = preparation_of(name), noise(width, height)
    if is_flat:  # weights below 0 and above 1 are what differs there
        image = image.point(lambda value: 255 * (value > 127))
    expected = preparation.image(image).tensors["pixel_values"]
    assert torch.equal(on_device(ImageSteps("resize"), preparation, image), expected.float())


def as_pillow(files: Any, *_: object) -> list[torch.Tensor]:
    images = [Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB") for file in files]
    return [torch.from_numpy(np.array(image)) for image in images]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_files_are_decoded_by_the_device_and_turned(
    orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixels, "decode_jpegs", as_pillow)
    exif = Image.Exif()
    exif[0x0112] = orientation
    preparation, steps = preparation_of("qwen3_vl"), ImageSteps("decode")
    file = encoded(noise(90, 60), "JPEG", exif=exif)
    assert steps.image(preparation, LIMITS, file).tensors["pixel_values"].numpy().tobytes() == file
    expected = preparation.image(load_image(file, LIMITS)).tensors["pixel_values"]
    assert torch.equal(on_device(steps, preparation, file), expected.float())
    assert not steps.on_host


OTHERS = {
    "PNG": lambda image, buffer: image.save(buffer, "PNG"),
    "progressive": lambda image, buffer: image.save(buffer, "JPEG", progressive=True),
    "mode L": lambda image, buffer: image.convert("L").save(buffer, "JPEG"),
    "mode CMYK": lambda image, buffer: image.convert("CMYK").save(buffer, "JPEG"),
    "mode RGB": lambda image, buffer: image.save(buffer, "JPEG", keep_rgb=True),
    "without an end": lambda image, buffer: buffer.write(encoded(image, "JPEG")[:-2]),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_files_that_the_device_does_not_decode_are_counted(
    reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    OTHERS[reason](noise(90, 60), buffer)
    preparation, steps, file = preparation_of("siglip"), ImageSteps("decode"), buffer.getvalue()
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    expected = preparation.image(load_image(file, LIMITS)).tensors["pixel_values"]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(on_device(steps, preparation, file), expected.float())
    ((counted, number),) = steps.on_host.items()
    assert reason in counted and number == 2
    assert [reason in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(("name", "normalizes"), [("internvl", True), ("siglip", False)])
def test_images_of_other_models_stay_with_the_host(name: str, normalizes: bool) -> None:
    steps, preparation = ImageSteps("resize", normalizes=normalizes), preparation_of(name)
    made = steps.image(preparation, LIMITS, noise(90, 60)).tensors
    assert torch.equal(made["pixel_values"], preparation.image(noise(90, 60)).tensors["pixel_values"])
    assert [*steps.on_host.values()] == [1]


def test_a_decoder_needs_a_gpu() -> None:
    message = "decode takes torchvision and one GPU a process; got"
    for names in (["cpu"], ["cuda:0", "cuda:1"]):
        with pytest.raises(InputError, match=message):
            check_decoder([*map(torch.device, names)])


CHECK = """
import torch
from fxsplit_encoder.connector.pixels import _axes, resize
from fxsplit_encoder.kernels import resize as kernel
from fxsplit_encoder.media.images import ResizePlan

torch.manual_seed(0)
values = torch.randn(768)
for (height, width), plan in {
    (20, 24): ResizePlan(32, 32, 2, 2, 16, 2, 2),
    (40, 17): ResizePlan(16, 32, 2, 4, 8, 2, 2),
    (37, 23): ResizePlan(24, 18, 1, 1, 18, filter=2),
}.items():
    second, first, is_turned = _axes(height, width, plan, torch.device("cpu"))
    pixels = torch.randint(0, 256, (3, height, width), dtype=torch.uint8).permute(1, 2, 0)
    pixels = pixels.transpose(0, 1) if is_turned else pixels
    shape = (plan.rows * plan.columns, 3, max(plan.frames, 1), plan.side, plan.side)
    made, expected = torch.zeros(shape), torch.zeros(shape)
    kernel.resize(pixels, second, first, values, made)
    resize(pixels, second, first, values, expected)
    assert torch.equal(made, expected)
"""


def test_the_kernel_resizes_as_torch_does() -> None:
    pytest.importorskip("triton")
    run_with_triton(CHECK, TRITON_INTERPRET="1")
