"""The families and the published models that are known, by name."""

from __future__ import annotations

from collections.abc import Mapping

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models import deepseek_ocr, dense, internvl, kimi, llama4, qwen_vl, step3, whisper
from fxsplit_encoder.models.family import Architecture, Family

_MODULES = (qwen_vl, kimi, internvl, llama4, deepseek_ocr, step3, dense)

FAMILIES: Mapping[str, Family] = {
    name: family for module in (*_MODULES, whisper) for name, family in module.FAMILIES.items()
}
"""By a checkpoint's model type, of a whole model or of its vision tower; else by its architecture."""

ARCHITECTURES: Mapping[str, Architecture] = {
    name: architecture for module in _MODULES for name, architecture in module.ARCHITECTURES.items()
}
"""Published models, built with random weights at their true sizes; by the name that `--model` takes."""


def architecture(name: str) -> Architecture:
    """The architecture of a name; raises InputError: no such name."""
    if name not in ARCHITECTURES:
        raise InputError(f"--model {name}: expected one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
