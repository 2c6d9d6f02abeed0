import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.inputs import EncoderInputs, find_files, unique_keys
from fxsplit_encoder.models.inputs import load_inputs as load_prepared
from fxsplit_encoder.models.packed_inputs import BlockPatches, image_processor
from fxsplit_encoder.models.patches import (
    IMAGE_FORMAT,
    VIDEO_FORMAT,
    PatchFormat,
    normalize_pixels,
    patchify_video,
    video_frame_size,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


PATCHES = BlockPatches(IMAGE_FORMAT, VIDEO_FORMAT)


def load_inputs(paths: list[Path]) -> EncoderInputs:
    return load_prepared(paths, PATCHES)


def normalize_frames(frames: np.ndarray, form: PatchFormat) -> np.ndarray:
    return normalize_pixels(frames, form.mean, form.std)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def save_clip(path: Path, frames: list[Image.Image]) -> Path:
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, loop=0, lossless=True)
    return path


def library_smart_resize() -> Callable[..., tuple[int, int]]:
    """The video processor's own function, out of a module that cannot be imported without torchvision."""
    spec = importlib.util.find_spec("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"]
    names: dict[str, Callable[..., tuple[int, int]]] = {}
    exec(compile(ast.Module([*found], []), spec.origin, "exec"), {"math": math}, names)
    return names["smart_resize"]


SMART_RESIZE = library_smart_resize()


@given(st.integers(2, 800), st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([4096, 131_072]))
def test_frames_are_resized_as_the_video_processor_does(
    frames: int, height: int, width: int, min_pixels: int
) -> None:
    form = PatchFormat(min_pixels, 25_165_824)
    limits = {"factor": 32, "min_pixels": form.min_pixels, "max_pixels": form.max_pixels}
    try:
        expected = SMART_RESIZE(frames, height, width, **limits)
    except ValueError:
        with pytest.raises(InputError, match="aspect ratio of at most 200"):
            video_frame_size(frames, height, width, form)
        return
    assert video_frame_size(frames, height, width, form) == expected


@pytest.mark.parametrize("size", [(64, 64), (96, 160), (300, 200), (40, 500)])
def test_a_still_repeated_twice_has_the_image_processors_patches(size: tuple[int, int]) -> None:
    image = noise(*size)
    expected = image_processor(IMAGE_FORMAT)(images=[image], return_tensors="pt")
    _, rows, columns = expected["image_grid_thw"][0].tolist()
    resized = image.resize((columns * 16, rows * 16), Image.Resampling.BICUBIC)
    frames = normalize_frames(np.stack([np.asarray(resized)] * 2), IMAGE_FORMAT)
    patches, grid = patchify_video(frames, IMAGE_FORMAT)
    assert grid == (1, rows, columns)
    torch.testing.assert_close(torch.from_numpy(patches), expected["pixel_values"], rtol=0, atol=0)


def test_patches_of_a_clip_are_those_of_its_pairs() -> None:
    frames = normalize_frames(np.stack([np.asarray(noise(64, 96, i)) for i in range(4)]), VIDEO_FORMAT)
    patches, grid = patchify_video(frames, VIDEO_FORMAT)
    pairs = [patchify_video(frames[start : start + 2], VIDEO_FORMAT)[0] for start in (0, 2)]
    assert grid == (2, 6, 4)
    np.testing.assert_array_equal(patches, np.concatenate(pairs))
    # Each half of a patch's temporal axis is its own frame.
    first = patches.reshape(-1, 3, 2, 16, 16)[0]
    np.testing.assert_array_equal(first, frames[:2, :, :16, :16].transpose(1, 0, 2, 3))


def test_an_odd_last_frame_is_repeated() -> None:
    frames = normalize_frames(np.stack([np.asarray(noise(64, 64, i)) for i in range(3)]), VIDEO_FORMAT)
    patches, grid = patchify_video(frames, VIDEO_FORMAT)
    repeated, _ = patchify_video(np.concatenate([frames, frames[-1:]]), VIDEO_FORMAT)
    assert grid == (2, 4, 4)
    np.testing.assert_array_equal(patches, repeated)


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
    exact = patchify_video(
        normalize_frames(np.stack([np.asarray(f) for f in frames]), VIDEO_FORMAT), VIDEO_FORMAT
    )
    if suffix != ".gif":
        np.testing.assert_array_equal(inputs.mm_kwargs["pixel_values_videos"].numpy(), exact[0])


def test_images_are_turned_upright_and_made_rgb(tmp_path: Path) -> None:
    upright = noise(64, 128)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    upright.convert("L").save(tmp_path / "grey.png")
    upright.convert("RGBA").save(tmp_path / "alpha.png")
    names = ("upright.png", "turned.png", "alpha.png", "grey.png")
    inputs = load_inputs([tmp_path / name for name in names])
    expected, turned, alpha, grey = inputs.mm_kwargs["pixel_values"].chunk(4)
    assert {item.layout["grid"] for item in inputs.items} == {(1, 8, 4)}
    torch.testing.assert_close(turned, expected, rtol=0, atol=0)
    torch.testing.assert_close(alpha, expected, rtol=0, atol=0)
    assert grey.isfinite().all()


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
        ("thin.png", (8, 2000), "aspect ratio must be smaller than 200"),
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


def test_settings_of_a_processor_replace_the_defaults() -> None:
    settings = {
        "size": {"shortest_edge": 65536, "longest_edge": 99999},
        "patch_size": 14,
        "image_mean": [0.1, 0.2, 0.3],
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    form = IMAGE_FORMAT.updated(settings)
    assert form == PatchFormat(65536, 99999, patch_size=14, mean=(0.1, 0.2, 0.3))
    assert form.factor == 28
    assert IMAGE_FORMAT.updated({"min_pixels": 1, "max_pixels": 2}) == PatchFormat(1, 2)
    assert IMAGE_FORMAT.updated({}) is not None


def test_the_examples_keep_their_size() -> None:
    inputs = load_inputs(find_files([EXAMPLES / "images", EXAMPLES / "videos"]))
    patches = {item.key: int(item.size) for item in inputs.items}
    assert patches["cat.jpg"] == 4 * 49
    assert patches["retina.jpg"] == 4 * 576
    assert patches["big_buck_bunny.webp"] == 4 * 896
