"""The service in this process: encoders on their threads, the application under uvicorn."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fxsplit_encoder.errors import EncoderLostError
from fxsplit_encoder.integrations.prometheus import LocalMetrics
from fxsplit_encoder.service.application import Application
from fxsplit_encoder.service.encoder import QueuedEncoder
from fxsplit_encoder.service.settings import ServiceSettings

HEADER_TIMEOUT_S = 10.0
"""Within which a connection has to send a request's headers."""
_MOST_HEADER_BYTES = 1 << 16
_MOST_CONNECTIONS = 1024
_LAST_REQUESTS_S = 1.0


class Service:
    """Encoders, one a GPU or on the device of the settings, and the application that they answer; InputError:
    the checkpoint or a device is not usable.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        metrics = LocalMetrics()
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        own = devices if settings.device == "auto" else None
        self.encoder = QueuedEncoder(settings, own, observe=metrics.add_batch)
        metrics.watch(self.encoder.queue, [encoder.manager for encoder in self.encoder.encoders])
        self.application = Application(settings, self.encoder.preparer, self.encoder, metrics)

    def server(self, host: str = "127.0.0.1", port: int = 8000) -> uvicorn.Server:
        """A server of the application; its `run` returns after a signal and the end of requests in flight."""
        config = uvicorn.Config(
            self.application.app,
            host=host,
            port=port,
            http=_Limited,
            ws="none",
            lifespan="off",
            access_log=False,
            server_header=False,
            log_level="warning",
            timeout_graceful_shutdown=math.ceil(self.settings.request_timeout_s),
        )
        return _Server(config, self.application)

    def run(self, host: str, port: int) -> None:
        """Serve until a signal, and answer what is in flight; EncoderLostError: no encoder started, or all
        were lost.
        """
        server = self.server(host, port)

        def stop_if_failed(started: Future[None]) -> None:
            if started.exception() is not None:
                server.should_exit = True

        for started in self.encoder.started:
            started.add_done_callback(stop_if_failed)
        server.run()
        is_alive = self.encoder.queue.is_alive
        self.encoder.close(timeout_s=self.settings.request_timeout_s)
        if not is_alive:
            raise EncoderLostError("the encoders could not start, or were lost; see the log")


class _Server(uvicorn.Server):
    """Tells the application that it is about to end."""

    def __init__(self, config: uvicorn.Config, application: Application) -> None:
        super().__init__(config)
        self._application = application

    async def shutdown(self, sockets: Any = None) -> None:
        self._application.is_draining = True
        # Requests that were sent have not all been read yet; connections without one are closed after this.
        await asyncio.sleep(_LAST_REQUESTS_S)
        await super().shutdown(sockets)


class _Limited(HttpToolsProtocol):
    """A connection that is closed where headers do not come in time or are too long, or among too many."""

    _deadline: asyncio.TimerHandle
    """By which a request's headers have to be there; cancelled while one is under way."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.close()
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_bytes += len(data)
        if self._num_bytes > _MOST_HEADER_BYTES and not self._deadline.cancelled():
            self.transport.close()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._deadline.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle: Any = self.cycle
        if cycle.response_complete:  # else another request has come already
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadline.cancel()

    def _expect_headers(self) -> None:
        self._num_bytes = 0
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)
