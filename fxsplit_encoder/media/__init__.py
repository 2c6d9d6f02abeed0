"""Raw media: what is known of it before it is decoded, and what it is decoded to."""

from fxsplit_encoder.media.audio import AudioSamples, load_audio, measure_audio, sample_bytes
from fxsplit_encoder.media.images import load_image, measure_image, pixel_bytes, pixels_of, scaled, shrunk
from fxsplit_encoder.media.sources import MediaSettings, read_source
from fxsplit_encoder.media.videos import AnimatedImage, Frames, VideoFrames, VideoHeader, open_video

__all__ = [
    "AnimatedImage",
    "AudioSamples",
    "Frames",
    "MediaSettings",
    "VideoFrames",
    "VideoHeader",
    "load_audio",
    "load_image",
    "measure_audio",
    "measure_image",
    "open_video",
    "pixel_bytes",
    "pixels_of",
    "read_source",
    "sample_bytes",
    "scaled",
    "shrunk",
]
