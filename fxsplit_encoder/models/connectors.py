"""A checkpoint behind the connector: its encoders, one for each device, and its media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.keys import HashName, TowerIdentity, precision_of
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.pixels import check_decoder
from fxsplit_encoder.connector.processes import EncoderProgram, ProcessEncoder, ProcessOptions
from fxsplit_encoder.connector.request import ConnectorConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager import EncoderCudaGraphManager
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import dtype_of, load_tower, read_family
from fxsplit_encoder.models.media import media_processor
from fxsplit_encoder.models.prepare import OnDevice


def checkpoint_encoder(
    model: str | Path,
    config: str | Path | EncoderConfig | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> ManagerEncoder:
    """An encoder in this process, not started yet.

    Args:
        model: a directory or a hub name.
        config: settings, or a YAML file of them; None: the defaults, but no captures while requests come, or
            on a CPU none at all.
        device: on which it encodes.
        dtype: in which; auto: bfloat16 on CUDA, float32 on a CPU.

    Raises:
        InputError: a file is missing or malformed, or names no family that is known.
        ConfigError: a setting is wrong.
    """
    checkpoint = Checkpoint.locate(model)
    family, _ = read_family(checkpoint)
    place = torch.device(device)
    tower = load_tower(checkpoint, dtype_of(dtype, place), place)
    return ManagerEncoder(EncoderCudaGraphManager(family.wrap(tower), config_for(config, place)))


def checkpoint_process(
    model: str | Path,
    config: str | Path | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    options: ProcessOptions | None = None,
) -> ProcessEncoder:
    """An encoder in a process of its own, not started yet; the arguments are those of `checkpoint_encoder`.

    Args:
        options: of the process.
    """
    checkpoint = Checkpoint.locate(model)
    arguments = {
        "model": str(model),
        "config": None if config is None else str(config),
        "device": device,
        "dtype": dtype,
    }
    program = EncoderProgram(f"{__name__}:{checkpoint_encoder.__name__}", arguments)
    return ProcessEncoder(program, row_bytes_of(checkpoint, device, dtype), options)


def weightless_tower(model: str | Path | Checkpoint) -> Any:
    """Make a wrapped tower without weights, which counts the tokens of images and videos.

    `models.media.media_processor` needs one where the encoder runs in another process.

    Args:
        model: a directory or a hub name.

    Raises:
        InputError: a file is missing or malformed, or names no family that is known.
    """
    checkpoint = Checkpoint.locate(model)
    family, settings = read_family(checkpoint)
    tower = family.empty_tower(settings, torch.device("cpu"))
    for module in tower.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return family.wrap(tower)


def row_bytes_of(checkpoint: Checkpoint, device: str, dtype: str = "auto") -> Mapping[Modality, int]:
    """Bytes of a row of a checkpoint's features by modality; no weights are read."""
    declared = weightless_tower(checkpoint).get_encoder_cudagraph_config()
    size = dtype_of(dtype, torch.device(device)).itemsize
    return {modality: declared.out_hidden_size * size for modality in declared.modalities}


def config_for(config: str | Path | EncoderConfig | None, device: torch.device) -> EncoderConfig:
    """Settings of captures on a device, see `checkpoint_encoder`."""
    if isinstance(config, EncoderConfig):
        return config
    if config is not None:
        return EncoderConfig.from_yaml(config)
    # Captures pay off over many calls on a GPU, but one that is made while requests come holds them up. On a
    # CPU they only cost.
    return EncoderConfig(capture_recurring=False) if device.type == "cuda" else EncoderConfig(mode="none")


def checkpoint_connector(
    model: str | Path,
    devices: Sequence[str] = ("cuda",),
    config: str | Path | None = None,
    settings: ConnectorConfig | None = None,
    *,
    dtype: str = "auto",
    hash_name: HashName = "blake3",
    on_device: OnDevice = "normalize",
) -> Connector:
    """A connector with a worker on each device, for the media that a checkpoint takes.

    Args:
        model: a directory or a hub name.
        devices: one worker each; a device may be named twice.
        config: a YAML file of an `EncoderConfig`; None: the defaults, but no captures while requests come, or
            on a CPU none at all.
        settings: of the connector.
        dtype: of the towers; auto: bfloat16 on CUDA, float32 on a CPU.
        hash_name: of the function for digests.
        on_device: the first step of preparing images that a device does, see `media.media_processor`.

    Raises:
        InputError: a file is missing or malformed, holds no tower that is known, or a device cannot decode.
    """
    checkpoint = Checkpoint.locate(model)
    tower = weightless_tower(checkpoint)
    later: dict[str, Any] = {"normalize_later": True, "on_device": on_device}
    processor = media_processor(tower, checkpoint, hash_name=hash_name, **later)
    if on_device == "decode":
        check_decoder([*map(torch.device, devices)])
    if not devices:
        raise InputError("devices: expected at least one; got none")
    made = {index: checkpoint_encoder(model, config, device, dtype) for index, device in enumerate(devices)}
    manager = made[0].manager
    identity = TowerIdentity.of(manager.tower, precision_of(manager.config), hash_name)  # type: ignore[arg-type]

    def encoder_for(index: int) -> ManagerEncoder:
        """The one that was made, and another where its worker is started again."""
        made_first = made.pop(index, None)
        return made_first or checkpoint_encoder(model, config, devices[index], dtype)

    factories = [partial(encoder_for, index) for index in range(len(devices))]
    return Connector(processor, factories, settings, identity=identity)
