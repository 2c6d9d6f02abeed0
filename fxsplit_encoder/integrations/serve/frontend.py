"""The replica that takes requests: reads, decodes and prepares images, and answers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.integrations.images import ImagePreparer, PreparedImage, Result
from fxsplit_encoder.integrations.images.preparer import Array
from fxsplit_encoder.integrations.prometheus import FrontendMetrics
from fxsplit_encoder.integrations.serve.requests import (
    RequestError,
    ServiceSettings,
    embeddings_response,
    error_response,
    json_response,
    read_request,
)

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 5.0
_TRIES = 2
_SCRAPE_TIMEOUT_S = 2.0

PREFIXES = ("ray_encoder_service_", "ray_serve_")
"""Of the metrics that are shown."""


class Frontend:
    """Answers `POST /v1/embeddings`, `GET /health` and `GET /metrics`."""

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


async def exposition(pool: ThreadPoolExecutor) -> str:
    """What all nodes of the cluster have counted, in Prometheus' text format. Counts arrive there some
    seconds after they were made.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    urls = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]
    loop = asyncio.get_running_loop()
    texts = await asyncio.gather(*(loop.run_in_executor(pool, _fetched, url) for url in urls))
    return joined(dict(zip(urls, texts, strict=True)))


def joined(texts: Mapping[str, str | None]) -> str:
    """Several nodes' texts as one, each metric's lines together."""
    lines = [f"# {url} did not answer" for url, text in texts.items() if text is None]
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts.values():
        family = ""
        for line in (text or "").splitlines():
            if line.startswith("# HELP "):
                family = line.split()[2]
            if not family.startswith(PREFIXES):
                continue
            if not line.startswith("#"):
                samples.setdefault(family, []).append(line)
            elif line not in heads.setdefault(family, []):
                heads[family].append(line)
    lines += _flat(heads[family] + samples.get(family, []) for family in sorted(heads))
    return "\n".join(lines) + "\n"


def _flat(groups: Iterable[list[str]]) -> list[str]:
    return [line for group in groups for line in group]


def _fetched(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as response:
            text: str = response.read().decode("utf-8", "replace")
            return text
    except OSError:
        return None
