"""What processors, callers, files and devices get wrong costs one request, and never the connector."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder, FakeProcessor
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.positions import Places, merge_rows
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.errors import InputError

from .books.test_any_history import MEDIA, AnyHistory, Bench
from .scenes import (
    PATIENCE_S,
    Stage,
    assert_nothing_is_left,
    connector,
    kind_of,
    ready,
    request,
    wait,
    wait_until,
)


def still_serves(each: Connector) -> bool:
    ticket = each.submit(request("another"))
    is_ready = wait(ticket) == "ready"
    each.release(ticket)
    return is_ready


# --- processors


class Nonsense(FakeProcessor):
    """Does one thing wrong for the item "odd"."""

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        self.wrong = wrong

    def count_tokens(self, item: MediaItem) -> Any:
        return self.wrong.get("count", 4) if item.media == "odd" else 4

    def digest(self, item: MediaItem) -> Any:
        return self.wrong.get("digest", b"odd") if item.media == "odd" else super().digest(item)

    def prepare(self, item: MediaItem) -> Any:
        if item.media == "odd" and "prepared" in self.wrong:
            if isinstance(self.wrong["prepared"], type):
                raise self.wrong["prepared"]
            return self.wrong["prepared"]
        return super().prepare(item)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"count": "many"}, ("media", False)),
        ({"count": -1}, ("media", False)),
        ({"count": 2.0}, ("media", False)),
        ({"count": True}, ("media", False)),
        ({"digest": "text"}, ("media", False)),
        ({"digest": None}, ("media", False)),
        ({"prepared": None}, ("media", False)),
        ({"prepared": SystemExit}, ("media", True)),
        ({"prepared": PreparedItem("image", b"odd", {}, 5)}, ("mismatch", False)),
        ({"prepared": PreparedItem("image", b"?", {}, 4)}, ("media", True)),
    ],
    ids=str,
)
def test_a_processor_that_returns_nonsense_costs_one_request(
    wrong: dict[str, Any], kind: tuple[str, bool]
) -> None:
    with connector(processor=Nonsense(**wrong), cpu_workers=1) as each:
        assert kind_of(each.submit(request("odd"))) == kind
        assert still_serves(each), "by the only thread that there is"
        assert each.audit() == []


def test_an_item_has_tensors_alone() -> None:
    with pytest.raises(TypeError, match=r"inputs\.pixel_values: expected a tensor; got \["):
        PreparedItem("image", b"odd", {"pixel_values": [1, 2]}, 4)  # type: ignore[dict-item]


def test_an_encoder_whose_costs_are_no_numbers_costs_one_request() -> None:
    class Free(FakeEncoder):
        def predict_cost(self, item: PreparedItem) -> float:
            return float("nan") if item.metadata["media"] == "odd" else 1.0

    with connector([Free], cpu_workers=1) as each:
        assert kind_of(each.submit(request("odd"))) == ("encoder", False)
        assert still_serves(each)


def test_a_salt_that_no_hash_takes_is_refused_at_once() -> None:
    with connector() as each:
        with pytest.raises(InputError, match="salt"):
            request("a", salt="\ud800")
        with pytest.raises(InputError, match="salt"):
            request("a", salt=7)
        assert still_serves(each)


# --- readers


@pytest.mark.parametrize("device", ["no device", 7.5])
def test_a_reader_that_names_no_device_holds_nothing(device: Any) -> None:
    with connector() as each:
        ticket = ready(each, "a")
        with pytest.raises((InputError, RuntimeError, TypeError)):
            with each.read(ticket, device=device):
                pass
        each.release(ticket)
        assert_nothing_is_left(each)


def test_a_reader_whose_device_is_lost_holds_nothing() -> None:
    class LostDevice(Copies):
        is_lost = False

        def mark(self, device: torch.device) -> Any:
            if self.is_lost:
                raise RuntimeError("an illegal memory access was encountered")
            return super().mark(device)

    copies = LostDevice()
    with connector(copies=copies) as each:
        ticket = ready(each, "a")
        copies.is_lost = True
        with pytest.raises(RuntimeError, match="illegal"):
            with each.read(ticket):
                pass
        copies.is_lost = False
        each.release(ticket)
        assert_nothing_is_left(each)


def test_rows_for_the_host_are_there_when_they_are_merged() -> None:
    """A copy from a device to the host that nobody waits for would be read too early."""
    asked: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_to_copy" in str(func):
                asked.append(bool((kwargs or {}).get("non_blocking")))
            return func(*args, **(kwargs or {}))

    out = torch.zeros(3, 8)
    with Watch():
        merge_rows(
            [torch.ones(3, 8, dtype=torch.float64)],
            Places.of(np.zeros(3, np.int64), np.arange(3), np.arange(3)),
            out,
        )
    assert asked == [False] and bool((out == 1).all())


# --- time


def test_what_is_held_again_has_the_whole_timeout_again() -> None:
    bench = Bench.make(timeout_s=5.0)
    ticket = _ready(bench, "a", "b")
    bench.clock.now = 4.0
    bench.books.release(ticket, 0)
    bench.books.settle()
    bench.books.next_deadline()
    assert bench.books.hold(ticket, 0) == "deferred"
    bench.books.settle()
    assert bench.books.next_deadline() == 9.0
    bench.clock.now = 8.0
    bench.books.expire()
    assert ticket.state is State.NEW
    bench.clock.now = 9.0
    bench.books.expire()
    assert ticket.state is State.FAILED and ticket.error is not None and ticket.error.kind == "timeout"


def _ready(bench: Bench, *names: str) -> Any:
    machine = AnyHistory.of(bench)
    bench.start_worker("w1")
    ticket = bench.submit(request(*names), [MEDIA[name] for name in names])
    machine.tickets.append(ticket)
    machine.work("ready")
    bench.books.settle()
    assert ticket.state is State.READY
    return ticket


# --- the end


def test_a_worker_that_is_lost_while_the_connector_is_closed_is_not_started_again() -> None:
    stage, made = Stage(is_open=False), []

    def make() -> FakeEncoder:
        made.append(FakeEncoder(on_encode=stage))
        return made[-1]

    each = connector([make])
    each.submit(request("a"))
    stage.wait_for_batch()
    stage.faults["a"] = SystemExit
    closer = threading.Thread(target=each.close, daemon=True)
    closer.start()
    wait_until(lambda: each.workers()["worker 0"] == "draining")
    stage.open()
    closer.join(PATIENCE_S / 6)
    assert not closer.is_alive(), "it waits for a worker that nobody asked for"
    assert len(made) == 1
    assert_nothing_is_left(each)


def test_encoders_are_closed_when_another_cannot_be_made() -> None:
    closed: list[str] = []

    class Closes(FakeEncoder):
        def close(self) -> None:
            closed.append("first")

    with pytest.raises(RuntimeError, match="no device"):
        connector([Closes, mock.Mock(side_effect=RuntimeError("no device"))])
    assert closed == ["first"]


def test_threads_of_workers_that_were_given_up_are_forgotten_once_they_end() -> None:
    seen: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    with connector() as each:
        for _ in range(6):
            wait_until(lambda: each.workers()["worker 0"] == "running")
            seen.update(thread for thread in threading.enumerate() if thread.name == "connector-worker 0")
            wait_until(lambda: sum(thread.is_alive() for thread in seen) == 1)
            each.restart_worker("worker 0")
        gc.collect()
        assert len(seen) <= 2
