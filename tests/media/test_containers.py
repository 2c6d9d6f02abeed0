"""Video files. They take torchcodec and FFmpeg, which not every machine has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import MediaSettings, open_video

try:
    from torchcodec.encoders import VideoEncoder
except (ImportError, OSError, RuntimeError) as error:
    pytest.skip(f"no torchcodec: {str(error).splitlines()[0]}", allow_module_level=True)

LIMITS = MediaSettings()
LEVELS = [20, 60, 100, 140, 180, 220]


def video_of(frames: int = 48, fps: float = 24.0, kind: str = "mp4") -> bytes:
    """Frames of one gray each, which rises along the video."""
    grays = torch.tensor(LEVELS, dtype=torch.uint8).repeat_interleave(frames // len(LEVELS))
    pixels = grays[:, None, None, None].expand(frames, 3, 96, 128).contiguous()
    encoder = VideoEncoder(pixels, frame_rate=fps)
    return bytes(encoder.to_tensor(format=kind).numpy())


@pytest.mark.parametrize("kind", ["mp4", "mkv", "webm", "avi", "mov"])
def test_a_file_is_measured_and_decoded(kind: str, tmp_path: Path) -> None:
    name = {"mkv": "matroska"}.get(kind, kind)
    try:
        data = video_of(kind=name)
    except RuntimeError:
        pytest.skip(f"this FFmpeg writes no {kind}")
    path = tmp_path / f"video.{kind}"
    path.write_bytes(data)
    for media in (data, path):
        with open_video(media, LIMITS) as video:
            header = video.header
            assert (header.num_frames, header.width, header.height) == (48, 128, 96)
            assert header.fps == pytest.approx(24.0)
            indices = list(range(4, 48, 8))
            frames = [np.asarray(frame) for frame in video.select(indices, LIMITS)]
        assert [round(frame.mean() / 20) * 20 for frame in frames] == LEVELS
        assert frames[0].shape == (96, 128, 3)


def test_frames_beyond_one_batch_of_the_decoder_come_in_order() -> None:
    with open_video(video_of(), LIMITS) as video:
        grays = [np.asarray(frame).mean() for frame in video.select(range(48), LIMITS)]
    assert len(grays) == 48
    assert grays == sorted(grays)


def test_limits_hold_before_anything_is_decoded() -> None:
    data = video_of()
    for limits, limit in (
        (MediaSettings(max_pixels=12_000), "max_pixels"),
        (MediaSettings(max_seconds=1.9), "max_seconds"),
        (MediaSettings(max_bytes=100), "max_bytes"),
    ):
        with pytest.raises(MediaError, match=f"the limit {limit}"), open_video(data, limits):
            pass
    with open_video(data, LIMITS) as video, pytest.raises(MediaError, match="the limit max_frames"):
        video.select(range(20), MediaSettings(max_frames=19))


def test_broken_files_are_named() -> None:
    data = video_of()
    broken = [b"", b"junk" * 100, data[: len(data) // 2], data[:64], data[:-200]]
    for media in broken:
        with pytest.raises(MediaError, match=r"cannot be read as|finds no frames"):
            with open_video(media, LIMITS) as video:
                list(video.select(range(video.header.num_frames), LIMITS))
