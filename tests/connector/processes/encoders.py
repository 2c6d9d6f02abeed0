"""Encoders that the tests run in other processes, by name."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.processes.wire import (
    Channel,
    Encoded,
    EncoderProgram,
    Message,
    SharedMemory,
    Started,
    ToEncoder,
)
from fxsplit_encoder.errors import InputError, MediaError


class DoublingEncoder(FeatureEncoder):
    """The feature of an item is twice its `pixel_values`. Other inputs make it misbehave."""

    def __init__(self, width: int = 8, start_seconds: float = 0.0) -> None:
        self.width = width
        self.start_seconds = start_seconds

    def start(self) -> None:
        time.sleep(self.start_seconds)

    def row_bytes(self, modality: Modality) -> int | None:
        return None if modality == "audio" else 4 * self.width

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        for item in items:
            misbehave(item)
        features = [feature_of(item) for item in items]
        return features[1:] if items[0].metadata.get("do") == "few" else features


def feature_of(item: PreparedItem) -> Tensor:
    pixels = item.inputs["pixel_values"]
    match item.metadata.get("do"):
        case "repeat":
            return pixels.repeat(6, 1)
        case "text":
            return "text"  # type: ignore[return-value]
    return 2 * pixels


def misbehave(item: PreparedItem) -> None:
    match item.metadata.get("do"):
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(float(item.metadata["seconds"]))
        case "media":
            raise MediaError("item 3: not an image")
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        case "fatal":
            raise torch.AcceleratorError("device-side assert")
        case "value":
            raise ValueError("shape")


def doubling(**arguments: object) -> DoublingEncoder:
    return DoublingEncoder(**arguments)


def failing(message: str) -> DoublingEncoder:
    raise InputError(message)


def nothing() -> None:
    return None


OUTSIDE = msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("float32", (1, 1), 1 << 40)))
LIES: dict[str, Message | bytes] = {
    "outside": Encoded([OUTSIDE]),  # type: ignore[list-item]
    "other": Started({"image": 1}),
    "garbage": b"garbage",
}
"""What no process of this library would answer to one item."""


def lie(arguments: Sequence[str], answer: Message | bytes) -> int:
    """In place of `child.main`."""
    connection, descriptor, parent, max_bytes = map(int, arguments)
    memory, process = SharedMemory(max_bytes, descriptor), os.pidfd_open(parent)
    channel: Channel[ToEncoder] = Channel(
        socket.socket(fileno=connection), process, ToEncoder, memory, half=1
    )
    while (asked := channel.receive()) is not None:
        told = Started({"image": 32, "video": 32}) if isinstance(asked, EncoderProgram) else answer
        channel.send(told if isinstance(told, bytes) else channel.encode(told))
    return 0
