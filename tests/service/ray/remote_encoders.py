"""Encoders that tests have actors make."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit_encoder.connector import FakeEncoder, PreparedItem
from fxsplit_encoder.errors import InputError

SECONDS_A_TOKEN = 0.01


def _wait(items: Sequence[PreparedItem]) -> None:
    names = [item.metadata["media"] for item in items]
    if "bad" in names:
        raise ValueError("bad pixels")
    if "device" in names:
        raise torch.AcceleratorError("an illegal memory access was encountered")
    time.sleep(SECONDS_A_TOKEN * sum(item.num_tokens for item in items))


def slow_encoder() -> FakeEncoder:
    """Takes so long for every token."""
    return FakeEncoder(on_encode=_wait)


def hanging_encoder() -> FakeEncoder:
    return FakeEncoder(on_encode=lambda items: time.sleep(600))


def no_encoder() -> FakeEncoder:
    raise InputError("of the test")


class Telling(FakeEncoder):
    """Rows that say where they were encoded: process, and whether on the thread that started."""

    def __init__(self) -> None:
        super().__init__(on_encode=_wait)

    def start(self) -> None:
        self._thread = threading.get_ident()

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        super().encode(items)
        told = [os.getpid(), int(threading.get_ident() == self._thread), 0, 0, 0, 0, 0, 0]
        return [torch.tensor([told] * item.num_tokens, dtype=torch.float32) for item in items]
