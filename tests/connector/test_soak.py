"""The connector under load and faults, for a while: none lost, none hung, nothing left."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from fxsplit_encoder.connector import ConnectorStats
from fxsplit_encoder.connector.books.tickets import Ticket
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import FeatureEncoder, MediaItem, Modality, PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.connector.processes import EncoderProgram, ProcessEncoder, ProcessOptions
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest, FailurePolicy
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.connector.threads import pool
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError, InputError

from . import tiny_vision
from .resources import nothing_left
from .scenes import PATIENCE_S

TOKENS = {"image": 9, "video": 8}
PAGE = 4096


@pytest.fixture(autouse=True)
def restarts_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MOST_RESTARTS", 1 << 20)


class Killed(BaseException):
    """Ends a thread; nobody expects it."""


class FaultyEncoder(FeatureEncoder):
    """An encoder that at times raises, runs out of memory, dawdles, or takes its thread along."""

    def __init__(self, inner: FeatureEncoder, rate: float, seed: int) -> None:
        self._inner = inner
        self._rate = rate
        self._draw = random.Random(seed)
        self.start, self.close = inner.start, inner.close  # type: ignore[method-assign]

    def row_bytes(self, modality: Modality) -> int | None:
        return self._inner.row_bytes(modality)

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        luck = self._draw.random() / self._rate
        if luck < 0.2:
            raise RuntimeError("an injected fault")
        if luck < 0.4:
            raise torch.OutOfMemoryError("an injected lack of memory")
        if luck < 0.6:
            raise ValueError("an injected refusal")
        if luck < 0.8:
            time.sleep(0.02)
        elif luck < 0.9:
            raise Killed
        return self._inner.encode(items)


class KilledProcess(ProcessEncoder):
    """An encoder in a process of its own that is killed now and then, at once or while it encodes."""

    def __init__(self, rate: float, seed: int) -> None:
        program = EncoderProgram(f"{tiny_vision.__name__}:encoder", {})
        row_bytes = 2 * tiny_vision.WIDTH * 4
        super().__init__(program, {"image": row_bytes, "video": row_bytes}, ProcessOptions(max_bytes=1 << 24))
        self._rate = rate
        self._draw = random.Random(seed)

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        luck = self._draw.random() / self._rate
        if luck < 1 and self.pid is not None:
            delay = 0.0 if luck < 0.5 else 0.003
            killer = threading.Timer(delay, os.kill, [self.pid, signal.SIGKILL])
            killer.start()
            killer.join() if luck < 0.5 else None
            try:
                return super().encode(items)
            finally:
                killer.join()
        return super().encode(items)


class FaultyCopies(Copies):
    """Copies that at times cannot be started, or fail while they are under way; a device that is at times
    through with its work later than the host.
    """

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self._rate = rate
        self._draw = random.Random(seed)

    def to_host(self, rows: Tensor, buffer: Tensor) -> Any:
        luck = self._draw.random() / self._rate
        if luck < 0.3:
            raise RuntimeError("an injected fault of a copy")
        target, event = super().to_host(rows, buffer)
        return (target, LateEvent(is_lost=True)) if luck < 0.6 else (target, event)

    def mark(self, device: torch.device) -> Any:
        return LateEvent() if self._draw.random() < self._rate else super().mark(device)


class LateEvent:
    """Of a device that needs some milliseconds, and may be lost by then."""

    def __init__(self, *, is_lost: bool = False) -> None:
        self._due = time.monotonic() + 0.003
        self._is_lost = is_lost

    def query(self) -> bool:
        has_passed = time.monotonic() >= self._due
        if has_passed and self._is_lost:
            raise RuntimeError("an injected fault during a copy")
        return has_passed

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._due - time.monotonic()))
        self.query()


@dataclass
class Live:
    ticket: Ticket
    items: Sequence[MediaItem]
    born: float
    holds: int = 1


@dataclass
class Engine:
    """Submits requests as fast as the connector takes them, and treats them as engines do."""

    connector: Connector
    draw: random.Random
    num_media: int
    references: dict[bytes, Tensor]
    live: dict[int, Live] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    checked: int = 0

    def serve(self, num_requests: int) -> None:
        left = num_requests
        while left or self.live:
            while left and len(self.live) < 64:
                if not self.submit():
                    break
                left -= 1
            self.step()

    def submit(self) -> bool:
        draw = self.draw
        items = [self.media() for _ in range(draw.choice([0, 1, 1, 1, 2, 3]))]
        tokens = [1, *(TOKENS[item.modality] for item in items), 2]
        policy = FailurePolicy(
            draw.choice(["fail", "text_only"]), draw.choice([0, 1, 3]), draw.choice([None, "half_resolution"])
        )
        request = EncodeRequest(
            f"request {draw.randrange(1 << 30)}",
            items,
            PositionMap(tokens, [item.modality for item in items], TOKENS),
            policy,
            draw.choice(["discard", "keep"]),
            timeout_s=draw.choice([None] * 20 + [0.003]),
            salt=draw.choice(["", "", "tenant"]),
            tenant=draw.choice(["", "", "other"]),
        )
        try:
            ticket = self.connector.submit(request)
        except ConnectorFullError:
            self.ends["refused"] += 1
            return False
        self.live[ticket.number] = Live(ticket, items, time.monotonic())
        return True

    def media(self) -> MediaItem:
        number = self.draw.randrange(self.num_media)
        kind = self.draw.random()
        if kind < 0.05:
            return MediaItem("video", tiny_vision.clip(number))
        if kind < 0.08:
            return MediaItem("image", tiny_vision.jpeg(number)[: self.draw.choice([0, 30, 700])])
        return MediaItem("image", tiny_vision.jpeg(number) if kind < 0.9 else tiny_vision.crop(number))

    def step(self) -> None:
        step = self.connector.step()
        for ticket in step.unavailable:
            if self.live.pop(ticket.number, None) is not None:
                self.ends[str(ticket.state)] += 1
        for number, each in list(self.live.items()):
            state = each.ticket.state
            if state is State.READY:
                self.treat(each)
            elif state is State.RELEASED:
                self.ends["released"] += 1
                del self.live[number]
            elif self.draw.random() < 0.0005:
                self.connector.cancel(each.ticket)
            assert time.monotonic() - each.born < PATIENCE_S, f"{each.ticket} hangs"
        if step.deferred and not step.ready:
            time.sleep(0.0005)

    def treat(self, each: Live) -> None:
        """Prefill in chunks, and at times preemption, beams, rollback or a client that goes."""
        luck, connector, ticket = self.draw.random(), self.connector, each.ticket
        if luck < 0.02:
            connector.cancel(ticket)
            return
        if luck < 0.1 and each.holds < 3:
            each.holds += connector.hold(ticket) == "ready"
            return
        try:
            self.prefill(ticket)
        except ConnectorError as error:
            assert error.kind == "worker_lost"  # while it wrote what was ready ahead
            self.ends["told of a loss"] += 1
            return
        except InputError:
            assert ticket.state is State.FAILED  # meanwhile, for the same reason
            return
        each.holds -= 1
        connector.release(ticket, keep=luck > 0.95)
        if each.holds == 0 and 0.1 < luck < 0.15 and connector.hold(ticket) != "unavailable":
            each.holds, each.born = 1, time.monotonic()  # preempted: it reads again

    def prefill(self, ticket: Ticket) -> None:
        placeholders = ticket.request.placeholders
        assert placeholders is not None
        length = placeholders.merged_length(ticket.token_counts)
        out = torch.full((length, tiny_vision.WIDTH), -1.0)
        chunk = self.draw.choice([5, 16, 64])
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            self.connector.merge(ticket, (start, stop), out[start:stop])
        row = 1
        for item, count in zip(ticket.items, ticket.token_counts, strict=True):
            expected = self.references.get(item.digest or b"")
            if expected is not None and count:
                torch.testing.assert_close(out[row : row + count], expected[:, : tiny_vision.WIDTH])
                self.checked += 1
            row += count
        assert row == length - 1 and (out[[0, -1]] == -1).all()


def make_references(num_media: int) -> dict[bytes, Tensor]:
    """What the tower itself makes of some of the media."""
    prepare = tiny_vision.processor().prepare
    items = (prepare(MediaItem("image", tiny_vision.jpeg(number))) for number in range(0, num_media, 3))
    return {item.digest: tiny_vision.eager_rows(item) for item in items}


def make_connector(rate: float, encoders: Sequence[Callable[[], Any]] = ()) -> Connector:
    """Two workers with real towers and faults, and others; less memory than there is to keep."""
    managers = [tiny_vision.manager() for _ in range(2)]
    seeds = iter(range(1 << 30))

    def faulty(index: int) -> Callable[[], FaultyEncoder]:
        return lambda: FaultyEncoder(ManagerEncoder(managers[index]), rate, next(seeds))

    settings = ConnectorConfig(
        host_bytes=32 * PAGE,
        device_bytes=4 * PAGE,
        staging_bytes=1 << 20,
        cpu_workers=2,
        max_batch_items=8,
        max_waiting_items=64,
        timeout_s=PATIENCE_S,
    )
    encoders = [faulty(0), faulty(1), *encoders]
    return Connector(tiny_vision.processor(), encoders, settings, copies=FaultyCopies(rate, 7))


def resident_bytes() -> int:
    """Of this process, once garbage is gone, and what the C library keeps of freed memory for each thread."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def serve(engine: Engine, num_requests: int) -> None:
    engine.ends.clear()
    engine.serve(num_requests)
    connector = engine.connector
    assert sum(engine.ends[end] for end in ("released", "failed", "cancelled")) == num_requests
    assert connector.audit() == []
    assert connector.stats().live_tickets == connector.stats().waiting_items == 0


def has_met(stats: ConnectorStats) -> list[int]:
    return [stats.lost_workers, stats.split_batches, stats.retries, stats.hits, stats.evictions]


def test_some_requests_with_faults() -> None:
    references = make_references(60)
    tiny_vision.manager()  # what compiling leaves behind stays
    with nothing_left():
        with make_connector(rate=0.1) as connector:
            engine = Engine(connector, random.Random(0), 60, references)
            serve(engine, 400)
            # Which faults are met depends on how requests fall into batches, and that on the machine.
            for _ in range(9):
                if all(has_met(connector.stats())):
                    break
                serve(engine, 200)
            stats = connector.stats()
        assert connector.audit() == []
        assert not any(connector.stats().bytes_used.values())
    assert engine.checked > 50
    assert all(has_met(stats)), stats


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_with_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest would keep the traceback of every loss, with what its frames hold.
    monkeypatch.setattr(logging.getLogger("fxsplit_encoder"), "propagate", False)
    references = make_references(600)
    tiny_vision.manager()
    with nothing_left():
        seeds = itertools.count()
        with make_connector(0.05, [lambda: KilledProcess(0.01, next(seeds))]) as connector:
            engine = Engine(connector, random.Random(1), 600, references)
            serve(engine, 2_000)
            before = resident_bytes()
            serve(engine, 8_000)
            grown = resident_bytes() - before
            stats = connector.stats()
            connector.close(600.0)  # a process that was killed may be starting again
        assert connector.audit() == []
        assert not any(connector.stats().bytes_used.values())
    # The second is of an encoder that was started again, since its process had been killed.
    assert next(seeds) > 1
    print(f"\n{stats}\n{engine.ends}, {engine.checked} checked, {grown / 2**20:.1f} MiB more")
    # What grows is kept by towers and managers, for recent batches, and bounded there.
    assert grown < 32 << 20
