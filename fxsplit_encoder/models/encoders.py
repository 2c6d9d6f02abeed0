"""A checkpoint behind the connector: its media, and an encoder for each device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.keys import HashName, TowerIdentity
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.settings import ConnectorConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager import EncoderCudaGraphManager
from fxsplit_encoder.messages import shown
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import load_tower, read_family
from fxsplit_encoder.models.media import media_processor

_DTYPES = ("float32", "bfloat16", "float16")


def checkpoint_encoder(
    model: str | Path, config: str | Path | None = None, device: str = "cpu", dtype: str = "auto"
) -> ManagerEncoder:
    """Load the tower of a checkpoint; starting the encoder captures it.

    Args:
        model: a directory or a hub name.
        config: a YAML file of an `EncoderConfig`; None: the defaults.
        device: where it encodes.
        dtype: in which; auto: the checkpoint's.

    Raises:
        InputError: a file is missing or malformed, or it holds no tower that is known.
        ConfigError: a setting is wrong.
    """
    checkpoint = Checkpoint.locate(model)
    family, _ = read_family(checkpoint)
    tower = family.wrap(load_tower(checkpoint, _dtype_of(checkpoint, dtype), torch.device(device)))
    settings = EncoderConfig() if config is None else EncoderConfig.from_yaml(config)
    return ManagerEncoder(EncoderCudaGraphManager(tower, settings))


def checkpoint_connector(
    model: str | Path,
    devices: Sequence[str] = ("cuda",),
    config: str | Path | None = None,
    settings: ConnectorConfig | None = None,
    *,
    dtype: str = "auto",
    hash_name: HashName = "blake3",
) -> Connector:
    """A connector with a worker on each device, for the media that a checkpoint takes.

    Args:
        model: a directory or a hub name.
        devices: one worker each; a device may be named twice.
        config: a YAML file of an `EncoderConfig`; None: the defaults.
        settings: of the connector.
        dtype: of the towers; auto: the checkpoint's.
        hash_name: of the function for digests.

    Raises:
        InputError: a file is missing or malformed, or it holds no tower that is known.
    """
    checkpoint = Checkpoint.locate(model)
    family, read = read_family(checkpoint)
    sizes_only = family.wrap(family.empty_tower(read, torch.device("meta")))
    processor = media_processor(sizes_only, checkpoint, hash_name=hash_name)
    if not devices:
        raise InputError("devices: expected at least one; got none")
    made = {index: checkpoint_encoder(model, config, device, dtype) for index, device in enumerate(devices)}
    manager = made[0].manager
    identity = TowerIdentity.of(manager.tower, manager.config.precision, hash_name)  # type: ignore[arg-type]

    def encoder_for(index: int) -> ManagerEncoder:
        """The one that was made, and another where its worker is started again."""
        made_first = made.pop(index, None)
        return made_first or checkpoint_encoder(model, config, devices[index], dtype)

    factories = [partial(encoder_for, index) for index in range(len(devices))]
    return Connector(processor, factories, settings, identity=identity)


def _dtype_of(checkpoint: Checkpoint, asked: str) -> torch.dtype:
    settings = checkpoint.read_json("config.json") or {}
    name = (
        str(settings.get("dtype") or settings.get("torch_dtype") or "float32") if asked == "auto" else asked
    )
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"dtype: expected auto or one of {', '.join(_DTYPES)}; got {shown(name)}")
    return getattr(torch, name)  # type: ignore[no-any-return]
