"""Rows, events and books without torch, devices or threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fxsplit_encoder.connector.books.books import Books
from fxsplit_encoder.connector.books.encoding import Worker, WorkerStatus
from fxsplit_encoder.connector.books.parts import Parts
from fxsplit_encoder.connector.request import ConnectorConfig

ROW_BYTES = 1024
PAGE = 4096


@dataclass(eq=False)
class Rows:
    nbytes: int
    device: str = "gpu:0"


@dataclass(eq=False)
class ManualEvent:
    """Passes when it is told to."""

    passed: bool = False

    def query(self) -> bool:
        return self.passed

    has_succeeded = query

    def synchronize(self) -> None:
        assert self.passed


@dataclass(eq=False)
class Inputs:
    """What stands for preprocessed pixels."""

    nbytes: int = 100


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def key_of(digest: bytes, salt: str) -> bytes:
    return digest + b"|" + salt.encode()


@dataclass
class Bench:
    """Books, and what their tests need to hand."""

    books: Books
    clock: Clock
    workers: list[Worker] = field(default_factory=list)

    @classmethod
    def make(cls, num_workers: int = 1, *, can_reduce: bool = False, **settings: Any) -> Bench:
        clock = Clock()
        sizes = {"host_bytes": 8 * PAGE, "device_bytes": 0, "staging_bytes": 16 * PAGE, "timeout_s": None}
        config = ConnectorConfig(**{**sizes, **settings})
        row_bytes: Callable[[str], int | None] = {"image": ROW_BYTES, "video": ROW_BYTES}.get
        settled = threading.Condition()
        settled.acquire()  # this thread is the only one
        parts = Parts(config, row_bytes, key_of, settled, clock, can_reduce)
        bench = cls(Books(parts), clock)
        for number in range(num_workers):
            bench.start_worker(f"w{number}")
        return bench

    def start_worker(self, name: str) -> Worker:
        worker = Worker(name, frozenset({"image", "video"}))
        self.books.encoding.add_worker(worker)
        worker.status = WorkerStatus.RUNNING
        self.workers = [*(each for each in self.workers if each.name != name), worker]
        return worker
