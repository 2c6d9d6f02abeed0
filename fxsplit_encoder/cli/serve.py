"""`encoder-cg serve`: the service in this process."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fxsplit_encoder._torch.allocator import freeze_objects
from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.settings_model import read_settings

try:
    from fxsplit_encoder.service.server import Service
    from fxsplit_encoder.service.settings import ServiceSettings
except ModuleNotFoundError as error:
    raise MissingExtraError("encoder-cg serve", "serve") from error


def run_serve(model: str, host: str, port: int, given: Mapping[str, Any], file: Path | None) -> None:
    """Serves a checkpoint until a signal. Settings of the command line, `given`, go before those of `file`;
    those at their defaults do not.

    Raises:
        ConfigError: a setting is wrong.
        InputError: the checkpoint, the device or the address is not usable.
        EncoderLostError: the encoders could not start, or were lost.
    """
    chosen = {name: value for name, value in given.items() if value not in (None, "auto")}
    try:
        asyncio.run(_bind(host, port))  # what cannot be bound is said before a model is loaded
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror}") from None
    settings = ServiceSettings(**{**({} if file is None else read_settings(file)), "model": model, **chosen})
    if settings.api_key is None and not _is_loopback(host):
        typer.echo(f"{host} may be reached by others, and no --api-key is set", err=True)
    service = Service(settings)
    place = ", ".join(str(encoder.device) for encoder in service.encoder.encoders)
    typer.echo(f"serving {settings.name} on {place} at http://{host}:{port}/v1/embeddings")
    freeze_objects()
    service.run(host, port)


async def _bind(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    (await loop.create_server(asyncio.Protocol, host, port, start_serving=False)).close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
