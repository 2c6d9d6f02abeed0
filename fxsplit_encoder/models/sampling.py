"""Choose the frames of a video that a model sees, by the rule of its video processor, and tell their times.

Without a rate or a number to sample by, it sees every frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import VideoHeader


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a video processor, by the names of its JSON file."""

    rule: Rule
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    max_duration: float = 300
    do_sample_frames: bool = True
    temporal_patch_size: int = 2

    def updated(self, settings: Mapping[str, Any]) -> Sampling:
        """A copy with what a processor's settings say."""
        names = (each.name for each in fields(self))
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        return replace(self, **{**given, "rule": self.rule})

    def __call__(self, num_frames: int, fps: float | None) -> Sequence[int]:
        """The frames of a video, rising; one may come twice.

        Raises:
            MediaError: they cannot be chosen, or the video has too few.
        """
        if not self.do_sample_frames or (self.fps is None and self.num_frames is None):
            return range(num_frames)
        indices = self.rule(self, num_frames, fps)
        if not indices or indices[-1] >= num_frames:
            raise MediaError(f"video: its {num_frames} frames are too few to sample; pass num_frames")
        return indices

    def by_rate(self, num_frames: int, fps: float | None) -> float:
        """Number of frames of a video at the requested rate."""
        assert self.fps is not None
        return num_frames / known(fps) * self.fps


Rule = Callable[[Sampling, int, "float | None"], Sequence[int]]


def known(fps: float | None) -> float:
    """Return a video's frames per second; raises MediaError where they are not known."""
    if fps is None:
        raise MediaError(
            "video: its frames per second are not known, and frames are sampled by them; pass "
            "VideoFrames(frames, fps), or one of the options num_frames and do_sample_frames=False"
        )
    return fps


def with_sampling(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A processor's settings with the options of one item, of which a rate and a number rule each other out.

    Raises:
        MediaError: the options have both.
    """
    asked = [name for name in ("fps", "num_frames") if options.get(name) is not None]
    if len(asked) == 2:
        raise MediaError("options: expected one of fps and num_frames; got both")
    dropped = {"fps": None, "num_frames": None, "do_sample_frames": True} if asked else {}
    return {**settings, **dropped, **options}


def frame_seconds(indices: Sequence[int], header: VideoHeader, step: int) -> dict[str, object]:
    """When a video's frames are: what prompts and positions in time are made of. Empty where it is not known.

    Returns:
        `frame_seconds`, of every frame that is seen; `grid_seconds`, the middle of the first and the last of
        the `step` frames that become one; and `seconds_per_grid`, how long those last.
    """
    if header.fps is None:
        return {}
    seconds = [index / header.fps for index in indices]
    grids = [seconds[start : start + step] for start in range(0, len(seconds), step)]
    seen_a_second = len(indices) / header.num_frames * header.fps
    return {
        "frame_seconds": tuple(seconds),
        "grid_seconds": tuple((group[0] + group[-1]) / 2 for group in grids),
        "seconds_per_grid": step / seen_a_second,
    }


# --- the rules of transformers' processors


def first_of_equal_parts(sampling: Sampling, num_frames: int, fps: float | None) -> Sequence[int]:
    """The first frame of each of equal parts: what processors without a rule of their own do."""
    count = sampling.num_frames or int(sampling.by_rate(num_frames, fps))
    return _parts(num_frames, count)


def middle_of_equal_parts(sampling: Sampling, num_frames: int, fps: float | None) -> Sequence[int]:
    """The frame in the middle of each of equal parts: InternVL."""
    count = sampling.num_frames or int(sampling.by_rate(num_frames, fps))
    return _parts(num_frames, count, shift=num_frames / max(count, 1) / 2)


def whole_steps_of_equal_parts(sampling: Sampling, num_frames: int, fps: float | None) -> Sequence[int]:
    """The first frame of each of equal parts, as many as fill patches in time: Qwen2-VL and Qwen2.5-VL."""
    step = sampling.temporal_patch_size
    if sampling.num_frames is not None:
        return _parts(num_frames, round(sampling.num_frames / step) * step)
    most = min(sampling.max_frames, num_frames) // step * step
    wanted = min(max(sampling.by_rate(num_frames, fps), sampling.min_frames), most, num_frames)
    return _parts(num_frames, math.floor(wanted / step) * step)


def first_to_last(sampling: Sampling, num_frames: int, fps: float | None) -> Sequence[int]:
    """At equal distances from the first frame to the last: Qwen3-VL and Qwen3.5."""
    count = sampling.num_frames
    if count is None:
        wanted = max(int(sampling.by_rate(num_frames, fps)), sampling.min_frames)
        count = min(wanted, sampling.max_frames, num_frames)
    chosen: list[int] = np.linspace(0, num_frames - 1, count).round().astype(int).tolist()
    return chosen


def by_seconds(sampling: Sampling, num_frames: int, fps: float | None) -> Sequence[int]:
    """At equal times, and an even number: GLM-4.1V."""
    if sampling.fps is None:
        return _even(first_of_equal_parts(sampling, num_frames, fps))
    rate, asked, last = known(fps), sampling.fps, num_frames - 1
    seconds = num_frames / rate
    if seconds <= sampling.max_duration:
        count = max(math.floor(seconds * asked), 1)
        return _even(min(last, math.ceil(number * rate / asked)) for number in range(count))
    count = int(sampling.max_duration * asked)
    if count >= num_frames:
        return _even(range(num_frames))
    return _even(min(last, math.ceil(time * rate)) for time in np.linspace(0, seconds, count))


def by_length(sampling: Sampling, num_frames: int, fps: float | None) -> Sequence[int]:
    """The fewer a second the longer the video is, and an even number: GLM-4.6V."""
    if sampling.fps is None:
        return _even(first_of_equal_parts(sampling, num_frames, fps))
    rate, step = known(fps), sampling.temporal_patch_size
    seconds = num_frames / rate
    asked = next(asked for most, asked in _GLM_RATES if min(seconds, _GLM_SECONDS) <= most)
    count = min(int(min(seconds, _GLM_SECONDS) * asked * step), _GLM_FRAMES)
    chosen = _each_time(num_frames, rate, 1 / (step * asked), int(seconds)) if num_frames >= count else []
    if len(chosen) != count:
        start, end = (chosen[0], chosen[-1]) if 0 < len(chosen) < count else (0, num_frames - 1)
        chosen = np.linspace(start, end, count, dtype=int).tolist()
    return _even(chosen)


_GLM_SECONDS, _GLM_FRAMES = 2400, 640
_GLM_RATES = ((30, 3.0), (300, 1.0), (_GLM_SECONDS, 0.5))


def _each_time(num_frames: int, rate: float, step: float, end: int) -> list[int]:
    """The first frame at or after each of equal times below `end`."""
    duration, time, chosen = 1 / rate, 0.0, []
    for number in range(num_frames):
        if number * duration >= time:
            time += step
            chosen.append(number)
            if time >= end:
                break
    return chosen


def _parts(num_frames: int, count: int, shift: float = 0.0) -> list[int]:
    if not 0 < count <= num_frames:
        raise MediaError(f"video: {count} frames were asked for, of a video of {num_frames}; pass num_frames")
    # torch's own, as the processors do: it adds up in 32 bits, and may come to one frame too many.
    indices = torch.arange(shift, num_frames, num_frames / count, dtype=torch.float32, device="cpu")
    return [index for index in indices.int().tolist() if index < num_frames]


def _even(indices: Iterable[int]) -> list[int]:
    unique = list(dict.fromkeys(int(index) for index in indices))
    return unique + unique[-1:] if len(unique) % 2 else unique
