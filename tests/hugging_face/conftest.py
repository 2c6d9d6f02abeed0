"""Every tiny model, loaded twice from one checkpoint: accelerated and warmed up, and as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fxsplit_encoder as fx
from fxsplit_encoder.hugging_face.captured import Served

from .models import EMBEDDERS, MODELS
from .tiny_model import TinyModel

ALL = {**MODELS, **EMBEDDERS}


class Loaded(NamedTuple):
    tiny: TinyModel
    directory: Path
    """Of the checkpoint."""
    model: Any
    """Accelerated and warmed up. A test that changes it puts it back."""
    reference: Any
    """Nobody touches it."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(name)`: the directory of a tiny model, made once."""

    @functools.cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name.replace(".", "-"))
        ALL[name].make(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[[str], Path]) -> Callable[[str], Loaded]:
    """`loaded(name)`: made once, since tracing takes long."""

    @functools.cache
    def make(name: str) -> Loaded:
        tiny, directory = ALL[name], checkpoint(name)
        model, reference = tiny.load(directory), tiny.load(directory)
        fx.accelerate(model, config_of(tiny))
        fx.warmup(model)
        return Loaded(tiny, directory, model, reference)

    return make


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """What serves the captures that are made from now on."""
    found: list[type] = []
    own = Served.__init__
    monkeypatch.setattr(
        Served, "__init__", lambda self, *given: found.append(type(self)) or own(self, *given)
    )
    return found


def config_of(tiny: TinyModel) -> fx.EncoderConfig:
    return fx.EncoderConfig(piece_compiler="eager", mode="full", **tiny.settings)
