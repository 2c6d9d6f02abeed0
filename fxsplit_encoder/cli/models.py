"""Vision towers: out of a checkpoint, or the demo's with random weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxsplit_encoder.cli.architectures import FAMILIES, Architecture, Family, architecture
from fxsplit_encoder.cli.checkpoint import Checkpoint
from fxsplit_encoder.errors import InputError

DEMO_MODEL = "qwen3-vl-8b"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PREFIXES = ("model.visual.", "visual.", "")
_NAMED = 4
# Learned positions, as the models name them.
_POSITIONS = re.compile(r"pos(_|ition)")


def load_tower(model: str | Path | Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the vision tower of a checkpoint, reading no other weights.

    Args:
        model: a directory or a hub name, of a whole model or of the vision tower alone.
        dtype: of the parameters.
        device: where they go.

    Raises:
        InputError: a file is missing or malformed, or the weights are not this tower's.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.locate(model)
    family, settings = _vision_settings(checkpoint)
    tower = family.make_tower(family.make_config(settings))
    expected = tower.state_dict()
    files = _vision_files(checkpoint, expected.keys())
    _compare(checkpoint, "missing", expected.keys() - files.keys())
    _compare(checkpoint, "unexpected", files.keys() - expected.keys())
    tensors = _read(files)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}; config.json says {tuple(expected[name].shape)}"
            raise InputError(f"{checkpoint.model}: {name} has the shape {shapes}")
    return _with_weights(tower, {name: t.to(device, dtype) for name, t in tensors.items()}, device)


def demo_tower(
    blocks: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    model: str = DEMO_MODEL,
) -> Any:
    """Build a model's vision tower with random weights, at its true width.

    Args:
        blocks: its depth; None: the model's own.
        device: where its weights are drawn.
        dtype: of the parameters.
        seed: the same weights for the same seed, on one kind of device.
        model: a name of `cli.architectures.ARCHITECTURES`.

    Raises:
        InputError: no such model, or more blocks than it has, or none.
    """
    config = demo_config(blocks, model)
    tower = FAMILIES[architecture(model).family].make_tower(config)
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, meta in tower.state_dict().items():
        mean, deviation = distribution(name, meta.dim(), config.initializer_range)
        weight = torch.empty(meta.shape, device=device).normal_(mean, deviation, generator=generator)
        weights[name] = weight.to(dtype)
    return _with_weights(tower, weights, device)


def demo_config(blocks: int | None = None, model: str = DEMO_MODEL) -> Any:
    """The configuration of `demo_tower`'s tower.

    Raises:
        InputError: no such model, or more blocks than it has, or none.
    """
    known: Architecture = architecture(model)
    return known.config(known.blocks if blocks is None else blocks)


def distribution(name: str, num_dims: int, initializer_range: float) -> tuple[float, float]:
    """Mean and deviation of a parameter. Biases of zero and faint positions, the usual ones, hide faults."""
    if name.endswith(".bias"):
        return 0.0, 0.1
    if num_dims == 1:  # of a norm, or a layer's scale
        return 1.0, 0.1
    return 0.0, 0.5 if _POSITIONS.search(name) else initializer_range


def _with_weights(tower: Any, weights: Mapping[str, Tensor], device: torch.device) -> Any:
    tower.load_state_dict(weights, assign=True)
    # No checkpoint holds its frequencies; they stay float32 whatever the dtype, as in the model library.
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)
    tower.requires_grad_(False)
    tower.train(False)
    return tower


def _vision_settings(checkpoint: Checkpoint) -> tuple[Family, dict[str, Any]]:
    settings = checkpoint.read_json("config.json")
    if settings is None:
        raise InputError(f"{checkpoint.model}: no config.json; expected what save_pretrained writes")
    model_type = str(settings.get("model_type", ""))
    family = FAMILIES.get(model_type.removesuffix("_vision"))
    if family is None:
        allowed = ", ".join([*FAMILIES, *(f"{name}_vision" for name in FAMILIES)])
        raise InputError(
            f"{checkpoint.model}: model_type {model_type!r} in config.json; expected one of {allowed}"
        )
    vision = dict(settings.get("vision_config", settings))
    vision.pop("model_type", None)
    return family, vision


def _vision_files(checkpoint: Checkpoint, expected: Collection[str]) -> dict[str, tuple[str, Path]]:
    """Name of a tensor in the tower -> its name in the checkpoint, and the file that holds it."""
    where = _tensor_files(checkpoint)
    for prefix in _PREFIXES:
        names = {name.removeprefix(prefix): name for name in where if name.startswith(prefix)}
        if not names.keys().isdisjoint(expected):
            paths = {file: _require(checkpoint, file) for file in {where[name] for name in names.values()}}
            return {own: (name, paths[where[name]]) for own, name in names.items()}
    prefixes = ", ".join(repr(prefix) for prefix in _PREFIXES)
    raise InputError(f"{checkpoint.model}: no tensor of a vision tower after any of the prefixes {prefixes}")


def _tensor_files(checkpoint: Checkpoint) -> Mapping[str, str]:
    index = checkpoint.read_json(_INDEX)
    if index is not None:
        weight_map: Any = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{checkpoint.model}: {_INDEX} has no weight_map")
        return weight_map
    single = checkpoint.find(_SINGLE)
    if single is None:
        raise InputError(f"{checkpoint.model}: no weights; expected {_SINGLE}, or {_INDEX} with its shards")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _require(checkpoint: Checkpoint, file_name: str) -> Path:
    path = checkpoint.find(file_name)
    if path is None:
        raise InputError(f"{checkpoint.model}: {_INDEX} names {file_name}, which is missing")
    return path


def _read(files: Mapping[str, tuple[str, Path]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted({path for _, path in files.values()}):
        with _open(path) as file:
            held = set(file.keys())
            for own, (name, at) in files.items():
                if at == path:
                    if name not in held:
                        raise InputError(f"{path}: {_INDEX} says that {name} is here, and it is not")
                    tensors[own] = file.get_tensor(name)
    return tensors


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from None


def _compare(checkpoint: Checkpoint, what: str, names: Collection[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise InputError(f"{checkpoint.model}: {len(names)} tensors {what}: {shown}{more}")
