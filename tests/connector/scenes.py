"""What tests of the connector act with: encoders that wait or fail on demand, copies that take their time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.connector.books.tickets import Ticket
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder, FakeProcessor, fake_rows
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.connector.states import Availability, State
from fxsplit_encoder.connector.threads.copies import Copies

from ..waiting import wait_until

PATIENCE_S = 60.0
"""How long anything is waited for that has to come, on however busy a machine."""


def image(name: str, tokens: int = 4) -> MediaItem:
    return MediaItem("image", name, {"tokens": tokens})


def request(*items: MediaItem | str, **settings: Any) -> EncodeRequest:
    media = [image(item) if isinstance(item, str) else item for item in items]
    return EncodeRequest("r", media, **settings)


def prompt(*tokens: int) -> PositionMap:
    """A prompt in which 9 stands for an image."""
    return PositionMap(tokens, ["image"] * tokens.count(9), {"image": 9})


def rows_of(item: MediaItem) -> Tensor:
    processor = FakeProcessor()
    return fake_rows(processor.digest(item), processor.count_tokens(item))


def names_of(items: Sequence[PreparedItem]) -> list[str]:
    return [str(item.metadata["media"]) for item in items]


def wait(ticket: Ticket) -> Availability:
    told = ticket.wait(PATIENCE_S)
    assert told != "deferred", ticket
    return told


def kind_of(ticket: Ticket) -> tuple[str, bool]:
    """Of the failure that a ticket comes to, and whether it is retryable."""
    assert wait(ticket) == "unavailable" and ticket.error is not None, ticket
    return ticket.error.kind, ticket.error.retryable


def ready(each: Connector, *items: MediaItem | str, **settings: Any) -> Ticket:
    ticket = each.submit(request(*items, **settings))
    assert wait(ticket) == "ready", ticket.error
    return ticket


def rows_in(each: Connector, ticket: Ticket) -> Tensor:
    """Those of a ticket's first item."""
    with each.read(ticket) as rows:
        return rows[0].rows.clone()


def assert_nothing_is_left(each: Connector) -> None:
    each.clear_cache()
    assert each.audit() == []
    assert not any(each.stats().bytes_used.values()), each.stats()
    assert (each.stats().live_tickets, each.stats().waiting_items) == (0, 0)


def wait_until_queued(*tickets: Ticket) -> None:
    """Every item of these waits for a worker."""
    items = [item for ticket in tickets for item in ticket.items]
    wait_until(lambda: all(item.state is State.QUEUED for item in items))


def encode_behind(each: Connector, stage: Stage, *requests: EncodeRequest) -> list[Availability]:
    """What became of requests that come to wait in turn while a first batch is encoded."""
    tickets = [each.submit(request("first"))]
    stage.wait_for_batch()
    for one in requests:
        tickets.append(each.submit(one))
        wait_until_queued(tickets[-1])
    stage.open()
    return [wait(ticket) for ticket in tickets]


class Stage:
    """Where every batch shows up, and waits until it may go on if the stage is closed."""

    def __init__(
        self, *, is_open: bool = True, faults: dict[str, Callable[[], BaseException]] | None = None
    ) -> None:
        self.batches: list[list[str]] = []
        self.faults = dict(faults or {})
        """By the name of an item: what a batch with it raises."""
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()
        if is_open:
            self._open.set()

    def __call__(self, items: Sequence[PreparedItem]) -> None:
        names = names_of(items)
        self.batches.append(names)
        self._entered.release()
        assert self._open.wait(PATIENCE_S)
        for name in names:
            if name in self.faults:
                raise self.faults[name]()

    @property
    def encoded(self) -> list[str]:
        return [name for batch in self.batches for name in batch]

    def wait_for_batch(self) -> list[str]:
        assert self._entered.acquire(timeout=PATIENCE_S)
        return self.batches[-1]

    def open(self) -> None:
        self._open.set()


class SlowEvent:
    """Passes when it is told to, or fails whoever waits for it first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._has_passed = False
        self._fault: Exception | None = None

    def query(self) -> bool:
        return self._has_passed

    def synchronize(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._has_passed or self._fault, PATIENCE_S)
            fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def come_to_pass(self) -> None:
        with self._changed:
            self._has_passed = True
            self._changed.notify_all()

    def fail(self, fault: Exception) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()


class SlowCopies(Copies):
    """Copies that arrive when they are told to, like those of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[SlowEvent, Tensor, Tensor]] = []
        self.allocated: list[Tensor] = []
        self.marks: list[SlowEvent] = []
        self.marks_wait = False
        self._started = threading.Semaphore(0)

    def allocate(self, num_bytes: int) -> Tensor:
        self.allocated.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self.allocated[-1]

    def to_host(self, rows: Tensor, buffer: Tensor) -> tuple[Tensor, Any]:
        event, target = SlowEvent(), buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        self.pending.append((event, rows, target))
        self._started.release()
        return target, event

    def mark(self, device: torch.device) -> Any:
        if not self.marks_wait:
            return super().mark(device)
        self.marks.append(SlowEvent())
        return self.marks[-1]

    def wait_for_copy(self) -> None:
        assert self._started.acquire(timeout=PATIENCE_S)

    def arrive(self) -> None:
        """All copies under way are made now."""
        pending, self.pending = self.pending, []
        for event, rows, target in pending:
            target.copy_(rows)
            event.come_to_pass()


def connector(
    encoders: int | Sequence[Callable[[], Any]] = 1,
    *,
    stage: Callable[[Sequence[PreparedItem]], None] = lambda items: None,
    processor: Any = None,
    copies: Copies | None = None,
    **settings: Any,
) -> Connector:
    if isinstance(encoders, int):
        encoders = [lambda: FakeEncoder(on_encode=stage)] * encoders
    config = ConnectorConfig(**{"cpu_workers": 2, "timeout_s": None, **settings})
    return Connector(processor or FakeProcessor(), encoders, config, copies=copies)


@contextmanager
def staged(
    encoders: int = 1,
    *,
    is_open: bool = False,
    faults: dict[str, Callable[[], BaseException]] | None = None,
    **settings: Any,
) -> Iterator[tuple[Connector, Stage]]:
    """A connector, and the stage of all its batches."""
    stage = Stage(is_open=is_open, faults=faults)
    with connector(encoders, stage=stage, **settings) as each:
        yield each, stage
