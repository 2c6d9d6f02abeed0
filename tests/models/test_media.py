"""Every family's media: token counts from sizes alone are those of what is prepared and encoded."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fxsplit_encoder.connector.interfaces import PIXEL_TABLE, MediaItem
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import MediaSettings, VideoFrames, VideoHeader
from fxsplit_encoder.models.media import TowerProcessor, family_processor, pixel_table, tiles_processor
from fxsplit_encoder.models.prepare import ProcessorSettings
from fxsplit_encoder.models.registry import FAMILIES
from fxsplit_encoder.models.sampling import frame_seconds
from fxsplit_encoder.towers.inputs import PixelValues

from .checkpoints import CHECKPOINTS, CPU
from .processors import noise

NAMES = [*CHECKPOINTS]
OF_CLIPS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "kimi_k25", "internvl"]


def settings_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **CHECKPOINTS[name][0]}


@lru_cache
def processor_of(name: str) -> TowerProcessor:
    """Of a tower without weights."""
    family = FAMILIES[name]
    tower = family.wrap(family.empty_tower(settings_of(name), torch.device("meta")))
    return family_processor(tower, family, settings_of(name))


def another_processor(name: str, *settings: ProcessorSettings, **options: Any) -> TowerProcessor:
    """Of the same tower, with settings and options of its own."""
    return family_processor(processor_of(name).tower, FAMILIES[name], settings_of(name), *settings, **options)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(width=st.integers(20, 900), height=st.integers(20, 900))
def test_an_images_rows_follow_from_its_size(name: str, width: int, height: int) -> None:
    processor = processor_of(name)
    preparation = FAMILIES[name].prepare(settings_of(name), ProcessorSettings())
    image = Image.new("RGB", (width, height))
    sizes, inputs = preparation.image_sizes(width, height), preparation.image(image)
    assert (sizes.layout, sizes.frames) == (inputs.layout, inputs.frames)
    assert all(torch.equal(inputs.tensors[key], value) for key, value in sizes.tensors.items())
    count = processor.count_tokens(MediaItem("image", image))
    specs = processor.tower.get_encoder_cudagraph_item_specs(dict(inputs.tensors))
    assert count == sum(spec.output_tokens for spec in specs)


@pytest.mark.parametrize("name", OF_CLIPS)
@settings(max_examples=4)
@given(frames=st.integers(2, 9), width=st.integers(20, 200), height=st.integers(20, 200))
def test_a_videos_rows_follow_from_its_size(name: str, frames: int, width: int, height: int) -> None:
    processor = processor_of(name)
    item = MediaItem("video", [Image.new("RGB", (width, height))] * frames)
    prepared = processor.prepare(item)
    assert prepared.num_tokens == processor.count_tokens(item)
    specs = processor.tower.get_encoder_cudagraph_item_specs(dict(prepared.inputs))
    assert sum(spec.output_tokens for spec in specs) == prepared.num_tokens


@pytest.mark.parametrize("name", NAMES)
def test_pixels_may_be_left_to_the_encoder_to_normalize(name: str) -> None:
    whole, later = processor_of(name), another_processor(name, normalize_later=True)
    assert later.fingerprint == whole.fingerprint
    assert later.tables.keys() == ({"image", "video"} if name in OF_CLIPS else {"image"})
    clip = [noise(100, 60, seed) for seed in range(4)]
    items = [MediaItem("image", noise(131, 87)), MediaItem("video", clip)][: len(later.tables)]
    for item in items:
        now, then = whole.prepare(item), later.prepare(item)
        assert (now.digest, now.num_tokens, now.metadata) == (then.digest, then.num_tokens, then.metadata)
        values = PixelValues(then.inputs[PIXEL_TABLE].numpy(), torch.float32, CPU)
        for key, value in now.inputs.items():
            pixels = then.inputs[key]
            assert pixels.dtype == (torch.uint8 if value.is_floating_point() else value.dtype)
            assert torch.equal(values(pixels) if value.is_floating_point() else pixels, value), key


class Brightened:
    """A preparation that does more to pixels than a table can say."""

    def __init__(self, inner: Any) -> None:
        self.image_format, self.takes_clips = inner.image_format, False
        self._inner = inner

    def image(self, image: Image.Image) -> Any:
        made = self._inner.image(image)
        if self.image_format.normalization.is_later:
            return made
        pixels = made.tensors["pixel_values"]
        return replace(made, tensors={**made.tensors, "pixel_values": pixels * pixels})


def test_a_table_is_given_only_where_it_makes_the_same_values() -> None:
    given = ProcessorSettings()
    preparations = [
        FAMILIES["qwen3_vl"].prepare(settings_of("qwen3_vl"), each)
        for each in (given, given.normalizing_later())
    ]
    assert pixel_table(*preparations, "image") is not None
    assert pixel_table(*map(Brightened, preparations), "image") is None  # type: ignore[arg-type]
    assert pixel_table(object(), object(), "image") is None  # type: ignore[arg-type]


CLIP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


@pytest.mark.parametrize("other", [{}, {"do_normalize": False}, {"rescale_factor": 1 / 128}])
@pytest.mark.parametrize(
    ("name", "kind", "settings", "more"),
    [
        ("clip_vision_model", "clip.image_processing_pil_clip.CLIP", CLIP, {"do_center_crop": False}),
        ("qwen3_vl", "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VL", {"patch_size": 16}, {"resample": 2}),
    ],
)
def test_a_device_resizes_where_that_makes_what_the_checkpoints_processor_makes(
    name: str, kind: str, settings: dict[str, Any], more: dict[str, Any], other: dict[str, Any]
) -> None:
    for changed in (other, {**other, **more}):
        processor = resolve_name(f"transformers.models.{kind}ImageProcessorPil")(**settings, **changed)
        given = ProcessorSettings(processor.to_dict(), own=processor).on("resize")
        ways = (given, given.normalizing_later())
        both = [FAMILIES[name].prepare(settings_of(name), each) for each in ways]
        assert (pixel_table(*both, "image", "resize") is not None) == (not changed)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(OF_CLIPS)))
def test_models_of_images_take_no_videos(name: str) -> None:
    with pytest.raises(MediaError, match="modality: expected image, which the model takes; got 'video'"):
        processor_of(name).count_tokens(MediaItem("video", [noise(8, 8)]))


@pytest.mark.parametrize("name", ["qwen3_vl", "kimi_k25", "internvl", "DeepseekOCRForCausalLM", "siglip"])
def test_the_same_pixels_are_the_same_item_whatever_holds_them(name: str, tmp_path: Path) -> None:
    processor, image = processor_of(name), noise(64, 40)
    path = tmp_path / "image.png"
    path.write_bytes(png(image))
    encoded = [processor.prepare(MediaItem("image", media)) for media in (path, str(path), png(image))]
    decoded = [processor.prepare(MediaItem("image", media)) for media in (image, np.asarray(image))]
    assert len({item.digest for item in encoded}) == len({item.digest for item in decoded}) == 1
    assert encoded[0].digest != decoded[0].digest
    for item in (*encoded, *decoded):
        assert item.num_tokens == processor.count_tokens(MediaItem("image", image))
        assert item.num_bytes > 0
        for key, value in encoded[0].inputs.items():
            torch.testing.assert_close(item.inputs[key], value, rtol=0, atol=0)
    for media, item in ((path, encoded[0]), (png(image), encoded[0]), (image, decoded[0])):
        assert processor.digest(MediaItem("image", media)) == item.digest
    assert processor.digest(MediaItem("image", noise(64, 40, seed=1))) != decoded[0].digest


def test_what_travels_with_a_feature() -> None:
    video = MediaItem("video", VideoFrames([noise(64, 96, seed) for seed in range(6)], fps=4.0))
    image = MediaItem("image", noise(64, 96))
    processor = processor_of("qwen3_vl")
    facts = {"hidden_size": 20, "deepstack_levels": 1}
    assert processor.prepare(image).metadata == {**facts, "grid": (1, 6, 4)}
    assert processor.prepare(video).metadata == {
        **facts,
        "grid": (3, 6, 4),
        "frame_seconds": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25),
        "grid_seconds": (0.125, 0.625, 1.125),
        "seconds_per_grid": 0.5,
    }
    parts = processor_of("kimi_k25").prepare(video).metadata
    assert parts["parts"] == [{"grid": (4, 8, 6)}, {"grid": (2, 8, 6)}]
    assert processor_of("internvl").prepare(video).metadata["tiles"] == 6
    assert processor_of("internvl").prepare(video).metadata["seconds_per_grid"] == 0.25
    deepseek = processor_of("DeepseekOCRForCausalLM").prepare(MediaItem("image", noise(700, 300)))
    assert deepseek.metadata == {"hidden_size": 12, "deepstack_levels": 0, "crops": (2, 1)}


@pytest.mark.parametrize("name", OF_CLIPS)
def test_what_a_prompt_shows_of_an_item_is_known_from_its_header(name: str) -> None:
    processor = processor_of(name)
    video = MediaItem("video", VideoFrames([noise(112, 84)] * 8, fps=4.0), {"fps": 2.0})
    runs, prepared = processor.prompt_runs(video), processor.prepare(video)
    assert sum(run.num_tokens for run in runs) == prepared.num_tokens == processor.count_tokens(video)
    if len(runs) > 1:
        assert [run.seconds for run in runs] == list(prepared.metadata["grid_seconds"])
    elif name != "kimi_k25":
        raise AssertionError("a run for each step of the grid")
    image = MediaItem("image", noise(112, 84))
    assert processor.prompt_runs(image) == [(processor.count_tokens(image), None)]


def test_options_of_one_item_change_its_rows_and_its_digest() -> None:
    processor, image = processor_of("qwen3_vl"), noise(256, 256)
    plain, smaller, shrunk = (
        MediaItem("image", image, options) for options in ({}, {"max_pixels": 96 * 96}, {"scale": 0.5})
    )
    counts = [processor.count_tokens(item) for item in (plain, smaller, shrunk)]
    assert counts == [64, 9, 16]
    prepared = [processor.prepare(item) for item in (plain, smaller, shrunk)]
    assert [item.num_tokens for item in prepared] == counts
    assert len({item.digest for item in prepared}) == 3
    video = MediaItem("video", VideoFrames([noise(64, 64, seed) for seed in range(8)], 4.0), {"fps": 2})
    prepared_video = processor.prepare(video)
    assert prepared_video.metadata["frame_seconds"] == (0.0, 0.5, 1.25, 1.75)
    tiles = processor_of("internvl")
    assert tiles.count_tokens(MediaItem("image", noise(84, 28))) == 4
    assert tiles.count_tokens(MediaItem("image", noise(84, 28), {"max_patches": 2})) == 3


def test_an_items_options_go_before_the_settings_of_the_models_own_processor() -> None:
    own: Any = FAMILIES["internvl"].prepare(settings_of("internvl"), ProcessorSettings())
    processor = another_processor("internvl", ProcessorSettings(own=own.processor))
    wide = MediaItem("image", noise(84, 28), {"max_patches": 2})
    assert processor.prepare(wide).num_tokens == processor.count_tokens(wide) == 3


@pytest.mark.parametrize(
    ("name", "modality", "options", "message"),
    [
        ("qwen3_vl", "image", {"max_pixel": 1}, "max_pixel is unknown; did you mean max_pixels"),
        ("qwen3_vl", "image", {"fps": 1}, "fps is unknown; expected one of scale, min_pixels, max_pixels"),
        ("qwen3_vl", "image", {"max_pixels": 0}, "max_pixels: expected an integer from 1 to 2147483648"),
        ("qwen3_vl", "image", {"max_pixels": True}, "got True"),
        ("qwen3_vl", "image", {"min_pixels": 1 << 31}, "expected at most 65536, the limit max_tokens"),
        ("qwen3_vl", "image", {"scale": 1.5}, "scale: expected a number above 0, up to 1; got 1.5"),
        ("qwen3_vl", "video", {"fps": float("inf")}, "fps: expected a number above 0; got inf"),
        ("qwen3_vl", "video", {"fps": 1.0}, "its frames per second are not known"),
        ("qwen3_vl", "video", {"fps": 1.0, "num_frames": 2}, "expected one of fps and num_frames"),
        ("qwen3_vl", "video", {"do_sample_frames": 1}, "do_sample_frames: expected True or False"),
        ("internvl", "image", {"max_patches": 257}, "expected an integer from 1 to 256"),
        ("qwen3_vl", "audio", {}, "modality: expected image or video"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(
    name: str, modality: Any, options: dict[str, object], message: str
) -> None:
    media = noise(64, 64) if modality == "image" else [noise(64, 64)] * 4
    with pytest.raises(MediaError, match=message):
        processor_of(name).count_tokens(MediaItem(modality, media, options))


def test_an_item_is_reduced_until_its_feature_is_half_as_large() -> None:
    processor = processor_of("qwen3_vl")
    image = MediaItem("image", noise(512, 512))
    smaller = processor.reduce(image, "half_resolution")
    assert smaller is not None
    assert (processor.count_tokens(image), processor.count_tokens(smaller)) == (256, 64)
    assert processor.reduce(image, "half_frames") is None
    assert processor_of("siglip").reduce(image, "half_resolution") is None
    video = MediaItem("video", VideoFrames([noise(64, 64, seed) for seed in range(8)], 4.0), {"fps": 4.0})
    shorter = processor.reduce(video, "half_frames")
    assert shorter is not None
    assert shorter.options == {"num_frames": 4}
    assert processor.prepare(shorter).num_tokens * 2 == processor.count_tokens(video)
    shortest = processor.reduce(MediaItem("video", video.media, {"num_frames": 3}), "half_frames")
    assert shortest is None


def test_frames_that_share_their_pixels_are_shrunk_as_well() -> None:
    shared = ProcessorSettings(video={"size": {"shortest_edge": 1024, "longest_edge": 8 * 96 * 96}})
    processor = another_processor("qwen3_vl", shared)
    video = MediaItem("video", [noise(192, 192)] * 8)
    shorter = processor.reduce(video, "half_frames")
    assert shorter is not None
    assert shorter.options["num_frames"] == 4
    assert processor.count_tokens(shorter) * 2 <= processor.count_tokens(video)


def test_processors_that_differ_make_different_digests() -> None:
    item = MediaItem("image", noise(64, 64))
    plain, other = (
        another_processor("qwen3_vl", ProcessorSettings(image=image))
        for image in ({}, {"image_mean": [0.1, 0.2, 0.3]})
    )
    assert plain.digest(item) == processor_of("qwen3_vl").digest(item) != other.digest(item)
    federal = another_processor("qwen3_vl", hash_name="sha256")
    assert len(federal.prepare(item).digest) == 32
    assert federal.digest(item) != plain.digest(item)


class TwoTiles:
    """A processor that says nothing of how many tiles it makes."""

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros(1, 2, 3, 28, 28)}

    def to_json_string(self) -> str:
        return "{}"


def test_any_image_processor_serves_a_dense_tower() -> None:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    tower = processor_of("siglip").tower
    processor = tiles_processor(tower, ViTImageProcessorPil(size={"height": 28, "width": 28}))
    prepared = processor.prepare(MediaItem("image", noise(50, 90)))
    assert prepared.inputs["pixel_values"].shape == (1, 3, 28, 28)
    assert prepared.num_tokens == processor.count_tokens(MediaItem("image", noise(9, 9))) == 4
    with pytest.raises(MediaError, match="its processor makes 8 rows of it, where its size says 4"):
        tiles_processor(tower, TwoTiles()).prepare(MediaItem("image", noise(50, 90)))


def test_limits_hold_for_what_an_item_becomes() -> None:
    processor = another_processor("qwen3_vl", limits=MediaSettings(max_tokens=60, max_frames=4))
    for modality, media, limit in (
        ("image", noise(256, 256), "max_tokens"),
        ("video", [noise(32, 32)] * 5, "max_frames"),
    ):
        item = MediaItem(modality, media)  # type: ignore[arg-type]
        for ask in (processor.count_tokens, processor.prepare):
            with pytest.raises(MediaError, match=f"the limit {limit}"):
                ask(item)


ELONGATED = {
    "qwen3_vl": (8, 2000, r"8 x 2000 pixels: .* aspect ratio must be smaller than 200"),
    "clip_vision_model": (1, 90_000, "resized to 28 x 2520000 before it is cut"),
    "step3_vl": (1, 9000, "resized to 9000 x 9000 before it is cut"),
}


@pytest.mark.parametrize("name", ELONGATED)
def test_elongated_images_are_refused_by_their_size(name: str) -> None:
    width, height, message = ELONGATED[name]
    for ask in (processor_of(name).count_tokens, processor_of(name).prepare):
        with pytest.raises(MediaError, match=message):
            ask(MediaItem("image", noise(width, height)))


def test_times_are_those_of_frames_and_of_the_steps_that_they_become() -> None:
    header = VideoHeader(20, 8, 8, fps=10.0)
    assert frame_seconds([0, 5, 10, 15, 19], header, step=2) == {
        "frame_seconds": (0.0, 0.5, 1.0, 1.5, 1.9),
        "grid_seconds": (0.25, 1.25, 1.9),
        "seconds_per_grid": 0.8,
    }
    assert frame_seconds([0, 1], VideoHeader(20, 8, 8, fps=None), step=2) == {}
