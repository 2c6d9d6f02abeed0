from __future__ import annotations

import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.patches import (
    FRAME_FORMAT,
    IMAGE_FORMAT,
    VIDEO_FORMAT,
    BlockPatches,
    video_frame_size,
)
from fxsplit_encoder.models.prepare import EncoderInputs, ProcessorSettings, find_files, unique_keys
from fxsplit_encoder.models.prepare import load_inputs as load_prepared
from fxsplit_encoder.models.registry import FAMILIES
from fxsplit_encoder.models.sampling import (
    Rule,
    Sampling,
    by_length,
    by_seconds,
    first_of_equal_parts,
    first_to_last,
    middle_of_equal_parts,
    whole_steps_of_equal_parts,
    with_sampling,
)

from ..service.photographs import encoded
from .processors import library, noise

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


@pytest.mark.parametrize("kind", ["MPO", "TIFF"])
def test_pictures_beside_the_first_are_no_frames(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "photograph"
    path.write_bytes(encoded(noise(64, 96), kind, save_all=True, append_images=[noise(32, 48)]))
    assert [item.pixels for item in load_inputs([path]).items] == ["64x96"]


def test_keys_stay_unique() -> None:
    names = ["a/x.png", "b/x.png", "x.png#2", "\udcff.png", "x.png"]
    assert unique_keys([Path(name) for name in names]) == [
        "x.png",
        "x.png#2",
        "x.png#2#2",
        "?.png",
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
        ("half.jpg", (EXAMPLES / "images" / "cat.jpg").read_bytes()[:2000], "cannot be read as an image"),
    ],
    ids=["absent", "no image", "cut off"],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, contents: bytes | None, message: str) -> None:
    path = tmp_path / name
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(InputError, match=message) as caught:
        load_inputs([path])
    assert str(path) in str(caught.value)


# Each rule, the processor that it is of, and what else its method reads from the processor.
RULES: list[tuple[Rule, str, dict[str, Any]]] = [
    (first_to_last, "qwen3_vl.video_processing_qwen3_vl", {}),
    (whole_steps_of_equal_parts, "qwen2_vl.video_processing_qwen2_vl", {}),
    (middle_of_equal_parts, "internvl.video_processing_internvl", {"initial_shift": True}),
    (by_seconds, "glm4v.video_processing_glm4v", {}),
    (by_length, "glm46v.video_processing_glm46v", {}),
]
NAMES = [rule.__name__ for rule, _, _ in RULES]


def of_the_library(module: str, sampling: Sampling, num_frames: int, fps: float, own: dict[str, Any]) -> Any:
    function = library(module, "sample_frames")["sample_frames"]
    names = ("min_frames", "max_frames", "max_duration")
    processor = SimpleNamespace(
        fps=None,
        num_frames=None,
        temporal_patch_size=sampling.temporal_patch_size,
        **{name: getattr(sampling, name) for name in names},
        **own,
    )
    video = SimpleNamespace(total_num_frames=num_frames, fps=fps, duration=num_frames / fps)
    return function(processor, video, num_frames=sampling.num_frames, fps=sampling.fps)


@pytest.mark.parametrize(("rule", "module", "own"), RULES, ids=NAMES)
@settings(max_examples=40)
@given(
    num_frames=st.integers(1, 5000),
    fps=st.sampled_from([0.5, 1.0, 23.976, 24.0, 25.0, 29.97, 60.0]),
    rate=st.sampled_from([0.5, 1.0, 2.0, 30.0]),
    max_frames=st.sampled_from([5, 768]),
    step=st.integers(1, 4),
)
@example(num_frames=3, fps=24.0, rate=2.0, max_frames=768, step=2)
@example(num_frames=20_000, fps=25.0, rate=2.0, max_frames=768, step=2)
def test_frames_are_chosen_as_the_library_does(
    rule: Rule,
    module: str,
    own: dict[str, Any],
    num_frames: int,
    fps: float,
    rate: float,
    max_frames: int,
    step: int,
) -> None:
    sampling = Sampling(rule, fps=rate, max_frames=max_frames, temporal_patch_size=step)
    try:
        chosen = np.asarray(of_the_library(module, sampling, num_frames, fps, own)).tolist()
        expected = [index for index in chosen if index < num_frames]  # rounding may add one that is not there
    except (ValueError, RuntimeError, ZeroDivisionError):
        with pytest.raises(MediaError):
            sampling(num_frames, fps)
        return
    if not expected:
        with pytest.raises(MediaError):
            sampling(num_frames, fps)
    else:
        assert list(sampling(num_frames, fps)) == expected


@pytest.mark.parametrize("number", [1, 7, 8])
@pytest.mark.parametrize(("rule", "module", "own"), RULES[:3], ids=NAMES[:3])
def test_a_number_of_frames_is_chosen_as_the_library_does(
    rule: Rule, module: str, own: dict[str, Any], number: int
) -> None:
    sampling = Sampling(rule, num_frames=number)
    if number == 1 and rule is whole_steps_of_equal_parts:  # half a pair
        with pytest.raises(MediaError, match="0 frames were asked for"):
            sampling(50, None)
        return
    expected = of_the_library(module, sampling, 50, 25.0, own)
    assert list(sampling(50, None)) == np.asarray(expected).tolist()


def test_without_a_rate_every_frame_is_seen() -> None:
    for rule, _, _ in RULES:
        assert list(Sampling(rule)(5, None)) == list(range(5))
        assert list(Sampling(rule, fps=1.0, do_sample_frames=False)(5, None)) == list(range(5))


def test_a_rate_needs_the_videos_own() -> None:
    for rule in (first_of_equal_parts, *(rule for rule, _, _ in RULES)):
        with pytest.raises(MediaError, match="its frames per second are not known"):
            Sampling(rule, fps=2.0)(100, None)


def test_more_frames_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(MediaError, match="9 frames were asked for, of a video of 8"):
        Sampling(first_of_equal_parts, num_frames=9)(8, 24.0)


def test_an_items_options_replace_the_processors_settings() -> None:
    settings = {"fps": 2, "min_frames": 8, "do_sample_frames": False, "size": {}}
    sampling = Sampling(first_to_last).updated(with_sampling(settings, {"num_frames": 4}))
    assert (sampling.fps, sampling.num_frames, sampling.min_frames) == (None, 4, 8)
    assert list(sampling(7, None)) == [0, 2, 4, 6]
    assert Sampling(first_to_last, num_frames=3).updated(with_sampling({}, {"fps": 1.0})).fps == 1.0
    assert list(Sampling(first_to_last).updated(with_sampling(settings, {}))(3, None)) == [0, 1, 2]
    with pytest.raises(MediaError, match="expected one of fps and num_frames; got both"):
        with_sampling({}, {"fps": 1.0, "num_frames": 2})


VIDEOS = {
    "qwen2_vl": (FRAME_FORMAT, "qwen2_vl.video_processing_qwen2_vl"),
    "qwen3_vl": (VIDEO_FORMAT, "qwen3_vl.video_processing_qwen3_vl"),
    "glm4v": (VIDEO_FORMAT, "glm4v.video_processing_glm4v"),
    "glm46v": (VIDEO_FORMAT, "glm46v.video_processing_glm46v"),
}


@lru_cache
def resize_of(module: str) -> Any:
    found = library(module, "smart_resize", "resize")
    found["super"] = lambda: SimpleNamespace(resize=lambda image, size, resample: (size.height, size.width))
    return found["resize"]


@pytest.mark.parametrize("name", VIDEOS)
@settings(max_examples=120)
@given(
    frames=st.integers(4, 800),
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    limits=st.sampled_from([(4096, 25_165_824), (131_072, 786_432), (3136, 12_845_056)]),
    temporal=st.integers(1, 4),
    cap=st.sampled_from([None, False, True]),
    tokens=st.sampled_from([None, 200, 20_000]),
)
@example(16, 720, 1280, (3136, 12_845_056), 2, None, None)
def test_frames_are_resized_as_the_video_processor_does(
    name: str,
    frames: int,
    height: int,
    width: int,
    limits: tuple[int, int],
    temporal: int,
    cap: bool | None,
    tokens: int | None,
) -> None:
    form, module = VIDEOS[name]
    given = {"temporal_patch_size": temporal}
    if not name.startswith("glm"):
        given |= {"cap_pixels_per_frame": cap, "max_video_tokens": tokens}
    form = form.updated({"size": dict(zip(("shortest_edge", "longest_edge"), limits, strict=True)), **given})
    processor = SimpleNamespace(max_video_tokens=form.max_video_tokens)
    size = SimpleNamespace(shortest_edge=form.min_pixels, longest_edge=form.max_pixels)
    video = SimpleNamespace(shape=(1, frames, 3, height, width))
    options = {"factor": form.factor, "temporal_factor": temporal, "cap_pixels_per_frame": cap}
    try:
        expected = resize_of(module)(processor, video, size, None, **options)
    except ValueError:
        with pytest.raises(InputError, match="aspect ratio must be smaller than 200"):
            video_frame_size(frames, height, width, form)
        return
    assert video_frame_size(frames, height, width, form) == expected


def test_a_frame_of_qwen2_has_limits_of_its_own() -> None:
    processor = {"min_pixels": 3136, "max_pixels": 12_845_056}  # as preprocessor_config.json has them
    patches = FAMILIES["qwen2_5_vl"].prepare({}, ProcessorSettings(processor, processor))
    (clip,) = patches.clip_sizes(16, 1280, 720)
    assert clip.layout["grid"] == (8, 52, 92)


def test_one_frame_keeps_its_size() -> None:
    assert video_frame_size(1, 512, 512, VIDEO_FORMAT) == (512, 512)


@pytest.mark.parametrize("size", [(64, 64), (96, 160), (300, 200), (40, 500)])
@pytest.mark.parametrize("processor", [Qwen2VLImageProcessorPil, Glm4vImageProcessorPil])
def test_an_image_has_the_image_processors_patches(processor: Any, size: tuple[int, int]) -> None:
    """Both families' processors, with the limits that are ours without a checkpoint."""
    limits = {"shortest_edge": IMAGE_FORMAT.min_pixels, "longest_edge": IMAGE_FORMAT.max_pixels}
    statistics = IMAGE_FORMAT.normalization.as_settings()
    made = processor(size=limits, patch_size=16, merge_size=2, temporal_patch_size=2, **statistics)
    expected = made(images=[noise(*size)], return_tensors="pt")
    like_clips = processor is Glm4vImageProcessorPil
    own = BlockPatches(IMAGE_FORMAT, VIDEO_FORMAT, images_are_clips=like_clips).image(noise(*size)).tensors
    assert torch.equal(own["image_grid_thw"], expected["image_grid_thw"])
    torch.testing.assert_close(own["pixel_values"], expected["pixel_values"], rtol=0, atol=0)


def test_patches_of_a_clip_are_those_of_its_pairs() -> None:
    frames = [noise(64, 96, i) for i in range(4)]
    patches = VIDEO_FORMAT.patches(frames, (2, 6, 4))
    pairs = [VIDEO_FORMAT.patches(frames[start : start + 2], (1, 6, 4)) for start in (0, 2)]
    assert torch.equal(patches, torch.cat(pairs))
    # Each half of a patch's temporal axis is its own frame.
    corners = VIDEO_FORMAT.normalization([frame.crop((0, 0, 16, 16)) for frame in frames[:2]])
    assert torch.equal(patches.view(-1, 3, 2, 16, 16)[0], corners.transpose(0, 1))


def test_an_odd_last_frame_is_repeated() -> None:
    frames = [noise(64, 64, i) for i in range(3)]
    odd, even = (VIDEO_FORMAT.patches(given, (2, 4, 4)) for given in (frames, [*frames, frames[-1]]))
    assert torch.equal(odd, even)


# --- the checkpoint's own image processor, where transformers can make it


MEAN = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.5, 0.5]}
QWEN = {"size": {"shortest_edge": 3136, "longest_edge": 16_777_216}, "patch_size": 16, "merge_size": 2}
SIDES = {"height": 28, "width": 28}
INTERNVL = {"size": SIDES, "min_patches": 1, "max_patches": 4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ("Qwen2VLImageProcessor", {**QWEN, "temporal_patch_size": 2}, {"patch_size": 16}),
    "internvl": ("GotOcr2ImageProcessor", INTERNVL, {"image_size": [28, 28]}),
    "siglip": ("SiglipImageProcessor", {"size": SIDES}, {"image_size": 28}),
    "clip": ("CLIPImageProcessor", {"size": 28, "crop_size": 28, "resample": 2}, {"image_size": 28}),
    "dinov2": ("BitImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": SIDES}, {"image_size": 28}),
}
"""The processor's class and settings, and the vision tower's, by model type."""


# Resizing by torchvision rounds some values to the next of 256 levels, of which 2 are normalized here.
MOST_DIFFERENCE = 1.01 * 2 / 255 if importlib.util.find_spec("torchvision") else 0


def checkpoint(directory: Path, name: str) -> tuple[Checkpoint, dict[str, Any]]:
    processor, given, vision = CASES[name]
    settings = {"model_type": name, "vision_config": vision}
    own = {"image_processor_type": processor, **given, **MEAN}
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "preprocessor_config.json").write_text(json.dumps(own), encoding="utf-8")
    return Checkpoint.locate(directory), settings


def has_auto_processor() -> bool:
    """Older versions of transformers import it with torchvision alone."""
    from transformers import AutoImageProcessor

    try:
        return bool(AutoImageProcessor.from_pretrained)
    except ImportError:
        return False


@pytest.mark.skipif(not has_auto_processor(), reason="this transformers imports it with torchvision alone")
@pytest.mark.parametrize("name", CASES)
def test_it_makes_the_pixels_that_ours_makes(name: str, tmp_path: Path) -> None:
    found, settings = checkpoint(tmp_path, name)
    processors = found.processors()
    assert type(processors.own).__name__.startswith(CASES[name][0])
    family = FAMILIES[name]
    own, ours = (
        family.prepare(settings, each).image(noise(96, 64))
        for each in (processors, type(processors)(processors.image, processors.video))
    )
    assert own.layout == ours.layout
    for key, tensor in own.tensors.items():
        torch.testing.assert_close(tensor, ours.tensors[key], rtol=0, atol=MOST_DIFFERENCE)


def stand_in(monkeypatch: pytest.MonkeyPatch, from_pretrained: Any) -> None:
    monkeypatch.setattr(transformers, "AutoImageProcessor", SimpleNamespace(from_pretrained=from_pretrained))


@pytest.mark.parametrize("name", CASES)
def test_it_goes_before_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, settings = checkpoint(tmp_path, name)
    ours = FAMILIES[name].prepare(settings, found.processors())
    made = {"pixel_values": torch.ones(4, 3, 28, 28), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    processor = mock.Mock(spec=[], return_value=made)
    stand_in(monkeypatch, lambda *_, **__: processor)
    own = FAMILIES[name].prepare(settings, found.processors())
    assert type(own) is type(ours)
    own.image(noise(96, 64))
    processor.assert_called_once()
    assert processor.call_args.kwargs.get("crop_to_patches", True), "an InternVL's own settings may say no"


@pytest.mark.parametrize("error", [ImportError("torchvision"), OSError("hub"), ValueError("remote code")])
def test_one_that_cannot_be_made_is_done_without(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **options: Any) -> None:
        assert options == {"trust_remote_code": False}, "nobody is asked whether to run a checkpoint's code"
        raise error

    stand_in(monkeypatch, fail)
    found, settings = checkpoint(tmp_path, "qwen3_vl")
    assert found.processors().own is None
    prepared = FAMILIES["qwen3_vl"].prepare(settings, found.processors()).image(noise(96, 64))
    assert prepared.tensors["pixel_values"].shape == (24, 1536)
