"""What an encoder's process and the one that started it say to each other."""

from __future__ import annotations

from typing import Any

from fxsplit_encoder.connector.seams import Modality
from fxsplit_encoder.connector.transport.seam import Handle
from fxsplit_encoder.connector.transport.wire import Message

START = 0
"""The number of the request that starts the encoder; those to encode count from 1."""


class WireError(Message, frozen=True):
    """An error as plain values."""

    kind: str
    arguments: list[Any]
    text: str
    traceback: str


class WireItem(Message, frozen=True):
    """A prepared item without its inputs and its metadata."""

    modality: Modality
    digest: bytes
    num_tokens: int


class WireFeature(Message, frozen=True):
    """The feature of one item of a request."""

    index: int
    feature: Handle


class Start(Message, frozen=True):
    """Make an encoder and start it."""

    factory: str
    arguments: dict[str, Any]


class Encode(Message, frozen=True):
    """Encode items as one batch.

    All inputs are one block of memory: several batches that each wait for room never hold a part of theirs.
    """

    request: int
    items: list[WireItem]
    inputs: Handle
    """The tensors by "index/name"; the items' metadata are the handle's."""


class Stop(Message, frozen=True):
    """End, after what was asked before."""


class Hello(Message, frozen=True):
    """The first message: the process is there, with these versions."""

    pid: int
    library: str
    torch: str


class Started(Message, frozen=True):
    """The encoder is ready."""

    row_bytes: dict[Modality, int]
    """Of a feature, by modality."""


class Encoded(Message, frozen=True):
    """Features of a request, some of them or the last."""

    request: int
    features: list[WireFeature]
    is_last: bool


class Failed(Message, frozen=True):
    """A request failed as a whole."""

    request: int
    error: WireError


ToEncoder = Start | Encode | Stop
FromEncoder = Hello | Started | Encoded | Failed
