"""The service under many clients at once, some of whom send what is malformed."""

from __future__ import annotations

import asyncio
import collections
import gc
import pkgutil
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fxsplit_encoder._torch.allocator import freeze_objects

from ..connector.resources import num_descriptors
from ..models.embedding_models import WORDS, save_model
from ..waiting import wait_until
from .photographs import blank, data_url, encoded, photograph
from .serving import HOST, Running, serving

MOST_BYTES = 100_000
JSON = {"content-type": "application/json"}
JPEG = {"content-type": "image/jpeg"}

LIMITS = httpx.Limits(keepalive_expiry=1.0)
"""Long before the service closes a connection, as it may just when the next request is sent."""

MOST_TURNS = 3
"""Of the event loop, from a request for /health to its answer."""
ON_THREADS = {
    "fxsplit_encoder.service.application": ("parse_request", "embeddings_response"),
    "fxsplit_encoder.service.encoder.Preparer": ("load", "measure"),
    "fxsplit_encoder.service.encoder.QueuedEncoder": ("submit",),
    "fxsplit_encoder.models.text.Tokenizer": ("__call__",),
}
"""What takes longer than a turn of the event loop should."""


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts its turns, and takes the CPU time of the longest."""

    turns = 0
    longest = 0.0

    def _run_once(self) -> None:
        begin = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, time.thread_time() - begin)
        self.turns += 1


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[threading.Thread]]:
    """On which threads each of these was called."""
    seen: dict[str, set[threading.Thread]] = collections.defaultdict(set)
    for place, names in ON_THREADS.items():
        for name in names:
            original = pkgutil.resolve_name(f"{place}.{name}")

            def noting(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                seen[name].add(threading.current_thread())
                return original(*args, **kwargs)

            monkeypatch.setattr(f"{place}.{name}", noting)
    return seen


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

    def __init__(self, running: Running) -> None:
        self.url = running.url
        self.port = running.port
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
        async with httpx.AsyncClient(timeout=600, limits=LIMITS) as client:
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
                    if answer.status_code != 429:
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
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        whole = head + b"content-length: 20\r\n\r\n" + b'{"input": "a photo"}'
        _, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(whole[: number % (len(whole) + 1)])
        await writer.drain()
        writer.close()

    async def _watch(self, done: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=600, limits=LIMITS) as client:
            while not done.is_set():
                answer = await client.get(f"{self.url}/health")
                assert (answer.status_code, answer.json()["status"]) == (200, "ok")
                self.samples.append(psutil.Process().memory_info().rss)
                await asyncio.sleep(0.05)


@pytest.fixture
def frozen_objects() -> Iterator[None]:
    """As the command has them: a collection of all of them holds up every thread."""
    freeze_objects()
    yield
    gc.unfreeze()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("count", "clients"), [(400, 50), pytest.param(5000, 200, marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_a_crowd_is_answered_and_leaves_nothing(
    tmp_path: Path, count: int, clients: int, threads: dict[str, set[threading.Thread]], frozen_objects: None
) -> None:
    _, directory = save_model(tmp_path, "Siglip")
    loop = CountingLoop()
    limits = {"max_request_bytes": MOST_BYTES, "max_request_pixels": 1 << 20, "max_requests": 32}
    work = requests_of(random.Random(count), count)
    with serving(directory, loop, request_timeout_s=600, **limits) as running:
        turns = count_health_turns(running, loop)
        crowd = Crowd(running)
        asyncio.run(crowd.run(work[: count // 10], clients))  # until all threads and pools are there
        descriptors = num_descriptors()
        crowd.samples.clear()
        asyncio.run(crowd.run(work[count // 10 :], clients))
        wait_until(lambda: num_descriptors() <= descriptors)
        stats = running.service.encoder.queue.stats()
        application = running.service.application
        assert (application.num_requests, application.pending_bytes) == (0, 0)
    print(f"{crowd.statuses}, {stats}, /health in {max(turns)} turns, a turn at most {loop.longest:.3f} s")
    assert crowd.wrong == []
    assert max(crowd.statuses) < 500
    assert crowd.statuses.total() - crowd.statuses[429] >= count - sum(status == 413 for status, _ in work)
    assert stats.waiting == stats.running == stats.lost_workers == 0
    half = len(crowd.samples) // 2
    assert max(crowd.samples[half:]) < max(crowd.samples[:half]) + (64 << 20)
    assert max(turns) <= MOST_TURNS
    assert len(threads) == sum(map(len, ON_THREADS.values()))
    assert running.thread not in set().union(*threads.values())


def count_health_turns(running: Running, loop: CountingLoop) -> list[int]:
    """How many turns of the loop each request for /health took, as they come."""
    turns: list[int] = []
    inner = running.server.config.loaded_app

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        begin = loop.turns
        await inner(scope, receive, send)
        if scope["path"] == "/health":
            turns.append(loop.turns - begin)

    running.server.config.loaded_app = counted
    return turns
