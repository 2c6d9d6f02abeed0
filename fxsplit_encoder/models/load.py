"""Vision towers out of a checkpoint, and the devices and dtypes that they are loaded to."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.models.checkpoint import Checkpoint, rename, split_fused
from fxsplit_encoder.models.family import WHOLE_MODEL, Family, Settings, vision_settings
from fxsplit_encoder.models.registry import FAMILIES


def device_of(name: str, setting: str = "device") -> torch.device:
    """The device that a name means; "auto": CUDA where there is a GPU, else the CPU. InputError: torch knows
    no such device, or it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"{setting} {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"{setting} {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a tower that a name means; "auto": bfloat16 on CUDA, float32 on a CPU. InputError: it is
    no floating-point dtype.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(
            f"dtype: expected auto or a floating-point dtype of torch, such as bfloat16; got {shown(name)}"
        )
    return dtype


# --- weights

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED = 4


def load_tower(
    model: str | Path | Checkpoint, dtype: torch.dtype, device: torch.device, family: Family | None = None
) -> Any:
    """Build a tower of a checkpoint, reading no other weights.

    Args:
        model: a directory or a hub name, of a whole model or of the vision tower alone.
        dtype: of the parameters.
        device: where they go.
        family: of the tower, such as `Family.pooled` of the checkpoint's; None: the vision tower's.

    Raises:
        InputError: a file is missing or malformed, or the weights are not this tower's.
    """
    checkpoint = Checkpoint.locate(model)
    found, settings = read_family(checkpoint)
    family = family or found
    tower = family.empty_tower(settings, device)
    expected = dict(tower.named_parameters())
    tensors = _vision_tensors(checkpoint, family, {name.split(".")[0] for name in expected})
    if family.renames:
        renamed = {
            name if name in expected else rename(name, family.renames): tensor
            for name, tensor in tensors.items()
        }
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
    return tower


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


def _vision_tensors(checkpoint: Checkpoint, family: Family, modules: Set[str]) -> dict[str, Tensor]:
    """The tower's tensors by their names after the prefix.

    `modules`: the first parts of the names of the tower's own tensors.
    """
    where = _tensor_files(checkpoint)
    for prefix in family.prefixes:
        names = {name.removeprefix(prefix): name for name in where if name.startswith(prefix)}
        own = {
            short: name
            for short, name in names.items()
            if not modules.isdisjoint(known.split(".")[0] for known in (short, rename(short, family.renames)))
        }
        if own:
            if family.prefixes != WHOLE_MODEL:  # only the tower's tensors begin so
                own = names
            return _read(checkpoint, own, where)
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
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _read(checkpoint: Checkpoint, names: Mapping[str, str], where: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of these names, of which `where` tells the files."""
    tensors: dict[str, Tensor] = {}
    for file_name in sorted({where[name] for name in names.values()}):
        path = checkpoint.find(file_name)
        if path is None:
            raise InputError(f"{checkpoint.model}: {_INDEX} names {file_name}, which is missing")
        with _opened(path) as file:
            tensors |= {o: file.get_tensor(name) for o, name in names.items() if where[name] == file_name}
    return tensors


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from None


def _compare(checkpoint: Checkpoint, what: str, names: Collection[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise InputError(f"{checkpoint.model}: {len(names)} tensors {what}: {shown}{more}")
