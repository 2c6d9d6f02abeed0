"""A checkpoint behind the connector: its media, and an encoder for each device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.keys import HashName, TowerIdentity, precision_of
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.settings import ConnectorConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.encoders import checkpoint_encoder, weightless_tower
from fxsplit_encoder.models.media import media_processor


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
        config: a YAML file of an `EncoderConfig`; None: the defaults, but no captures while requests come, or
            on a CPU none at all.
        settings: of the connector.
        dtype: of the towers; auto: bfloat16 on CUDA, float32 on a CPU.
        hash_name: of the function for digests.

    Raises:
        InputError: a file is missing or malformed, or it holds no tower that is known.
    """
    checkpoint = Checkpoint.locate(model)
    tower = weightless_tower(checkpoint)
    processor = media_processor(tower, checkpoint, hash_name=hash_name, normalize_later=True)
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
