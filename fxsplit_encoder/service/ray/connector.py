"""A checkpoint behind the connector, its workers actors of a Ray cluster.

Media are prepared where the connector runs, and each actor loads the checkpoint's tower: inputs and features
cross Ray's object store as bytes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.connector import Connector, ConnectorConfig, TowerIdentity
from fxsplit_encoder.connector.keys import HashName, precision_of
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.connectors import checkpoint_encoder, config_for, row_bytes_of, weightless_tower
from fxsplit_encoder.models.media import media_processor
from fxsplit_encoder.service.ray.encode_images import everywhere
from fxsplit_encoder.service.ray.job import checkpoint_digest
from fxsplit_encoder.service.ray.ray_encoder import RayEncoder, RayOptions, check_connection


def ray_connector(
    model: str | Path,
    workers: int,
    config: str | Path | EncoderConfig | None = None,
    settings: ConnectorConfig | None = None,
    options: RayOptions | None = None,
    *,
    dtype: str = "auto",
    hash_name: HashName = "blake3",
) -> Connector:
    """Prepare media here and encode them in actors; arguments as of `models.connectors.checkpoint_connector`.

    Args:
        model: a directory that every node sees, or a hub name; `checkpoint_digest` identifies features.
        workers: actors. They start in the background.
        options: of each actor; with num_gpus=0 it encodes on CPUs.

    Raises:
        InputError: Ray is not connected, the checkpoint or a file is not usable, or there is no worker.
    """
    check_connection()
    if workers < 1:
        raise InputError(f"workers: expected at least one; got {workers}")
    options = options if options is not None else RayOptions()
    name = everywhere(model)
    device = "cuda" if options.num_gpus else "cpu"  # of an actor, which sees the GPUs that Ray has given it
    checkpoint = Checkpoint.locate(name)
    chosen = config_for(config, torch.device(device))
    rows = row_bytes_of(checkpoint, device, dtype)
    make = partial(checkpoint_encoder, name, chosen, device, dtype)
    digest = bytes.fromhex(checkpoint_digest(name))
    identity = TowerIdentity(digest, f"{dtype} on {device}", precision_of(chosen))
    processor = media_processor(weightless_tower(checkpoint), checkpoint, hash_name=hash_name)
    return Connector(
        processor, [partial(RayEncoder, make, rows, options)] * workers, settings, identity=identity
    )
