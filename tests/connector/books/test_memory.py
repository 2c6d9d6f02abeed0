"""Accounts of bytes, and batches that end."""

from __future__ import annotations

from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.encoding import Batch
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.connector.request import EncodeRequest
from fxsplit_encoder.connector.states import State

from ..scenes import image, request
from .test_any_history import MEDIA, AnyHistory, Bench


def test_books_that_were_tampered_with_do_not_add_up() -> None:
    bench = Bench.make()
    batch, storage = launched(bench, "a"), bench.books.holdings.storage
    (entry,) = storage.entries
    assert audit(bench.books) == []
    assert entry.feature is not None
    entry.inputs, inputs = entry.feature.memory, entry.inputs
    assert "host: 4096 bytes are held 2 times" in audit(bench.books)
    assert "inputs: 0 bytes are held, 100 reserved" in audit(bench.books)
    entry.inputs, storage.host.peak = inputs, 9 * PAGE
    assert audit(bench.books) == [f"host: {9 * PAGE} of {8 * PAGE} bytes were reserved"]
    storage.host.peak = PAGE
    del batch.worker.batches[batch]
    assert "1 features are encoded, batches have 0" in audit(bench.books)


PAGE = 4096


def launched(bench: Bench, name: str) -> Batch:
    """A batch of one image that is on the device."""
    machine = AnyHistory.of(bench)
    bench.submit(EncodeRequest("r", [MediaItem("image", name)]), [MEDIA[name]])
    machine.work("prepared")
    machine.take_batch(0)
    (batch,) = machine.encoding
    machine.encoded(0, [None], False)
    return batch


def test_what_is_held_again_waits_for_memory_unless_its_ticket_has_some() -> None:
    bench = Bench.make(2, host_bytes=2 * PAGE)
    books, machine = bench.books, AnyHistory.of(bench)
    tickets = []
    for names in ("a", "ab"):
        tickets.append(bench.submit(request(*map(image, names)), [4] * len(names)))
        machine.work("ready")
        books.release(tickets[-1], 0)
        books.settle()
    whole, part = tickets
    other = bench.submit(request(image("c")), [4])
    machine.work("ready")
    books.settle()
    assert (whole.state, part.state, other.state) == (State.RELEASED, State.READY, State.READY)
    assert (books.hold(whole), books.hold(part, 0)) == ("deferred", "unavailable")
    machine.work("ready")
    assert whole.state is State.NEW
    books.release(other)
    machine.work("ready")
    books.settle()
    assert (whole.state, audit(books)) == (State.READY, [])


def test_a_request_that_needs_more_memory_than_is_free_is_passed_a_bounded_number_of_times() -> None:
    bench = Bench.make(2, host_bytes=3 * PAGE, max_overtakes=1)
    books, machine = bench.books, AnyHistory.of(bench)
    tickets = []
    for names in ("ab", "cd", "e", "f"):
        tickets.append(bench.submit(request(*map(image, names)), [4] * len(names)))
        machine.work("ready")
        if names == "e":
            books.release(tickets[-1])
    assert [ticket.state for ticket in tickets] == [State.READY, State.NEW, State.RELEASED, State.NEW]
    books.release(tickets[0])
    machine.work("ready")
    assert State.NEW not in [ticket.state for ticket in tickets]


def ready(bench: Bench) -> list[str]:
    """The media of tickets that a step reports as ready."""
    step = bench.books.step()
    assert audit(bench.books) == []
    return [str(ticket.request.items[0].media) for ticket in step.ready]


def test_a_step_sees_a_finished_batch_before_its_thread_does() -> None:
    bench = Bench.make(host_bytes=1 << 20, device_bytes=1 << 20, staging_bytes=1 << 20)
    for name in "ab":
        batch = launched(bench, name)
        bench.clock.now += 1.0
        assert ready(bench) == []
        for event in batch.events:
            event.passed = True  # type: ignore[attr-defined]
        assert ready(bench) == [name]
        bench.books.encoding.publish(batch)  # as the thread does later
        assert (ready(bench), bench.workers[0].batches) == ([], {})
