"""The replica that takes requests: reads, decodes and prepares images, and answers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.integrations.images import ImagePreparer, PreparedImage, Result
from fxsplit_encoder.integrations.images.preparer import Array
from fxsplit_encoder.integrations.serve.answers import (
    RequestError,
    embeddings_response,
    error_response,
    json_response,
)
from fxsplit_encoder.integrations.serve.metrics import FrontendMetrics, exposition
from fxsplit_encoder.integrations.serve.requests import read_request
from fxsplit_encoder.integrations.serve.settings import ServiceSettings

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 5.0
_TRIES = 2


class Frontend:
    """Answers `POST /v1/embeddings`, `GET /health` and `GET /metrics`.

    Args:
        settings: of the service.
        encoder: a handle of the deployment of `EncoderReplica`.
    """

    def __init__(self, settings: ServiceSettings, encoder: Any) -> None:
        self._settings = settings
        self._encoder = encoder
        self._preparer = ImagePreparer(settings)
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decoder")
        self._metrics = FrontendMetrics()
        self._routes: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/embeddings": ("POST", self._embed),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._expose),
        }

    async def __call__(self, request: Request) -> Response:
        """The answer to any request."""
        begin = time.perf_counter()
        response = await self._answer(request)
        self._metrics.add_request(response.status_code, time.perf_counter() - begin)
        return response

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._route(request)(request)
        except RequestError as error:
            return error_response(error)
        except (BackPressureError, DeploymentUnavailableError, RayActorError) as error:
            return self._refusal(error)
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads
        except Exception as error:
            logger.exception("a request failed")
            return error_response(RequestError(500, "internal", f"{type(error).__name__}: see the log"))

    def _route(self, request: Request) -> Callable[[Request], Awaitable[Response]]:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path not in self._routes:
            raise RequestError(404, "not_found", f"no such path; there are {', '.join(self._routes)}")
        method, answer = self._routes[path]
        if request.method not in (method, "HEAD" if method == "GET" else method):
            raise RequestError(405, "method_not_allowed", f"{path} takes {method}; got {request.method}")
        return answer

    def _refusal(self, error: Exception) -> Response:
        status, after = self._settings.refusal_status, self._settings.retry_after_s
        if not isinstance(error, BackPressureError):
            logger.warning("no encoder: %s", error)
            status = 503
        refused = RequestError(status, "overloaded", f"the service is busy; ask again in {after} s")
        return error_response(refused, {"Retry-After": str(after)})

    # --- paths

    async def _embed(self, request: Request) -> Response:
        asked = await read_request(request, self._settings)
        loop = asyncio.get_running_loop()
        prepared = await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._prepare, i, d) for i, d in enumerate(asked.images))
        )
        results = await self._encode(prepared)
        embeddings = [_embedding_of(index, result) for index, result in enumerate(results)]
        return await loop.run_in_executor(
            self._threads, embeddings_response, self._settings.model, asked.encoding, prepared, embeddings
        )

    async def _health(self, request: Request) -> Response:
        try:
            found = await asyncio.wait_for(self._encoder.describe.remote(), _HEALTH_TIMEOUT_S)
        except (TimeoutError, DeploymentUnavailableError, RayActorError):
            return self._refusal(RuntimeError("no encoder answers"))
        return json_response({"status": "ok", "model": self._settings.model, "encoder": found})

    async def _expose(self, request: Request) -> Response:
        return Response(await exposition(self._threads), 200, media_type="text/plain; version=0.0.4")

    # --- images

    def _prepare(self, index: int, data: bytes) -> PreparedImage:
        try:
            return self._preparer.load(data)
        except MediaError as error:
            raise RequestError(422, "undecodable_image", str(error), index) from None

    async def _encode(self, images: list[PreparedImage]) -> list[Result]:
        """By any encoder; if that one ends meanwhile, by another, which does no harm."""
        for _ in range(_TRIES - 1):
            try:
                results: list[Result] = await self._encoder.encode.remote(images)
                return results
            except RayActorError as error:
                logger.warning("an encoder has ended, its images go to another: %s", error)
        results = await self._encoder.encode.remote(images)
        return results


def _embedding_of(index: int, result: Result) -> Array:
    if isinstance(result, InputError):
        raise RequestError(422, "unencodable_image", str(result), index)
    return result
