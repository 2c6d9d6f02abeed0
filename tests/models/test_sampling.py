from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.models.sampling import (
    Rule,
    Sampling,
    by_length,
    by_seconds,
    first_of_equal_parts,
    first_to_last,
    middle_of_equal_parts,
    pairs_of_equal_parts,
    with_sampling,
)

from .processors import library

# Each rule, the processor that it is of, and what else its method reads from the processor.
RULES: list[tuple[Rule, str, dict[str, Any]]] = [
    (first_to_last, "qwen3_vl.video_processing_qwen3_vl", {}),
    (pairs_of_equal_parts, "qwen2_vl.video_processing_qwen2_vl", {}),
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
        temporal_patch_size=2,
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
)
@example(num_frames=3, fps=24.0, rate=2.0, max_frames=768)
@example(num_frames=20_000, fps=25.0, rate=2.0, max_frames=768)
def test_frames_are_chosen_as_the_library_does(
    rule: Rule, module: str, own: dict[str, Any], num_frames: int, fps: float, rate: float, max_frames: int
) -> None:
    sampling = Sampling(rule, fps=rate, max_frames=max_frames)
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
    if number == 1 and rule is pairs_of_equal_parts:  # half a pair
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
