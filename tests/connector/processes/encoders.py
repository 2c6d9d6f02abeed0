"""Encoders that the tests run in other processes, by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit_encoder.connector.seams import Modality, PreparedItem
from fxsplit_encoder.errors import EncoderLostError, InputError, MediaError


class DoublingEncoder:
    """The feature of an item is twice its `pixel_values`. Other inputs make it misbehave."""

    def __init__(self, width: int = 8, start_seconds: float = 0.0) -> None:
        self.width = width
        self.start_seconds = start_seconds

    def start(self) -> None:
        time.sleep(self.start_seconds)

    def predict_cost(self, item: PreparedItem) -> float:
        return float(item.num_tokens)

    def row_bytes(self, modality: Modality) -> int | None:
        return None if modality == "audio" else 4 * self.width

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        for item in items:
            misbehave(item)
        return [2 * item.inputs["pixel_values"] for item in items]

    def close(self) -> None:
        pass


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
        case "own":
            raise Unheard("of")
        case "fatal":
            raise EncoderLostError("device-side assert")
        case "value":
            raise ValueError("shape")


class Unheard(ValueError):
    """Of a class that the other process does not know."""


def doubling(**arguments: object) -> DoublingEncoder:
    return DoublingEncoder(**arguments)


def failing(message: str) -> DoublingEncoder:
    raise InputError(message)


def nothing() -> None:
    return None
