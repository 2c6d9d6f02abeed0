"""When batches are published, from the ledger of items alone."""

from __future__ import annotations

from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.encoding import Batch
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.connector.request import EncodeRequest

from .stand_ins import Bench
from .test_any_history import MEDIA, AnyHistory


def launched(bench: Bench, name: str) -> Batch:
    """A batch of one image that is on the device."""
    machine = AnyHistory()
    machine.bench, machine.books = bench, bench.books
    machine.digesting, machine.preparing, machine.encoding = [], [], []
    machine.launched, machine.events = [], []
    bench.books.submit(EncodeRequest("r", [MediaItem("image", name)]), [MEDIA[name]], None)
    machine.take_cpu_job()
    machine.digested(0, False)
    bench.books.settle()
    machine.take_cpu_job()
    machine.prepared(0, "ok")
    bench.books.settle()
    machine.take_batch(0)
    (batch,) = machine.encoding
    machine.encoded(0, [None], False)
    return batch


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
        assert (ready(bench), bench.workers[0].num_batches) == ([], 0)
