"""Settings of encoders of images, and images to a tower's inputs on the host, pixels as uint8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import BeforeValidator, Field

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.media import MediaSettings, load_image
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import read_family
from fxsplit_encoder.models.media import normalization_of, pixel_table
from fxsplit_encoder.models.prepare import Prepared
from fxsplit_encoder.settings_model import Bytes, Settings, parse_bytes

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Pooling = Literal["none", "mean"]


_Color = Annotated[int, Field(strict=True, ge=0, le=255)]


class ImageEncoderSettings(Settings):
    """What a worker needs to know to encode images. Immutable, comparable, hashable, and small to send.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """

    model: Annotated[str, Field(min_length=1)]
    """A checkpoint, whole or its vision tower: a directory that every worker sees, or a hub name."""

    default_config: ClassVar[EncoderConfig] = EncoderConfig()
    """That of a GPU where `config` is None."""

    config: EncoderConfig | None = None
    """How the tower is captured. None: inferred budgets; on a CPU no captures."""

    device: str = "auto"
    """Where the tower runs: cpu, cuda or cuda:N. auto: the worker's GPU if it has one."""

    dtype: DtypeName = "auto"
    """Of the tower. auto: bfloat16 on CUDA, else float32."""

    pooling: Pooling = "none"
    """What an embedding is. none: one row per output token; mean: the mean of these rows, in float32."""

    output_dtype: Literal["float32", "float16"] = "float32"
    """Of embeddings as they are handed out. float16 rounds."""

    max_pixels: Annotated[int, Field(strict=True, ge=1)] = 1 << 26
    """Of an image; a larger one is refused by its header, before it is decoded."""

    max_image_bytes: Annotated[Bytes, BeforeValidator(parse_bytes)] = 1 << 26
    """Of an image as it is given, as an integer or a size such as 20MiB."""

    background: tuple[_Color, _Color, _Color] = (255, 255, 255)
    """Red, green and blue, 0 to 255, over which transparent images are composited."""

    def resolved_device(self) -> torch.device:
        """The device on this machine.

        Raises:
            InputError: torch knows no such device, or it is not there.
        """
        cuda = torch.cuda.is_available()
        if self.device == "auto":
            return torch.device("cuda" if cuda else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise InputError(f"device: expected auto, cpu, cuda or cuda:N; got {self.device}")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise InputError(f"device: {self.device}, and this worker sees {torch.cuda.device_count()} GPUs")
        return device

    def resolved_dtype(self, device: torch.device) -> torch.dtype:
        """The tower's dtype on a device."""
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def resolved_config(self, device: torch.device) -> EncoderConfig:
        """The captures on a device."""
        if self.config is not None:
            return self.config
        # Captures pay off over many calls on a GPU. On a CPU they only cost.
        return self.default_config if device.type == "cuda" else EncoderConfig(mode="none")


class ServingSettings(ImageEncoderSettings):
    """Of encoders that answer requests, none of which should wait for a capture that pays off later."""

    default_config: ClassVar[EncoderConfig] = EncoderConfig(capture_recurring=False)


Array = NDArray[Any]


@dataclass(frozen=True)
class PreparedImage:
    """One image as the tower takes it, on the host.

    ``inputs`` are the tower's keyword arguments for this image alone. Those of uint8 are pixels, which the
    encoder normalizes by ``ImagePreparer.values``; floats are pixels that are normalized already; integers
    are grids and counts. ``layout`` says how the image was cut: "grid", "tiles" or "crops".
    """

    inputs: Mapping[str, Array]
    layout: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of ``inputs``."""
        return sum(array.nbytes for array in self.inputs.values())


class ImagePreparer:
    """Decodes images and prepares them for the tower of a checkpoint, whose weights it does not read.

    Args:
        settings: the checkpoint, and the limits of an image.

    Raises:
        InputError: the checkpoint has no tower that is known.
    """

    def __init__(self, settings: ImageEncoderSettings) -> None:
        self._limits = MediaSettings(
            max_bytes=settings.max_image_bytes, max_pixels=settings.max_pixels, background=settings.background
        )
        checkpoint = Checkpoint.locate(settings.model)
        family, config = read_family(checkpoint)
        processors = checkpoint.processors()
        self._whole = family.prepare(config, processors)
        self._later = family.prepare(config, processors.normalizing_later())
        self.values: NDArray[np.float32] = normalization_of(self._whole).values()
        """(channels, 256): what the encoder makes of each value of each channel."""

        self.normalizes_later = pixel_table(self._whole, self._later, "image") is not None
        """Whether pixels are uint8. Else this checkpoint's are not what `values` makes of them."""

    def load(self, media: bytes | memoryview | Array) -> PreparedImage:
        """An encoded image, the first of several in a file; or pixels of uint8, (height, width) or with 1, 3
        or 4 channels.

        Raises:
            MediaError: it cannot be decoded or prepared, or is beyond a limit.
        """
        return self.prepare(load_image(media, self._limits))

    def prepare(self, image: Image.Image) -> PreparedImage:
        """An upright RGB image.

        Raises:
            MediaError: it cannot be prepared, such as one that is too elongated.
        """
        try:
            return self._prepared(image)
        except (InputError, ValueError) as error:  # transformers' processors raise the latter
            raise MediaError(str(error)) from None

    def _prepared(self, image: Image.Image) -> PreparedImage:
        if not self.normalizes_later:
            return _as_arrays(self._whole.image(image))
        made = _as_arrays(self._later.image(image))
        # Some processors lay whole numbers out as floats.
        inputs = {name: a.astype(np.uint8) if a.dtype.kind == "f" else a for name, a in made.inputs.items()}
        return PreparedImage(inputs, made.layout)


def _as_arrays(prepared: Prepared) -> PreparedImage:
    return PreparedImage({name: t.numpy() for name, t in prepared.tensors.items()}, prepared.layout)
