"""Vision towers: out of a checkpoint, or of a published model's size with random weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.architectures import architecture
from fxsplit_encoder.models.builders import Settings, vision_settings
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.checkpoint_names import rename, split_fused
from fxsplit_encoder.models.families import FAMILIES, Family

DEMO_MODEL = "qwen3-vl-8b"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED = 4
_INITIALIZER_RANGE = 0.02
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
    family, settings = read_family(checkpoint)
    tower = _build(family, settings, device)
    expected = dict(tower.named_parameters())
    tensors = _read(_vision_files(checkpoint, family, {name.split(".")[0] for name in expected}))
    if family.renames:
        renamed = {rename(name, family.renames): tensor for name, tensor in tensors.items()}
        tensors = split_fused(renamed, vision_settings(settings)["num_attention_heads"])
    _compare(checkpoint, "missing", expected.keys() - tensors.keys())
    # Older checkpoints hold buffers too, which towers compute by themselves.
    buffers = {name for name, _ in tower.named_buffers()}
    _compare(checkpoint, "unexpected", tensors.keys() - expected.keys() - buffers)
    for name, parameter in expected.items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)}; config.json says {tuple(parameter.shape)}"
            raise InputError(f"{checkpoint.model}: {name} has the shape {shapes}")
        parameter.data = tensors[name].to(device, dtype)
    return _finished(tower)


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
        device: where its weights are drawn; on "meta" it has none.
        dtype: of the parameters. Buffers keep theirs: positions and frequencies are computed in float32.
        seed: the same weights for the same seed, on one kind of device.
        model: a name of `models.architectures.ARCHITECTURES`.

    Raises:
        InputError: no such model, or more blocks than it has, or none.
    """
    known = architecture(model)
    device = torch.device(device)
    tower = _build(known.family, known.settings(blocks), device)
    if device.type != "meta":
        draw_weights(tower, seed)
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    return _finished(tower)


@torch.no_grad()
def draw_weights(tower: nn.Module, seed: int) -> None:
    """Random weights, biases and positions, none of them faint."""
    generator: torch.Generator | None = None
    for name, parameter in tower.named_parameters():
        generator = generator or torch.Generator(parameter.device).manual_seed(seed)
        mean, deviation = _distribution(name, parameter.dim())
        parameter.normal_(mean, deviation, generator=generator)


def _distribution(name: str, num_dims: int) -> tuple[float, float]:
    """Mean and deviation of a parameter. Biases of zero and faint positions, the usual ones, hide faults."""
    if name.endswith(".bias"):
        return 0.0, 0.1
    if num_dims == 1:  # of a norm, or a layer's scale
        return 1.0, 0.1
    return 0.0, 0.5 if _POSITIONS.search(name) else _INITIALIZER_RANGE


def read_family(checkpoint: Checkpoint) -> tuple[Family, Settings]:
    """Which tower a checkpoint has, and what its config.json holds.

    Raises:
        InputError: there is none, or it names none that is known.
    """
    settings = checkpoint.read_json("config.json")
    if settings is None:
        raise InputError(f"{checkpoint.model}: no config.json; expected what save_pretrained writes")
    model_type = str(settings.get("model_type", ""))
    names = [*(settings.get("architectures") or ()), model_type]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        allowed = ", ".join(FAMILIES)
        raise InputError(
            f"{checkpoint.model}: model_type {model_type!r} in config.json; expected one of {allowed}"
        )
    return family, settings


def _build(family: Family, settings: Settings, device: torch.device) -> nn.Module:
    """The module, its parameters not yet drawn.

    Not on "meta" first: what no checkpoint holds, towers compute when they are made.
    """
    with no_init_weights(), device:
        return family.build(settings)


def _finished(tower: nn.Module) -> nn.Module:
    return tower.requires_grad_(False).train(False)


def _vision_files(
    checkpoint: Checkpoint, family: Family, modules: Collection[str]
) -> dict[str, tuple[str, Path]]:
    """Name of a tensor after its prefix -> its name in the checkpoint, and the file that holds it.

    `modules`: the first parts of the names of the tower's own tensors.
    """
    where = _tensor_files(checkpoint)
    for prefix in family.prefixes:
        names = {name.removeprefix(prefix): name for name in where if name.startswith(prefix)}
        own = {
            short: name
            for short, name in names.items()
            if rename(short, family.renames).split(".")[0] in modules
        }
        if own:
            if family.is_apart:
                own = names
            paths = {file: _require(checkpoint, file) for file in {where[name] for name in own.values()}}
            return {short: (name, paths[where[name]]) for short, name in own.items()}
    prefixes = ", ".join(repr(prefix) for prefix in family.prefixes)
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
