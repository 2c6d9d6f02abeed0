"""Which checkpoint encodes images, where, and what becomes of its output."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.settings_model import Bytes, Settings, parse_bytes

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Pooling = Literal["none", "mean"]


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
