from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.patches import (
    IMAGE_FORMAT,
    VIDEO_FORMAT,
    BlockPatches,
    patchify_video,
)
from fxsplit_encoder.models.prepare import EncoderInputs, find_files, unique_keys
from fxsplit_encoder.models.prepare import load_inputs as load_prepared

from .processors import noise

EXAMPLES = Path(__file__).parents[2] / "examples"
PATCHES = BlockPatches(IMAGE_FORMAT, VIDEO_FORMAT)


def load_inputs(paths: list[Path]) -> EncoderInputs:
    return load_prepared(paths, PATCHES)


def save_clip(path: Path, frames: list[Image.Image]) -> Path:
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, loop=0, lossless=True)
    return path


def test_images_come_first_then_clips(tmp_path: Path) -> None:
    clip = save_clip(tmp_path / "clip.webp", [noise(64, 96, seed) for seed in range(3)])
    wide, tall = tmp_path / "wide.png", tmp_path / "tall.png"
    noise(128, 64).save(wide)
    noise(64, 128).save(tall)
    inputs = load_inputs([clip, wide, tall])
    assert [item.key for item in inputs.items] == ["wide.png", "tall.png", "clip.webp"]
    assert [item.pixels for item in inputs.items] == ["128x64", "64x128", "3x64x96"]
    assert [(item.layout, item.size) for item in inputs.items] == [
        ({"grid": (1, 4, 8)}, "32"),
        ({"grid": (1, 8, 4)}, "32"),
        ({"grid": (2, 6, 4)}, "48"),
    ]
    assert inputs.mm_kwargs["image_grid_thw"].tolist() == [[1, 4, 8], [1, 8, 4]]
    assert inputs.mm_kwargs["video_grid_thw"].tolist() == [[2, 6, 4]]
    assert inputs.mm_kwargs["pixel_values"].shape == (64, 1536)
    assert inputs.mm_kwargs["pixel_values_videos"].shape == (48, 1536)
    assert load_inputs([clip]).mm_kwargs.keys() == {"pixel_values_videos", "video_grid_thw"}


@pytest.mark.parametrize("suffix", [".webp", ".gif", ".png"])
def test_every_animated_format_is_a_clip(tmp_path: Path, suffix: str) -> None:
    # Animated PNG and lossless WebP keep every pixel, GIF has a palette.
    frames = [noise(64, 64, seed) for seed in range(4)]
    inputs = load_inputs([save_clip(tmp_path / f"clip{suffix}", frames)])
    assert [(item.frames, item.layout["grid"]) for item in inputs.items] == [(4, (2, 4, 4))]
    exact = patchify_video(VIDEO_FORMAT.normalization(frames).numpy(), VIDEO_FORMAT)
    if suffix != ".gif":
        np.testing.assert_array_equal(inputs.mm_kwargs["pixel_values_videos"].numpy(), exact[0])


def test_images_are_turned_upright_and_made_rgb(tmp_path: Path) -> None:
    upright = noise(64, 128)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    upright.convert("L").save(tmp_path / "gray.png")
    upright.convert("RGBA").save(tmp_path / "alpha.png")
    names = ("upright.png", "turned.png", "alpha.png", "gray.png")
    inputs = load_inputs([tmp_path / name for name in names])
    expected, turned, alpha, gray = inputs.mm_kwargs["pixel_values"].chunk(4)
    assert {item.layout["grid"] for item in inputs.items} == {(1, 8, 4)}
    torch.testing.assert_close(turned, expected, rtol=0, atol=0)
    torch.testing.assert_close(alpha, expected, rtol=0, atol=0)
    assert gray.isfinite().all()


def test_keys_stay_unique() -> None:
    names = ["a/x.png", "b/x.png", "x.png#2", "y.png", "x.png"]
    assert unique_keys([Path(name) for name in names]) == [
        "x.png",
        "x.png#2",
        "x.png#2#2",
        "y.png",
        "x.png#3",
    ]


def test_directories_are_searched_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    other = Path("elsewhere.png")
    assert find_files([other, tmp_path]) == [other, tmp_path / "a.JPG", tmp_path / "b.png"]
    with pytest.raises(InputError, match=r"empty: no image in this directory; expected .*\.webp"):
        find_files([tmp_path / "empty"])


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("absent.png", None, "no such file"),
        ("text.png", b"words", "cannot be read as an image"),
        ("thin.png", (8, 2000), "aspect ratio of at most 200"),
    ],
)
def test_unusable_files_are_named(
    tmp_path: Path, name: str, contents: bytes | tuple[int, int] | None, message: str
) -> None:
    path = tmp_path / name
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents is not None:
        noise(*contents).save(path)
    with pytest.raises(InputError, match=message) as caught:
        load_inputs([path])
    assert str(path) in str(caught.value)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "half.jpg"
    path.write_bytes((EXAMPLES / "images" / "cat.jpg").read_bytes()[:2000])
    with pytest.raises(InputError, match=r"half\.jpg: cannot be read as an image"):
        load_inputs([path])


def test_the_examples_keep_their_size() -> None:
    inputs = load_inputs(find_files([EXAMPLES / "images", EXAMPLES / "videos"]))
    patches = {item.key: int(item.size) for item in inputs.items}
    assert patches["cat.jpg"] == 4 * 49
    assert patches["retina.jpg"] == 4 * 576
    assert patches["big_buck_bunny.webp"] == 4 * 896
