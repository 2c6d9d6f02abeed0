"""The connector's settings, and a request with what follows if it fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fxsplit_encoder.connector.interfaces import MediaItem, Reduction
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.settings_model import Settings, parse_bytes

_Bytes = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1), BeforeValidator(parse_bytes)]
_Number = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
_Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ConnectorConfig(Settings):
    """How much a `Connector` may hold, and how it forms batches; ConfigError: a setting is not allowed."""

    host_bytes: _Bytes = 4 << 30
    """Host memory for features, in bytes or as a size such as 4GiB; reserved in powers of two before an item
    is encoded. A request that needs more is refused."""

    device_bytes: _Bytes = 1 << 30
    """Memory on each device for features; what has no room there is copied to the host."""

    staging_bytes: _Bytes = 512 << 20
    """Features of the batches that one worker has in hand; an item of more is refused."""

    input_bytes: _Bytes = 1 << 30
    """Preprocessed items that wait for an encoder: no further item is decoded while they are more."""

    media_bytes: _Bytes = 4 << 30
    """Raw media in memory of items that are not ready yet; a request beyond them is refused. Files do not
    count. A tenant with less than its even share of these and of `max_waiting_items` is not refused for what
    others have: up to twice as much waits then."""

    cpu_workers: _Number = 4
    """Threads that read headers, hash, decode and preprocess."""

    max_waiting_items: _Number = 4096
    """Items that are not ready yet; a request beyond them is refused, to be submitted again later."""

    max_batch_items: _Number = 32
    """Items that a worker encodes together at most."""

    max_slice_cost: _Positive | None = None
    """Predicted cost, in the encoder's unit, of what a worker gives its device at once of an item that can be
    encoded in `FeatureEncoder.slices`. Between slices it rests as `max_busy_share` says, and lets batches of
    no more than that cost pass. None: items are not cut."""

    max_busy_share: _Share = 1.0
    """Share of time in which a worker may have batches in hand; after each it rests and leaves the device to
    an engine that computes there too."""

    timeout_s: _Positive | None = 60.0
    """Seconds after which an item that is not ready fails, where its request says nothing. None: never."""

    hang_timeout_s: _Positive | None = 300.0
    """Seconds without progress on a batch after which a worker is given up like one that was lost. None:
    never. A batch for which a worker compiles and captures takes as long as that does."""


Retention = Literal["discard", "keep"]


@dataclass(frozen=True)
class FailurePolicy:
    """Consequences for a request one of whose items cannot be encoded."""

    then: Literal["fail", "text_only"] = "fail"
    """fail: the ticket fails. text_only: it becomes ready without any media and with token counts of 0."""

    retries: int = 0
    """How often an item is encoded again after an error that is `retryable`."""

    reduce: Reduction | None = None
    """What is asked of an item when memory and retries run out: half its frames, or half of each side, until
    it fits or has no more to give; only before the ticket was first ready, since its token counts change."""

    def __post_init__(self) -> None:
        if self.then not in ("fail", "text_only"):
            raise InputError(f"then: expected fail or text_only; got {shown(self.then)}")
        if type(self.retries) is not int or self.retries < 0:
            raise InputError(f"retries: expected an integer of at least 0; got {shown(self.retries)}")
        if self.reduce not in (None, "half_frames", "half_resolution"):
            raise InputError(f"reduce: expected half_frames or half_resolution; got {shown(self.reduce)}")


FAIL = FailurePolicy()
TEXT_ONLY = FailurePolicy(then="text_only")
RETRY = FailurePolicy(retries=2)


@dataclass(frozen=True, eq=False)
class EncodeRequest:
    """The media of one request.

    Raises:
        InputError: the id is empty, the salt or the tenant no text, or the timeout no positive number.
    """

    id: str
    """The engine's name for the request, for logs. It need not be unique, and is no part of any key."""

    items: Sequence[MediaItem] = ()
    """In the order of their placeholders. An item that the prompt shows twice is listed twice; it is encoded
    once."""

    placeholders: PositionMap | None = None
    """Where the rows of the items go, for `merge`; None: the caller places them."""

    failure: FailurePolicy = FAIL

    retention: Retention = "discard"
    """discard: rows are freed once nobody holds them. keep: they stay until memory is needed, for further
    turns, beams, retries or rebuilt prefixes."""

    timeout_s: float | None = None
    """Seconds after which an item that is not ready fails; None: as the connector's settings say."""

    tenant: str = ""
    """Whose turns and whose share of what is bounded it uses: tenants do not wait for each other's queues."""

    salt: str = ""
    """Features are shared among requests of the same salt only, such as those of one tenant."""

    def __post_init__(self) -> None:
        if not self.id:
            raise InputError("id: expected a name for the request; got an empty one")
        values: dict[str, object] = {"salt": self.salt, "tenant": self.tenant}
        for name, value in values.items():
            # A lone surrogate, as JSON may bring it, has no bytes.
            if not isinstance(value, str) or value.encode(errors="ignore").decode() != value:
                raise InputError(f"{name}: expected text that UTF-8 can encode; got {shown(value)}")
        if self.retention not in ("discard", "keep"):
            raise InputError(f"retention: expected discard or keep; got {shown(self.retention)}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InputError(f"timeout_s: expected a positive number or None; got {shown(self.timeout_s)}")


def media_bytes(media: object) -> int:
    """Bytes that raw media have in memory: 0 of a path, and of what is of an unknown kind."""
    if isinstance(media, bytes | bytearray | memoryview):
        return memoryview(media).nbytes
    if isinstance(media, list | tuple):
        return sum(map(media_bytes, media))
    for name in ("frames", "samples"):  # of a video or an audio clip that was decoded
        if (inner := getattr(media, name, None)) is not None:
            return media_bytes(inner)
    num_bytes = getattr(media, "nbytes", None)
    if num_bytes is None and hasattr(media, "getbands"):
        image: Any = media
        num_bytes = math.prod(image.size) * len(image.getbands())
    return num_bytes if isinstance(num_bytes, int) else 0
