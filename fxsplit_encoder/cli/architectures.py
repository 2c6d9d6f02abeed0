"""The towers that the command knows: their classes, by a checkpoint's model type, and real sizes, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxsplit_encoder.errors import InputError


@dataclass(frozen=True)
class Family:
    """A tower's classes in transformers, imported when they are used."""

    module: str
    """Under `transformers.models`."""

    tower: str
    config: str

    def make_config(self, settings: Mapping[str, Any]) -> Any:
        """The configuration of a tower with these sizes; the others are the class's."""
        return self._load("configuration", self.config)(**settings)

    def make_tower(self, config: Any) -> Any:
        """The tower on the meta device, without weights."""
        with torch.device("meta"):
            return self._load("modeling", self.tower)(config)

    def _load(self, kind: str, name: str) -> Any:
        return getattr(
            importlib.import_module(f"transformers.models.{self.module}.{kind}_{self.module}"), name
        )


_GLM4V = Family("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig")

FAMILIES: Mapping[str, Family] = {
    # Mixture-of-experts models share the dense ones' tower.
    "qwen3_vl": Family("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig"),
    "qwen3_vl_moe": Family("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig"),
    "qwen3_5": Family("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig"),
    "qwen3_5_moe": Family("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig"),
    "qwen2_5_vl": Family("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig"),
    "qwen2_vl": Family("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"),
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "glm46v": _GLM4V,
}
"""A checkpoint's model type to its tower."""


@dataclass(frozen=True)
class Architecture:
    """The tower of a published model, at its true sizes."""

    title: str
    family: str
    blocks: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the configuration class's own values."""
    levels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Settings that are numbers of blocks; with fewer blocks they keep their relative depth."""
    periods: Mapping[str, int] = field(default_factory=dict)
    """Settings that are every n-th block, and the last."""

    def config(self, blocks: int) -> Any:
        """The configuration at a depth.

        Raises:
            InputError: more blocks than the model has, or none.
        """
        if not 1 <= blocks <= self.blocks:
            raise InputError(f"blocks: expected 1 to {self.blocks}; got {blocks}")
        levels = {
            name: sorted({level * blocks // self.blocks for level in listed})
            for name, listed in self.levels.items()
        }
        periodic = {
            name: [b for b in range(blocks) if b % period == period - 1 or b == blocks - 1]
            for name, period in self.periods.items()
        }
        settings = {"depth": blocks, **self.settings, **levels, **periodic}
        return FAMILIES[self.family].make_config(settings)


_QWEN2_5 = {"hidden_size": 1280}
_FULL_ATTENTION = {"fullatt_block_indexes": 8}

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3-vl-8b": Architecture(
        "Qwen3-VL-8B", "qwen3_vl", 27, {"out_hidden_size": 4096}, {"deepstack_visual_indexes": (8, 16, 24)}
    ),
    "qwen3.5-9b": Architecture("Qwen3.5-9B", "qwen3_5", 27, {"out_hidden_size": 4096}),
    "qwen3.5-27b": Architecture("Qwen3.5-27B", "qwen3_5", 27, {"out_hidden_size": 5120}),
    "qwen2.5-vl-3b": Architecture(
        "Qwen2.5-VL-3B",
        "qwen2_5_vl",
        32,
        {**_QWEN2_5, "out_hidden_size": 2048},
        periods=_FULL_ATTENTION,
    ),
    "qwen2.5-vl-7b": Architecture(
        "Qwen2.5-VL-7B",
        "qwen2_5_vl",
        32,
        {**_QWEN2_5, "out_hidden_size": 3584},
        periods=_FULL_ATTENTION,
    ),
    "qwen2-vl-2b": Architecture("Qwen2-VL-2B", "qwen2_vl", 32, {"hidden_size": 1536}),
    "qwen2-vl-7b": Architecture("Qwen2-VL-7B", "qwen2_vl", 32, {"hidden_size": 3584}),
    "glm-4.1v-9b": Architecture("GLM-4.1V-9B", "glm4v", 24, {"intermediate_size": 13696}),
    "glm-4.6v": Architecture("GLM-4.6V", "glm46v", 24, {"intermediate_size": 10944}),
}
"""By the name that `--model` of the demo takes."""


def architecture(name: str) -> Architecture:
    """The architecture of a name.

    Raises:
        InputError: no such name.
    """
    if name not in ARCHITECTURES:
        raise InputError(f"--model {name}: expected one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
