"""Every tiny model, loaded twice from one checkpoint: accelerated and warmed up, and as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

import fxsplit_encoder as fx

from .models import MODELS
from .tiny_model import TinyModel


class Loaded(NamedTuple):
    name: str
    tiny: TinyModel
    directory: Path
    """Of the checkpoint."""
    model: Any
    """Accelerated and warmed up. A test that changes it puts it back."""
    reference: Any
    """Nobody touches it."""


IMAGES = Path(__file__).parents[3] / "examples" / "images"


@pytest.fixture
def example_image() -> Image.Image:
    """A photograph."""
    return Image.open(sorted(IMAGES.glob("*.jpg"))[0])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(name)`: the directory of a tiny model, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.replace(".", "-"))
            MODELS[name].make(made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[[str], Path]) -> Callable[[str], Loaded]:
    """`loaded(name)`: made once, since tracing takes long."""
    made: dict[str, Loaded] = {}

    def make(name: str) -> Loaded:
        if name not in made:
            tiny, directory = MODELS[name], checkpoint(name)
            model, reference = tiny.load(directory), tiny.load(directory)
            fx.accelerate(model, config_of(tiny))
            fx.warmup(model)
            made[name] = Loaded(name, tiny, directory, model, reference)
        return made[name]

    return make


def config_of(tiny: TinyModel) -> fx.EncoderConfig:
    return fx.EncoderConfig(piece_compiler="eager", mode="full", **tiny.settings)
