"""A service in this process, under uvicorn on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from fxsplit_encoder.service.server import Service
from fxsplit_encoder.service.settings import ServiceSettings

from ..waiting import wait_until

HOST = "127.0.0.1"
KEY = {"config": {"enabled": False}, "device": "cpu"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Running:
    def __init__(self, model: Path, loop: asyncio.AbstractEventLoop | None = None, **settings: Any) -> None:
        self.service = Service(ServiceSettings(model=str(model), served_name="tiny", **{**KEY, **settings}))
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.server = self.service.server(HOST, self.port)
        self.loop = loop or asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.server.serve())

    def embed(self, **arguments: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/embeddings", timeout=60, **arguments)

    def status_of(self, path: str) -> int:
        return httpx.get(self.url + path).status_code

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection((HOST, self.port), timeout=30)
        connection.sendall(data)
        return connection


@contextlib.contextmanager
def serving(model: Path, loop: asyncio.AbstractEventLoop | None = None, **settings: Any) -> Iterator[Running]:
    running = Running(model, loop, **settings)
    running.service.encoder.wait_started()
    running.thread.start()
    wait_until(lambda: running.server.started)
    try:
        yield running
    finally:
        running.server.should_exit = True
        running.thread.join()
        running.service.encoder.close()


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether a service does, whose process must not be over."""
    assert process.poll() is None, log.read_text()
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
