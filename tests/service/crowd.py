"""Many clients at once, some of whom send what is malformed, and what should answer each of them."""

from __future__ import annotations

import asyncio
import collections
import random
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from ..models.embedding_models import WORDS
from .photographs import blank, data_url, encoded, photograph

MOST_BYTES = 100_000
LIMITS = {"max_request_bytes": MOST_BYTES, "max_pixels": 1 << 20}
"""Of the service that `requests_of` is for."""
JSON = {"content-type": "application/json"}
JPEG = {"content-type": "image/jpeg"}

_CONNECTIONS = httpx.Limits(keepalive_expiry=1.0)
"""Long before the service closes a connection, as it may just when the next request is sent."""


def cut_form(data: bytes) -> bytes:
    """A form of two files that ends in the second."""
    sent = httpx.Request("POST", "http://h/", files=[("a", ("a.jpg", data)), ("b", ("b.jpg", data))]).read()
    return sent[: -len(data) // 2]


def requests_of(draw: random.Random, count: int) -> list[tuple[int, dict[str, Any]]]:
    """What is sent, and the status that answers it."""
    images = [
        encoded(photograph(name, (draw.randint(30, 90), draw.randint(30, 90))), "JPEG")
        for name in ("cat", "rocket", "coffee") * 4
    ]
    huge = blank(3000)
    url = partial(data_url, kind="jpeg")
    form = {"content-type": "multipart/form-data; boundary=" + "b" * 20}

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(0, 30)))

    good = [
        lambda: {"content": draw.choice(images), "headers": JPEG},
        lambda: {"files": [("image", ("a.jpg", draw.choice(images))) for _ in range(draw.randint(1, 4))]},
        lambda: {"json": {"input": [text() for _ in range(draw.randint(1, 8))], "encoding_format": "base64"}},
        lambda: {"json": {"input": [text(), url(draw.choice(images))], "user": f"user {draw.randint(0, 9)}"}},
    ]
    bad = [
        (422, lambda: {"content": draw.choice(images)[:200], "headers": JPEG}),
        (422, lambda: {"json": {"input": [text(), data_url(b"no image")]}}),
        (400, lambda: {"content": draw.randbytes(300), "headers": JSON}),
        (400, lambda: {"content": b"[" * 50_000, "headers": JSON}),
        (400, lambda: {"content": b'{"dimensions":' + b"7" * 5000 + b"}", "headers": JSON}),
        (400, lambda: {"json": {"input": text(), "dimensions": 1 << 40}}),
        (400, lambda: {"json": {"input": [[1, 2], None]}}),
        (400, lambda: {"content": cut_form(draw.choice(images)), "headers": form}),
        (404, lambda: {"json": {"input": text(), "model": "another"}}),
        (413, lambda: {"content": bytes(MOST_BYTES + 1), "headers": JPEG}),
        (413, lambda: {"content": huge, "headers": JPEG}),
        (415, lambda: {"content": text(), "headers": {"content-type": "text/plain"}}),
    ]
    made = []
    for _ in range(count):
        status, make = draw.choice(bad) if draw.random() < 0.3 else (200, draw.choice(good))
        made.append((status, make()))
    return made


class Crowd:
    """Clients that send requests until each is answered by something else than a refusal."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: collections.Counter[int] = collections.Counter()
        self.wrong: list[str] = []
        self.samples: list[int] = []
        """Bytes that the process holds, from time to time."""

    async def run(self, work: list[tuple[int, dict[str, Any]]], clients: int) -> None:
        pending = iter(work)
        done = asyncio.Event()
        watching = asyncio.create_task(self._watch(done))
        await asyncio.gather(*(self._client(pending, number) for number in range(clients)))
        done.set()
        await watching

    async def _client(self, pending: Any, number: int) -> None:
        async with httpx.AsyncClient(timeout=600, limits=_CONNECTIONS) as client:
            for expected, arguments in pending:
                while True:
                    try:
                        answer = await client.post(f"{self.url}/v1/embeddings", **arguments)
                    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                        # A body that was refused before its end; the answer is lost with the connection.
                        if expected == 413:
                            break
                        raise
                    self.statuses[answer.status_code] += 1
                    if answer.status_code not in (429, 503):
                        break
                    assert int(answer.headers["retry-after"]) >= 1
                    await asyncio.sleep(0.05 * random.random())
                else:
                    continue
                if expected != 413 and answer.status_code != expected:
                    self.wrong.append(f"{answer.status_code}, expected {expected}: {answer.text[:200]}")
                if sum(self.statuses.values()) % 7 == 0:
                    await self._leave_in_the_middle(number)

    async def _leave_in_the_middle(self, number: int) -> None:
        """A connection that is given up, at one point of its request or another."""
        where = urlsplit(f"{self.url}/v1/embeddings")
        head = f"POST {where.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
        whole = head + b"content-length: 20\r\n\r\n" + b'{"input": "a photo"}'
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(whole[: number % (len(whole) + 1)])
        await writer.drain()
        writer.close()

    async def _watch(self, done: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=600, limits=_CONNECTIONS) as client:
            while not done.is_set():
                answer = await client.get(f"{self.url}/health")
                assert (answer.status_code, answer.json()["status"]) == (200, "ok")
                self.samples.append(psutil.Process().memory_info().rss)
                await asyncio.sleep(0.05)
