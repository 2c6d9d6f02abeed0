"""The Starlette application that answers requests for embeddings, here and on Ray.

The event loop reads bodies and waits. Threads parse, decode, tokenize and write; a `Backend` encodes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fxsplit_encoder.errors import FxSplitError, InputError, MediaError
from fxsplit_encoder.integrations.prometheus import ServiceMetrics
from fxsplit_encoder.media import measure_image
from fxsplit_encoder.service.encoder import Item, Preparer, Result, thread_pool
from fxsplit_encoder.service.protocol import RequestError, Source, embeddings_response, parse_request
from fxsplit_encoder.service.settings import ServiceSettings

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

BODY_TIMEOUT_S = 30.0
"""Within which a request's body has to come."""
MOST_PENDING_BYTES = 1 << 30
"""Of all bodies that are in memory together."""
_GONE = 499
"""The status of a request whose client has gone; the answer is read by no one."""


class Backend(Protocol):
    """Encoders of the application: a `QueuedEncoder`, here or elsewhere."""

    async def answer(self, items: Sequence[Item], tenant: str, timeout_s: float) -> tuple[list[Result], int]:
        """See `QueuedEncoder.answer`."""

    async def is_ready(self) -> bool:
        """See `QueuedEncoder.is_ready`."""


class Application:
    """Answers `POST /v1/embeddings`, and `GET` of /v1/models, /health, /ready and /metrics."""

    def __init__(
        self, settings: ServiceSettings, preparer: Preparer, backend: Backend, metrics: ServiceMetrics
    ) -> None:
        self.settings = settings
        self._preparer, self._backend, self._metrics = preparer, backend, metrics
        preparer.steps.on_host.observe = metrics.add_on_host
        self._tokenizer = preparer.tokenizer  # loaded before the first request
        self.num_requests = self.pending_bytes = 0
        self.is_draining = False
        """Whether it is about to end, which /ready tells."""

        endpoints: dict[str, tuple[str, Endpoint]] = {
            "/v1/embeddings": ("POST", self._embed),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._expose),
        }
        self.paths = ", ".join(endpoints)
        routes = [
            Route(path, self._answering(endpoint, path.startswith("/v1/")), methods=[method])
            for path, (method, endpoint) in endpoints.items()
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: self._refuse_path})

    def _answering(self, endpoint: Endpoint, is_private: bool) -> Endpoint:
        async def answer(request: Request) -> Response:
            begin = time.perf_counter()
            try:
                if is_private and self.settings.api_key is not None:
                    self._check_key(request, self.settings.api_key)
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            except Exception as error:
                response = _answer_to(error).response()
            self._metrics.add_request(response.status_code, time.perf_counter() - begin)
            return response

        return answer

    async def _refuse_path(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        refused = RequestError(error.status_code, f"{error.detail}; there are {self.paths}")
        refused.headers = error.headers
        return refused.response()

    def _check_key(self, request: Request, key: str) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not secrets.compare_digest(given, f"Bearer {key}".encode()):
            raise RequestError(401, "Authorization: expected Bearer KEY")

    # --- paths

    async def _models(self, request: Request) -> Response:
        model = {"id": self.settings.name, "object": "model", "created": 0, "owned_by": "fxsplit_encoder"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        status = "ok" if await self._backend.is_ready() else "starting"
        running = {"requests": self.num_requests, "pending_bytes": self.pending_bytes}
        return JSONResponse({"status": status, "model": self.settings.name, **running})

    async def _ready(self, request: Request) -> Response:
        if self.is_draining or not await self._backend.is_ready():
            raise RequestError(503, "the service ends" if self.is_draining else "the encoder starts")
        return JSONResponse({"status": "ready"})

    async def _expose(self, request: Request) -> Response:
        return Response(await self._metrics.exposition(), 200, media_type="text/plain; version=0.0.4")

    async def _embed(self, request: Request) -> Response:
        body = bytearray()
        try:
            await self._read(request, body)
            self.num_requests += 1
            try:
                return await self._while_connected(request, self._embed_body(request, bytes(body)))
            finally:
                self.num_requests -= 1
        finally:
            self.pending_bytes -= len(body)

    def _overload(self) -> RequestError | None:
        if self.num_requests < self.settings.max_requests:
            return None
        return RequestError(429, f"{self.num_requests} requests are worked on, the limit max_requests")

    # --- bodies

    async def _read(self, request: Request, body: bytearray) -> None:
        """Read a request's body, whose bytes count as pending. The rest of a refused one is read too, within
        limits: a connection closed before is reset, unanswered.
        """
        most = left = self.settings.max_request_bytes
        refused = self._overload()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    if refused is None and (size := len(body) + len(chunk)) > most:
                        limit = f"expected at most {most} bytes, the limit max_request_bytes"
                        refused = RequestError(413, f"body: {limit}; got {size} or more")
                    elif refused is None and self.pending_bytes + len(chunk) > MOST_PENDING_BYTES:
                        refused = RequestError(429, "the bodies that came take all memory for them")
                    if refused is None:
                        self.pending_bytes += len(chunk)
                        body += chunk
                    elif (left := left - len(chunk)) < 0:
                        break
        except TimeoutError:
            refused = refused or RequestError(408, f"body: expected all of it within {BODY_TIMEOUT_S:g} s")
        if (refused := refused or self._overload()) is not None:
            raise refused

    async def _while_connected(self, request: Request, work: Awaitable[Response]) -> Response:
        """The answer; the work is cancelled if the client goes before it."""
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            gone.cancel()
            working.cancel()

    # --- items

    async def _embed_body(self, request: Request, body: bytes) -> Response:
        on_thread = partial(asyncio.get_running_loop().run_in_executor, thread_pool())
        asked = await on_thread(parse_request, dict(request.headers), request.url.query, body, self.settings)
        await on_thread(self._check_pixels, asked.input)
        preparing = [on_thread(self._prepare, source) for source in asked.input]
        try:
            await asyncio.wait(preparing, return_when=asyncio.FIRST_EXCEPTION)
            errors = {index: each.exception() for index, each in enumerate(preparing) if each.done()}
            for index, error in errors.items():
                if error is not None:
                    raise _answer_to(error, index) from error
            items = [each.result() for each in preparing]
        finally:
            for each in preparing:  # one is refused: the others wait for nothing
                each.cancel()
        tenant = asked.user or (request.client.host if request.client else "")
        outcomes, tokens = await self._backend.answer(items, tenant, self.settings.request_timeout_s)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                self._metrics.add_refused()
                raise _answer_to(outcome, index) from outcome
        embeddings = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        form = self.settings.name, self._preparer.normalizes
        return await on_thread(embeddings_response, asked, items, embeddings, tokens, *form)

    def _check_pixels(self, sources: Sequence[Source]) -> None:
        pixels, most, limits = 0, self.settings.max_pixels, self._preparer.limits
        for index, source in enumerate(sources):
            try:
                pixels += math.prod(measure_image(source, limits)) if isinstance(source, bytes) else 0
            except MediaError as error:
                raise _answer_to(error, index) from None
            if pixels > most:
                limit = f"expected at most {most} pixels together, the limit max_pixels"
                raise RequestError(413, f"images: {limit}; got {pixels} or more", index)

    def _prepare(self, source: Source) -> Item:
        if isinstance(source, bytes):
            return self._preparer.load(source)
        if self._tokenizer is None:
            raise RequestError(400, f"input: {self.settings.name} takes images alone; got a text")
        return self._tokenizer(source)


def _answer_to(error: BaseException, index: int | None = None) -> RequestError:
    """The answer to a request that failed, or whose item of that index did."""
    if isinstance(error, RequestError):
        error.index = error.index if index is None else index
        return error
    if isinstance(error, InputError):
        kind = "undecodable_image" if isinstance(error, MediaError) else "unencodable_image"
        return RequestError(422, str(error), index, kind)
    if isinstance(error, FxSplitError) and error.retryable:
        return RequestError(503, str(error))
    logger.error("a request failed", exc_info=error)
    return RequestError(500, f"{type(error).__name__}: see the log")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
