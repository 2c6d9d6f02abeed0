"""What media may cost: limits that are checked before anything of that size exists."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fxsplit_encoder.errors import ConfigError, MediaError


@dataclass(frozen=True)
class MediaLimits:
    """The most that one item may have, by what its header or its shape says, before it is decoded."""

    max_bytes: int = 1 << 28
    """Of a file, of encoded bytes, or of an array."""

    max_pixels: int = 1 << 26
    """Of an image, or of one frame. Pillow has a limit of its own, `PIL.Image.MAX_IMAGE_PIXELS`."""

    max_frames: int = 1024
    """Frames of a video that have to be decoded: those that are sampled, and of an animated image those
    before them too."""

    max_seconds: float = 3600.0
    """Of a video or of audio."""

    max_tokens: int = 1 << 16
    """Rows of its feature, which grow with the options that enlarge it."""

    def __post_init__(self) -> None:
        problems = [
            f"MediaLimits.{field.name}: expected a number above 0; got {value}"
            for field in fields(self)
            if not (value := getattr(self, field.name)) > 0
        ]
        if problems:
            raise ConfigError(*problems)

    def check(self, limit: str, value: float, what: str) -> None:
        """Raises MediaError for a value above a limit.

        Args:
            limit: the name of the limit.
            value: what the media has of it.
            what: what has it, as a message calls it.
        """
        most = getattr(self, limit)
        if value > most:
            unit = limit.removeprefix("max_")
            raise MediaError(f"{what}: {value:g} {unit}; expected at most {most:g}, the limit {limit}")
