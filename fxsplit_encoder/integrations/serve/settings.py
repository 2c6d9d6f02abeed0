"""How the service answers, beside how it encodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fxsplit_encoder.integrations.images import ServingSettings
from fxsplit_encoder.settings_model import Bytes, parse_bytes

# A command line gives numbers as text.
_Number = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]


class ServiceSettings(ServingSettings):
    """The arguments of the application. Immutable.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """

    max_request_bytes: Annotated[Bytes, BeforeValidator(parse_bytes)] = 1 << 25
    """Of a request's body, as an integer or a size such as 20MiB. A larger one is refused as it arrives."""

    max_images_per_request: _Number = 32
    """Images that one request may hold."""

    encoders: _Number = 1
    """Processes that hold the tower."""

    gpus_per_encoder: Annotated[float, Field(ge=0)] | None = None
    """None: one, if the cluster has any and `device` is not cpu."""

    frontends: _Number = 1
    """Processes that take requests, decode and prepare: about a CPU each."""

    max_batch_tokens: _Number | None = None
    """Output tokens of the images that are encoded together. None: the largest budget of the encoder, or
    without captures 16 images."""

    batch_wait_s: _Seconds = 0.002
    """How long a batch waits for more images while the encoder is idle."""

    max_ongoing_requests: _Number = 64
    """Requests that a front end works on at once."""

    max_queued_requests: _Number = 256
    """Requests that wait for a front end; others are refused."""

    refusal_status: Literal[429, 503] = 503
    """The status of a refusal under overload."""

    retry_after_s: _Number = 1
    """Seconds after which who is refused shall ask again."""
