"""Which reader takes a video."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.animated import AnimatedImage
from fxsplit_encoder.media.animations import animation_seconds, is_animation
from fxsplit_encoder.media.containers import ContainedVideo
from fxsplit_encoder.media.images import open_image
from fxsplit_encoder.media.limits import MediaLimits
from fxsplit_encoder.media.sources import attempt, header_source, is_encoded, name_of, opened
from fxsplit_encoder.media.videos import DecodedVideo, Video, VideoFrames


def open_video(media: object, limits: MediaLimits) -> Video:
    """Reads what a video's header says; nothing is decoded. The video is to be closed.

    Args:
        media: `VideoFrames`, or their `frames` alone; an animated PIL image; encoded bytes or a path, of an
            animated WebP, GIF or PNG, or of anything that FFmpeg reads.
        limits: of bytes, pixels and seconds; `Video.select` checks the frames.

    Raises:
        MediaError: it is no video, or beyond a limit.
        MissingExtraError: FFmpeg has to read it, and torchcodec is not installed.
    """
    video = _open(media, limits)
    try:
        _check(video, limits)
    except MediaError:
        video.close()
        raise
    return video


def _check(video: Video, limits: MediaLimits) -> None:
    header = video.header
    limits.check("max_pixels", header.width * header.height, "video")
    if header.fps:
        limits.check("max_seconds", header.num_frames / header.fps, "video")


def _open(media: object, limits: MediaLimits) -> Video:
    if is_encoded(media):
        return _open_encoded(media, limits)
    if isinstance(media, Image.Image):
        video = AnimatedImage(media, None, is_own=False)
        # Its digest takes all of them.
        limits.check("max_frames", video.header.num_frames, "video")
        return video
    return DecodedVideo(media if isinstance(media, VideoFrames) else VideoFrames(media), limits)


def _open_encoded(media: object, limits: MediaLimits) -> Video:
    name = name_of(media)
    source = header_source(media, limits)
    with attempt(name, "a video"), opened(source) as file:
        start = file.read(16)
        file.seek(0)
        seconds = animation_seconds(file)
    if is_animation(start):
        return AnimatedImage(open_image(media, limits), seconds, is_own=True)
    return ContainedVideo(source if isinstance(source, Path) else source.getvalue(), name)
