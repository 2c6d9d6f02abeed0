"""Describe a kind of vision tower."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.transformers import no_init_weights
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Renames
from fxsplit_encoder.models.eager import EagerForward, EagerTower, Inputs
from fxsplit_encoder.models.prepare import Preparation, ProcessorSettings
from fxsplit_encoder.towers import DenseTowerSpec, wrap

Settings = Mapping[str, Any]
"""What a config.json holds: of a whole model, or of its vision tower alone."""

Build = Callable[[Settings], nn.Module]
Prepare = Callable[[Settings, ProcessorSettings], Preparation]

VISUAL = ("model.visual.", "visual.", "")
"""Prefixes of the Qwen line and GLM, whose tower is the model's `visual`."""

WHOLE_MODEL = ("model.", "")
"""Prefixes of towers whose connector belongs to the model; tensors of its other modules are left out."""


@dataclass(frozen=True)
class Family:
    """One kind of tower."""

    build: Build
    """What `wrap` takes."""
    prepare: Prepare
    """Images to inputs, by the model's and its processors' settings."""
    eager: EagerForward | None = None
    """How it runs without this library; None: as `spec` declares, or by the adapter: the model is ours."""
    prefixes: tuple[str, ...] = ("",)
    """What may come before the names of the tower's tensors in a checkpoint; the first that any name fits."""
    renames: Renames = ()
    """From a published checkpoint's names; see `checkpoint`."""
    spec: Callable[[Any, int | None], DenseTowerSpec] | None = None
    """Declares a tower without an adapter, for tiles of so many pixels a side; None: its configuration's."""
    adapter: Callable[[nn.Module], Any] | None = None
    """Wraps a tower that `towers.wrap` does not know by its class."""
    pooled: Family | None = None
    """The same tower with the model's own vector of an image as its one row of output; None: it has none."""
    text: TextTower | None = None
    """That of a model whose vectors of images and texts are comparable."""
    pads_rows: bool = False
    """Whether an item has rows of output after those of its grid."""
    extractor: Callable[[Mapping[str, Any]], Any] | None = None
    """Of a tower of audio, by what its processor's JSON file sets; `prepare` then refuses images."""

    def empty_tower(self, settings: Settings, device: torch.device) -> nn.Module:
        """Builds a tower for inference on a device, with uninitialized parameters.

        Not on "meta" first: what no checkpoint holds, towers compute when they are made.
        """
        with no_init_weights(), device:
            return self.build(settings).requires_grad_(False).eval()

    def eager_tower(self, module: nn.Module) -> EagerTower:
        """A tower that is not wrapped, to compare with."""
        by_spec = None if self.spec is None else self._run_by_spec
        return EagerTower(module, self.eager or by_spec, self.wrap)

    def _run_by_spec(self, module: Any, mm_kwargs: Inputs) -> Tensor:
        assert self.spec is not None
        spec = self.spec(module, None)
        return spec.features(module(mm_kwargs[spec.input_name], **spec.options)).flatten(0, 1)

    def wrap(self, module: nn.Module, tile_side: int | None = None) -> Any:
        """The tower behind the manager's protocol.

        Args:
            module: the tower.
            tile_side: pixels a side of what its processor makes; None: what the tower's configuration says.
        """
        if self.adapter is not None:
            return self.adapter(module)
        return wrap(module, None if self.spec is None else self.spec(module, tile_side))


@dataclass(frozen=True)
class TextTower:
    """The text tower of a model, run as transformers has it."""

    tower: Family
    """How it is built and loaded."""
    output: str
    """The attribute of its output that is the vector."""
    padding: str
    """Of token ids, as the model was trained: "max_length" or "longest"."""


# --- settings


def text_width(settings: Settings) -> int:
    """The width of the language model, in which a projector writes."""
    width: int = settings["text_config"]["hidden_size"]
    return width


def vision_settings(settings: Settings, part: str = "vision_config") -> dict[str, Any]:
    """The vision tower's own part, or another tower's."""
    own = dict(settings.get(part, settings))
    own.pop("model_type", None)
    return own


def given(settings: Settings, *names: str) -> dict[str, Any]:
    """Those settings of these names that there are."""
    return {name: settings[name] for name in names if name in settings}


def no_images(settings: Settings, processor: ProcessorSettings) -> NoReturn:
    """The `prepare` of towers of audio, and of text, of which it is not asked."""
    raise InputError("this tower takes audio only; pass it to a connector (fxsplit_encoder.models.media)")


# --- towers that transformers has


def hugging_face(module: str, tower: str, part: str = "vision_config") -> Build:
    """Builds a tower that transformers has, by its part of the model's settings."""
    return lambda settings: _built(module, tower, **vision_settings(settings, part))


def without_language_model(module: str, model: str, text: Mapping[str, Any], **settings: Any) -> nn.Module:
    """A model of transformers whose connector belongs to it, its language model dropped.

    Args:
        module: under `transformers.models`.
        model: the model's class.
        text: of the language model: its width, and what its class needs besides the common settings. It is
            built as one block, as narrow as they allow.
        settings: the rest of the configuration.
    """
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    built = _built(module, model, text_config={**sizes, **text}, **settings)
    built.language_model = nn.Identity()
    return built


def _built(module: str, name: str, **settings: Any) -> nn.Module:
    """A model of `transformers.models.<module>.modeling_<module>`."""
    model: Any = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    built: nn.Module = model(model.config_class(**settings))
    return built
