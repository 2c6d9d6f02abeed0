import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.patches import (
    IMAGE_FORMAT,
    VIDEO_FORMAT,
    PatchFormat,
    image_processor,
    patchify_video,
    video_frame_size,
)
from fxsplit_encoder.models.prepare import Normalization

from .processors import library, noise


def normalized(frames: list[Image.Image], form: PatchFormat) -> np.ndarray:
    return form.normalization(frames).numpy()


SMART_RESIZE = library("qwen3_vl.video_processing_qwen3_vl", "smart_resize")["smart_resize"]


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
    frames = normalized([resized] * 2, IMAGE_FORMAT)
    patches, grid = patchify_video(frames, IMAGE_FORMAT)
    assert grid == (1, rows, columns)
    torch.testing.assert_close(torch.from_numpy(patches), expected["pixel_values"], rtol=0, atol=0)


def test_patches_of_a_clip_are_those_of_its_pairs() -> None:
    frames = normalized([noise(64, 96, i) for i in range(4)], VIDEO_FORMAT)
    patches, grid = patchify_video(frames, VIDEO_FORMAT)
    pairs = [patchify_video(frames[start : start + 2], VIDEO_FORMAT)[0] for start in (0, 2)]
    assert grid == (2, 6, 4)
    np.testing.assert_array_equal(patches, np.concatenate(pairs))
    # Each half of a patch's temporal axis is its own frame.
    first = patches.reshape(-1, 3, 2, 16, 16)[0]
    np.testing.assert_array_equal(first, frames[:2, :, :16, :16].transpose(1, 0, 2, 3))


def test_an_odd_last_frame_is_repeated() -> None:
    frames = normalized([noise(64, 64, i) for i in range(3)], VIDEO_FORMAT)
    patches, grid = patchify_video(frames, VIDEO_FORMAT)
    repeated, _ = patchify_video(np.concatenate([frames, frames[-1:]]), VIDEO_FORMAT)
    assert grid == (2, 4, 4)
    np.testing.assert_array_equal(patches, repeated)


def test_settings_of_a_processor_replace_the_defaults() -> None:
    settings = {
        "size": {"shortest_edge": 65536, "longest_edge": 99999},
        "patch_size": 14,
        "image_mean": [0.1, 0.2, 0.3],
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    form = IMAGE_FORMAT.updated(settings)
    assert form == PatchFormat(
        65536, 99999, patch_size=14, normalization=Normalization((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    )
    assert form.factor == 28
    assert IMAGE_FORMAT.updated({"min_pixels": 1, "max_pixels": 2}) == PatchFormat(1, 2)
    assert IMAGE_FORMAT.updated({}) is not None
