from __future__ import annotations

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fxsplit_encoder.errors import ConfigError, MediaError
from fxsplit_encoder.media import MediaSettings, load_image, measure_image, open_video, sources

from ..models.processors import noise
from ..service.photographs import encoded

EXAMPLES = Path(__file__).parents[2] / "examples" / "images"
LIMITS = MediaSettings()


def png_header(width: int, height: int) -> bytes:
    """The beginning of an image of which nothing else exists."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1 << 20) + b"IDAT"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000"])
def test_every_format_is_measured_and_decoded(kind: str, tmp_path: Path) -> None:
    data = encoded(noise(40, 24), kind)
    path = tmp_path / "image"
    path.write_bytes(data)
    for media in (data, bytearray(data), memoryview(data), path, str(path)):
        assert measure_image(media, LIMITS) == (40, 24)
        image = load_image(media, LIMITS)
        assert (image.mode, image.size) == ("RGB", (40, 24))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_images_are_turned_upright(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = noise(48, 16)
    data = encoded(stored, kind, exif=exif)
    expected = Image.open(io.BytesIO(data))
    turned = ImageOps.exif_transpose(expected).convert("RGB")
    assert measure_image(data, LIMITS) == turned.size
    np.testing.assert_array_equal(np.asarray(load_image(data, LIMITS)), np.asarray(turned))
    opened = Image.open(io.BytesIO(data))
    assert measure_image(opened, LIMITS) == turned.size
    np.testing.assert_array_equal(np.asarray(load_image(opened, LIMITS)), np.asarray(turned))


def test_arrays_of_every_form_are_the_same_image() -> None:
    image = noise(20, 12)
    pixels = np.array(image)
    alpha = np.concatenate([pixels, np.full((12, 20, 1), 255, np.uint8)], axis=2)
    for media in (
        pixels,
        alpha,
        pixels.transpose(2, 0, 1),
        torch.from_numpy(pixels),
        pixels[:, ::-1][:, ::-1],
    ):
        assert measure_image(media, LIMITS) == (20, 12)
        np.testing.assert_array_equal(np.asarray(load_image(media, LIMITS)), pixels)
    gray = pixels[..., 0]
    for media in (gray, gray[..., None], gray[None]):
        assert measure_image(media, LIMITS) == (20, 12)
        np.testing.assert_array_equal(np.asarray(load_image(media, LIMITS)), np.stack([gray] * 3, -1))


RAMP = np.linspace(0, 255, 256).round().astype(np.uint8).reshape(16, 16)
DEEP = (RAMP.astype(np.uint16) << 8) + 77  # whose upper bytes are the ramp
COLORS = np.stack([RAMP, RAMP[::-1], RAMP.T], -1)
ALPHA = RAMP[:, ::-1]


def over(colors: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    weight = ALPHA[..., None] / 255
    return colors * weight + np.array(background) * (1 - weight)


def gray(values: np.ndarray) -> np.ndarray:
    return np.stack([values] * 3, -1)


def with_alpha(mode: str) -> Image.Image:
    image = Image.fromarray(COLORS if mode.startswith("RGB") else RAMP)
    image = image.convert("P") if mode == "PA" else image
    image.putalpha(Image.fromarray(ALPHA))
    return image if image.mode == mode else image.convert(mode)


MODES = {
    "1": (lambda: Image.fromarray(RAMP > 99), gray(np.where(RAMP > 99, 255, 0)), 0),
    "L": (lambda: Image.fromarray(RAMP), gray(RAMP), 0),
    "P": (lambda: Image.fromarray(RAMP).convert("P"), gray(RAMP), 0),
    "RGB": (lambda: Image.fromarray(COLORS), COLORS, 0),
    "RGBX": (lambda: Image.fromarray(COLORS).convert("RGBX"), COLORS, 0),
    "CMYK": (lambda: Image.fromarray(COLORS).convert("CMYK"), COLORS, 0),
    "YCbCr": (lambda: Image.fromarray(COLORS).convert("YCbCr"), COLORS, 3),
    "HSV": (lambda: Image.fromarray(COLORS).convert("HSV"), COLORS, 8),
    "LAB": (lambda: Image.new("LAB", (16, 16), (255, 128, 128)), np.full((16, 16, 3), 255), 1),
    "I;16": (lambda: Image.fromarray(DEEP), gray(RAMP), 0),
    "I;16B": (lambda: Image.frombytes("I;16B", (16, 16), DEEP.astype(">u2").tobytes()), gray(RAMP), 0),
    "I;16L": (lambda: Image.frombytes("I;16L", (16, 16), DEEP.astype("<u2").tobytes()), gray(RAMP), 0),
    "I;16N": (lambda: Image.frombytes("I;16N", (16, 16), DEEP.tobytes()), gray(RAMP), 0),
    "I": (lambda: Image.fromarray(DEEP.astype(np.int32)), gray(RAMP), 0),
    "F": (lambda: Image.fromarray(DEEP.astype(np.float32)), gray(RAMP), 0),
    "RGBA": (lambda: with_alpha("RGBA"), COLORS, 1),
    "RGBa": (lambda: with_alpha("RGBa"), COLORS, 2),
    "LA": (lambda: with_alpha("LA"), gray(RAMP), 1),
    "La": (lambda: with_alpha("La"), gray(RAMP), 2),
    "PA": (lambda: with_alpha("PA"), gray(RAMP), 1),
}


@pytest.mark.parametrize("background", [(255, 255, 255), (10, 200, 30)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(mode: str, background: tuple[int, int, int]) -> None:
    make, expected, most = MODES[mode]
    image = make()
    assert image.mode == mode
    made = np.asarray(load_image(image, MediaSettings(background=background)), np.float64)
    if "a" in mode.lower() and mode != "LAB":
        expected = over(expected, background)
    assert np.abs(made - expected).max() <= most


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_floats_are_scaled_by_their_range(top: float) -> None:
    image = Image.fromarray((RAMP / 255 * top).astype(np.float32))
    made = np.asarray(load_image(image, LIMITS)).astype(int)
    assert np.abs(made - gray(RAMP)).max() <= 1
    broken = np.array([[np.nan, np.inf, -np.inf, 0.5, 1.0]], np.float32)
    assert np.asarray(load_image(Image.fromarray(broken), LIMITS))[0, :, 0].tolist() == [0, 0, 0, 127, 255]


@pytest.mark.parametrize("deep", [False, True])
def test_a_transparent_color_is_the_background(deep: bool) -> None:
    values = DEEP if deep else RAMP
    data = encoded(Image.fromarray(values), transparency=int(values[3, 5]))
    made = np.asarray(load_image(data, MediaSettings(background=(1, 2, 3))))
    assert made[3, 5].tolist() == [1, 2, 3] and made[9, 9].tolist() == [RAMP[9, 9]] * 3


def test_transparent_arrays_and_frames_have_the_background() -> None:
    settings = MediaSettings(background=(1, 2, 3))
    array = np.zeros((4, 4, 4), np.uint8)
    assert np.asarray(load_image(array, settings)).reshape(-1, 3).tolist() == [[1, 2, 3]] * 16
    frames = [Image.new("RGBA", (4, 4), (0, 0, 0, 0)), Image.new("RGBA", (4, 4), (9, 9, 9, 255))]
    data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True, duration=100)
    with open_video(data, settings) as video:
        first, second = list(video.select([0, 1], settings))
    assert first.getpixel((0, 0)) == (1, 2, 3) and second.getpixel((0, 0)) == (9, 9, 9)


@pytest.mark.parametrize("background", [(1, 2), (1, 2, 256), (1, 2, 3.0), "white"])
def test_a_background_is_a_color(background: object) -> None:
    with pytest.raises(ConfigError, match=r"MediaSettings\.background: expected"):
        MediaSettings(background=background)


def test_nothing_is_decoded_to_be_measured() -> None:
    whole = encoded(noise(300, 200), "JPEG")
    head = whole[:700]
    assert measure_image(head, LIMITS) == (300, 200)
    with pytest.raises(MediaError, match=r"encoded media: cannot be read as an image: OSError: .*truncated"):
        load_image(head, LIMITS)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (b"", "encoded media: cannot be read as an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read as an image"),
        (Path("/absent.png"), r"/absent\.png: no such file"),
        (Path("/dev/zero"), "/dev/zero: expected a regular file"),
        ("https://example.org/cat.png", "expected a path; fetch what it names"),
        (EXAMPLES, "expected a regular file"),
        (None, "image: expected a PIL image, an array of uint8, bytes or a path; got None"),
        (np.zeros((4, 4, 3), np.float32), "expected an array of uint8; got ndarray"),
        (np.zeros((5, 4, 5), np.uint8), r"1, 3 or 4 channels; got \(5, 4, 5\)"),
        (np.zeros((0, 4, 3), np.uint8), r"got \(0, 4, 3\)"),
    ],
)
def test_what_is_no_image_is_named(media: object, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        load_image(media, LIMITS)


def test_limits_hold_before_anything_is_decoded(tmp_path: Path) -> None:
    few_pixels, few_bytes = MediaSettings(max_pixels=99), MediaSettings(max_bytes=50)
    data = encoded(noise(10, 10))
    path = tmp_path / "image.png"
    path.write_bytes(data)
    bomb = png_header(40_000, 40_000)
    for media in (data, path, noise(10, 10), np.zeros((10, 10, 3), np.uint8)):
        for read in (measure_image, load_image):
            with pytest.raises(MediaError, match="100 pixels; expected at most 99, the limit max_pixels"):
                read(media, few_pixels)
    for read in (measure_image, load_image):
        with pytest.raises(MediaError, match="DecompressionBomb"):
            read(bomb, MediaSettings(max_pixels=1 << 40))
        with pytest.raises(MediaError, match=r"6.4e\+07 pixels"):
            read(png_header(8_000, 8_000), MediaSettings(max_pixels=1 << 24))
        for media in (data, path):
            with pytest.raises(MediaError, match="the limit max_bytes"):
                read(media, few_bytes)
    with pytest.raises(MediaError, match="the limit max_bytes"):
        load_image(np.zeros((10, 10, 3), np.uint8), few_bytes)


def test_pixels_take_as_many_reads_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_HEADER_READS", 12)
    monkeypatch.setattr(sources, "_BYTES_PER_READ", 1 << 30)
    assert load_image(encoded(noise(300, 300)), LIMITS).size == (300, 300)


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match=r"MediaSettings\.max_pixels: expected a number above 0; got 0"):
        MediaSettings(max_pixels=0)


def test_files_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encoded(noise(10, 10)))
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(8):
        measure_image(path, LIMITS)
        load_image(path, LIMITS)
        with pytest.raises(MediaError):
            measure_image(path, MediaSettings(max_pixels=1))
    assert len(list(descriptors.iterdir())) == before


def test_threads_share_an_image_that_is_not_decoded_yet() -> None:
    expected = np.asarray(Image.open(EXAMPLES / "astronaut.jpg"))
    for _ in range(3):
        lazy = Image.open(EXAMPLES / "astronaut.jpg")
        with ThreadPoolExecutor(8) as pool:
            for image in pool.map(lambda _, lazy=lazy: load_image(lazy, LIMITS), range(16)):
                np.testing.assert_array_equal(np.asarray(image), expected)
