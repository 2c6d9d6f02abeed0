"""Vision towers: out of a checkpoint, or the demo's with random weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from fxsplit_encoder.cli.checkpoint import Checkpoint
from fxsplit_encoder.errors import InputError

DEMO_BLOCKS = 27
_DEMO_DEEPSTACK = (8, 16, 24)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PREFIXES = ("model.visual.", "visual.", "")
_NAMED = 4

# The mixture-of-experts models share the dense ones' tower.
_MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")


def load_tower(
    model: str | Path | Checkpoint, dtype: torch.dtype, device: torch.device
) -> Qwen3VLVisionModel:
    """Build the vision tower of a Qwen3-VL checkpoint, reading no other weights.

    Args:
        model: a directory or a hub name, of a whole model or of the vision tower alone.
        dtype: of the parameters.
        device: where they go.

    Raises:
        InputError: a file is missing or malformed, or the weights are not this tower's.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.locate(model)
    tower = _on_meta(_vision_config(checkpoint))
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
    blocks: int = DEMO_BLOCKS,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Qwen3VLVisionModel:
    """Build Qwen3-VL-8B's vision tower with random weights, at its true width.

    Args:
        blocks: its depth, 1 to 27.
        device: where its weights are drawn.
        dtype: of the parameters.
        seed: the same weights for the same seed, on one kind of device.

    Raises:
        InputError: more or fewer blocks.
    """
    config = demo_config(blocks)
    tower = _on_meta(config)
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, meta in tower.state_dict().items():
        mean, deviation = _distribution(name, config.initializer_range)
        weight = torch.empty(meta.shape, device=device).normal_(mean, deviation, generator=generator)
        weights[name] = weight.to(dtype)
    return _with_weights(tower, weights, device)


def demo_config(blocks: int = DEMO_BLOCKS) -> Qwen3VLVisionConfig:
    """The configuration of Qwen3-VL-8B's vision tower; with fewer blocks, deepstack keeps its relative depth.

    Raises:
        InputError: not 1 to 27 blocks.
    """
    if not 1 <= blocks <= DEMO_BLOCKS:
        raise InputError(f"blocks: expected 1 to {DEMO_BLOCKS}; got {blocks}")
    levels = sorted({level * blocks // DEMO_BLOCKS for level in _DEMO_DEEPSTACK})
    return Qwen3VLVisionConfig(depth=blocks, out_hidden_size=4096, deepstack_visual_indexes=levels)


def _distribution(name: str, initializer_range: float) -> tuple[float, float]:
    """Mean and deviation of a parameter. Biases of zero and faint positions, the usual ones, hide faults."""
    if name.endswith(".bias"):
        return 0.0, 0.1
    if "norm" in name:
        return 1.0, 0.1
    return 0.0, 0.5 if name == "pos_embed.weight" else initializer_range


def _on_meta(config: Qwen3VLVisionConfig) -> Qwen3VLVisionModel:
    with torch.device("meta"):
        return Qwen3VLVisionModel(config)


def _with_weights(
    tower: Qwen3VLVisionModel, weights: Mapping[str, Tensor], device: torch.device
) -> Qwen3VLVisionModel:
    tower.load_state_dict(weights, assign=True)
    # No checkpoint holds its frequencies; they stay float32 whatever the dtype, as in the model library.
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)
    tower.requires_grad_(False)
    tower.train(False)
    return tower


def _vision_config(checkpoint: Checkpoint) -> Qwen3VLVisionConfig:
    settings = checkpoint.read_json("config.json")
    if settings is None:
        raise InputError(f"{checkpoint.model}: no config.json; expected what save_pretrained writes")
    model_type = str(settings.get("model_type", ""))
    if model_type.removesuffix("_vision") not in _MODEL_TYPES:
        allowed = ", ".join([*_MODEL_TYPES, *(f"{name}_vision" for name in _MODEL_TYPES)])
        raise InputError(
            f"{checkpoint.model}: model_type {model_type!r} in config.json; expected one of {allowed}"
        )
    vision = dict(settings.get("vision_config", settings))
    vision.pop("model_type", None)
    return Qwen3VLVisionConfig(**vision)


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
