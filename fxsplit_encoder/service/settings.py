"""Settings of encoders of images and texts, and of a service of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.models.prepare import OnDevice
from fxsplit_encoder.settings_model import Bytes, Settings, parse_bytes

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Pooling = Literal["none", "mean", "model"]

_Number = Annotated[int, Field(ge=1)]  # not strict: a command line gives text


class ImageEncoderSettings(Settings):
    """Settings of a worker's encoder; ConfigError: a key is unknown, or a value is not allowed."""

    model: Annotated[str, Field(min_length=1)]
    """A checkpoint, whole or its vision tower: a directory that every worker sees, or a hub name."""

    captures_recurring: ClassVar[bool] = True
    """Whether recurring token counts are captured where `config` does not say."""
    pools_by_default: ClassVar[bool] = False

    config: EncoderConfig | None = None
    """How the tower is captured. None: inferred budgets; on a CPU no captures."""

    device: str = "auto"
    """Where the tower runs: cpu, cuda or cuda:N. auto: the worker's GPU if it has one."""

    dtype: DtypeName = "auto"
    """Of the tower. auto: bfloat16 on CUDA, else float32."""

    pooling: Pooling | None = None
    """What an embedding is. none: one row per output token; mean: the mean of these rows, in float32; model:
    the model's own pooled and projected vector. None: none; of a service model where there is such a vector,
    else mean."""

    normalize: bool | None = None
    """Whether every row of an embedding is divided by its length. None: only vectors of a service."""

    output_dtype: Literal["float32", "float16"] = "float32"
    """Of embeddings as they are handed out. float16 rounds."""

    on_device: OnDevice = "normalize"
    """The first step of preparing an image that the encoder's device does: normalize; resize, to the same
    values; or decode, of JPEG files, whose colors then differ a little. What it cannot do the host does."""

    max_pixels: Annotated[int, Field(strict=True, ge=1)] = 1 << 26
    """Of an image, and of all images of a service's request together; more are refused by their headers,
    before anything is decoded."""

    @property
    def max_image_bytes(self) -> int:
        """The most that an encoded image may have: pixels as they are, and room for metadata."""
        return 4 * self.max_pixels + (1 << 20)

    def resolved_config(self, device: torch.device) -> EncoderConfig:
        """The captures on a device."""
        # Captures pay off over many calls on a GPU. On a CPU they only cost.
        if self.config is None and device.type != "cuda":
            return EncoderConfig(mode="none")
        config = self.config or EncoderConfig()
        is_set = self.captures_recurring or "capture_recurring" in config.model_fields_set
        return config if is_set else config.replace(capture_recurring=False)


class ServingSettings(ImageEncoderSettings):
    """Of encoders that answer requests, none of which should wait for a capture that pays off later."""

    captures_recurring: ClassVar[bool] = False


class ServiceSettings(ServingSettings):
    """Settings of a service."""

    pools_by_default: ClassVar[bool] = True

    served_name: str | None = None
    """The model's name in requests and answers. None: `model`."""

    api_key: Annotated[str, Field(min_length=1)] | None = None
    """What clients send as `Authorization: Bearer KEY`. None: anybody may ask."""

    max_request_bytes: Annotated[Bytes, BeforeValidator(parse_bytes), Field(le=1 << 30)] = 1 << 25
    """Of a request's body. A larger one is refused as it arrives."""

    max_items_per_request: _Number = 128
    """Images and texts of a request."""

    max_requests: _Number = 256
    """Requests that a process works on at once; others are refused."""

    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Within which an encoder has to take an item, or it is refused. After the order to stop, requests in
    flight are worked on for as long."""

    @property
    def name(self) -> str:
        """The model's name in requests and answers."""
        return self.served_name or self.model
