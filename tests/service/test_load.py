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
from pathlib import Path
from typing import Any

import pytest

from fxsplit_encoder._torch.allocator import freeze_objects

from ..connector.resources import num_descriptors
from ..models.embedding_models import save_model
from ..waiting import wait_until
from .crowd import LIMITS, Crowd, requests_of
from .serving import Running, serving

MOST_TURNS = 3
"""Of the event loop, from a request for /health to its answer."""
ON_THREADS = {
    "fxsplit_encoder.service.application": ("parse_request", "measure_image", "embeddings_response"),
    "fxsplit_encoder.service.encoder.Preparer": ("load",),
    "fxsplit_encoder.service.encoder.ImageEncoder": ("count_tokens",),
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
    seen: dict[str, set[threading.Thread]] = collections.defaultdict(set)
    for place, names in ON_THREADS.items():
        for name in names:
            original = pkgutil.resolve_name(f"{place}.{name}")

            def noting(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                seen[name].add(threading.current_thread())
                return original(*args, **kwargs)

            monkeypatch.setattr(f"{place}.{name}", noting)
    return seen


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
    work = requests_of(random.Random(count), count)
    with serving(directory, loop, request_timeout_s=600, max_requests=32, **LIMITS) as running:
        turns = count_health_turns(running, loop)
        crowd = Crowd(running.url)
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
