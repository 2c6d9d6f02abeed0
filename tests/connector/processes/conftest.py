"""Encoder processes for tests: forked, in a private directory, and looked for afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fxsplit_encoder.connector.interfaces import Modality, PreparedItem
from fxsplit_encoder.connector.processes import EncoderProgram, ProcessEncoder, ProcessOptions, program
from tests.connector.resources import nothing_left

from .forked import fork

DOUBLING = EncoderProgram("tests.connector.processes.encoders:doubling")


def make_item(rows: int = 3, modality: Modality = "image", **metadata: Any) -> PreparedItem:
    return PreparedItem(modality, os.urandom(32), {"pixel_values": torch.randn(rows, 8)}, rows, metadata)


@pytest.fixture
def make_encoder(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> Iterator[Callable[..., ProcessEncoder]]:
    """Makes encoders in forked processes, started or not; closes them, and asserts that nothing is left."""
    monkeypatch.setattr(program, "launch", fork)
    made: list[ProcessEncoder] = []

    def make(start: bool = True, of: EncoderProgram = DOUBLING, **options: Any) -> ProcessEncoder:
        settings = ProcessOptions(**{"max_bytes": 1 << 20, "runtime_directory": short_path, **options})
        encoder = ProcessEncoder(of, settings)
        made.append(encoder)
        if start:
            encoder.start()
        return encoder

    with nothing_left():
        yield make
        for encoder in made:
            encoder.close()
    assert [path for path in short_path.rglob("*") if path.parent != short_path] == []
