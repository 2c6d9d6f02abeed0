"""Whatever happens to a connector, in any order: nothing is lost, nothing is freed twice, the books agree."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.books import Books
from fxsplit_encoder.connector.books.encoding import Batch, Worker, WorkerStatus
from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.preparation import Digested
from fxsplit_encoder.connector.books.tickets import Entry, Event, Feature, Occurrence, Ticket
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest, FailurePolicy
from fxsplit_encoder.connector.states import WAITING, Residence, State
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError

from ..scenes import image, request

ROW_BYTES = 1024
PAGE = 4096


@dataclass(eq=False)
class Rows:
    nbytes: int
    device: str = "gpu:0"


@dataclass(eq=False)
class ManualEvent(Event):
    """Passes when it is told to."""

    passed: bool = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        assert self.passed


PIXELS = torch.empty(100, dtype=torch.uint8)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """Books, and what their tests need to hand."""

    books: Books
    clock: Clock
    workers: list[Worker] = field(default_factory=list)

    @classmethod
    def make(cls, num_workers: int = 1, *, max_overtakes: int = 64, **settings: Any) -> Bench:
        clock = Clock()
        sizes = {"host_bytes": 8 * PAGE, "device_bytes": 0, "staging_bytes": 16 * PAGE, "timeout_s": None}
        config = ConnectorConfig(**{**sizes, **settings})
        row_bytes: Callable[[str], int | None] = {"image": ROW_BYTES, "video": ROW_BYTES}.get
        settled = threading.Condition()
        settled.acquire()  # this thread is the only one
        holdings = Holdings(config, row_bytes, settled, clock)
        bench = cls(Books(holdings, lambda digest, salt: digest + b"|" + salt.encode()), clock)
        bench.books.admission.max_overtakes = max_overtakes
        for number in range(num_workers):
            bench.start_worker(f"w{number}")
        return bench

    def submit(self, request: EncodeRequest, counts: Sequence[int]) -> Ticket:
        """A ticket whose media's headers were read."""
        ticket = self.books.submit(request)
        self.books.holdings.to_count.discard(ticket)
        self.books.preparation.counted(ticket, counts, None)
        return ticket

    def start_worker(self, name: str) -> Worker:
        worker = self.books.encoding.add_worker(name, frozenset({"image", "video"}))
        worker.status = WorkerStatus.RUNNING
        self.workers = [*(each for each in self.workers if each.name != name), worker]
        return worker


MEDIA = {"a": 4, "b": 3, "c": 8, "d": 16}  # tokens; of 1 KiB a row
policies = st.builds(
    FailurePolicy,
    then=st.sampled_from(["fail", "text_only"]),
    retries=st.integers(0, 2),
    reduce=st.sampled_from([None, "half_resolution"]),
)
faults = st.sampled_from([None, None, "encoder", "out_of_memory"])
indices = st.integers(0, 1 << 16)
REACHED = (
    *("hits", "joins", "misses", "evictions", "retries", "reductions"),
    *("text_only", "discarded"),
)


class AnyHistory(RuleBasedStateMachine):
    reached: ClassVar[Counter[str]] = Counter()
    """What happened in all histories, by the names of statistics."""

    @initialize(device_pages=st.sampled_from([0, 2, 6]), host_pages=st.sampled_from([4, 8, 12]))
    def open(self, device_pages: int, host_pages: int) -> None:
        bench = Bench.make(
            2,
            host_bytes=host_pages * PAGE,
            device_bytes=device_pages * PAGE,
            staging_bytes=6 * PAGE,
            input_bytes=250,
            max_waiting_items=12,
            max_overtakes=2,
            max_batch_items=3,
        )
        self.take_over(bench)

    @classmethod
    def of(cls, bench: Bench) -> AnyHistory:
        """Whatever a test does to its own books."""
        machine = cls()
        machine.take_over(bench)
        return machine

    def take_over(self, bench: Bench) -> None:
        self.bench, self.books = bench, bench.books
        self.tickets: list[Ticket] = []
        self.headers: dict[Ticket, tuple[list[int], ConnectorError | None, int | None]] = {}
        self.counting: list[Ticket] = []
        self.digesting: list[tuple[Ticket, Occurrence]] = []
        self.preparing: list[Entry] = []
        self.encoding: list[Batch] = []
        self.launched: list[Batch] = []
        self.reading: list[list[Feature]] = []
        self.events: list[ManualEvent] = []
        self.told: dict[int, State] = {}

    # --- requests

    @precondition(lambda self: len(self.books.holdings.tickets) < 8)
    @rule(
        names=st.lists(st.sampled_from("abcd"), max_size=3),
        policy=policies,
        keep=st.booleans(),
        salt=st.sampled_from(["", "tenant"]),
        timeout_s=st.sampled_from([None, 5.0]),
        broken=st.sampled_from([False, False, False, True]),
        until=st.sampled_from(["prepared", "taken", "taken", "ready"]),
        odd=st.sampled_from("-----c"),  # whose token count is another one than usual
    )
    def submit(
        self,
        names: list[str],
        policy: Any,
        keep: bool,
        salt: str,
        timeout_s: Any,
        broken: bool,
        until: str,
        odd: str,
    ) -> None:
        items = [MediaItem("image", name) for name in names]
        retention = "keep" if keep else "discard"
        request = EncodeRequest(
            f"r{len(self.tickets)}",
            items,
            None,
            policy,
            retention,
            timeout_s=timeout_s,
            salt=salt,
            tenant=names[0] if names else "",
        )
        counts = [MEDIA[name] - (name == odd) for name in names]
        distinct = sum(max(4, MEDIA[name]) for name in set(names))
        error, index = None, None
        if names and (broken or distinct * ROW_BYTES > self.books.holdings.config.host_bytes):
            error, index = ConnectorError("broken", "media", False), len(names) - 1
        try:
            self.tickets.append(self.books.submit(request))
        except ConnectorFullError:
            assert self.books.holdings.waiting.used + len(names) > 12
            return
        self.headers[self.tickets[-1]] = counts, error, index
        self.books.settle()
        self.work(until)  # so that histories are not all about beginnings

    @precondition(lambda self: self.tickets)
    @rule(which=indices, item=st.sampled_from([None, None, 0, 1]))
    def hold(self, which: int, item: int | None) -> None:
        ticket = self.pick(self.tickets, which)
        before = ticket.state
        if item is None or item < len(ticket.items):
            told = self.books.hold(ticket, item)
            assert (told == "unavailable") or ticket.state in (*WAITING, State.READY)
            assert before not in (State.FAILED, State.CANCELLED) or told == "unavailable"

    @precondition(lambda self: self.tickets)
    @rule(which=indices, item=st.sampled_from([None, None, 0, 1]), keep=st.booleans())
    def release(self, which: int, item: int | None, keep: bool) -> None:
        ticket = self.pick(self.tickets, which)
        if item is None or item < len(ticket.items):
            held = sum(each.num_holds for each in ticket.items)
            released = self.books.release(ticket, item, keep=keep)
            if ticket.is_text:
                assert released <= (held == 0)
            else:
                assert sum(each.num_holds for each in ticket.items) == held - released

    @precondition(lambda self: self.tickets)
    @rule(which=indices, item=st.sampled_from([None, 0, 1]))
    def cancel(self, which: int, item: int | None) -> None:
        ticket = self.pick(self.tickets, which)
        if item is None or item < len(ticket.items):
            self.books.cancel(ticket, item)
            assert not self.books.cancel(ticket, item)

    @precondition(lambda self: len(self.reading) < 3 and any(t.state is State.READY for t in self.tickets))
    @rule(which=indices)
    def begin_read(self, which: int) -> None:
        ticket = self.pick([ticket for ticket in self.tickets if ticket.state is State.READY], which)
        held = [each.index for each in ticket.items if each.state is State.READY]
        features = self.books.begin_read(ticket, held)
        for index, feature in features.items():
            assert feature.rows.nbytes == ticket.items[index].num_tokens * ROW_BYTES
        self.reading.append(list(features.values()))

    @precondition(lambda self: self.reading)
    @rule(which=indices, is_copied=st.booleans())
    def end_read(self, which: int, is_copied: bool) -> None:
        features = self.take(self.reading, which)
        assert all(feature.rows is not None for feature in features), "freed under a reader"
        self.books.end_read(features, self.new_event() if is_copied else None)

    # --- CPU workers

    @precondition(lambda self: self.books.preparation.num_jobs)
    @rule()
    def take_cpu_job(self) -> None:
        job = self.books.preparation.take()
        if isinstance(job, Ticket):
            self.counting.append(job)
        elif isinstance(job, tuple):
            self.digesting.append(job)
        elif job is not None:
            self.preparing.append(job)

    @precondition(lambda self: self.counting)
    @rule(which=indices)
    def counted(self, which: int) -> None:
        ticket = self.take(self.counting, which)
        self.books.preparation.counted(ticket, *self.headers[ticket])

    @precondition(lambda self: self.digesting)
    @rule(which=indices, fails=st.sampled_from([False, False, True]))
    def digested(self, which: int, fails: bool) -> None:
        job = self.take(self.digesting, which)
        self.books.preparation.digested(*job, self.digest(job[1]) if not fails else _error("media"))

    def digest(self, item: Occurrence) -> Digested | ConnectorError:
        name, tokens = str(item.media.media), item.num_tokens
        if not item.is_reducing:
            return item.media, tokens, name.encode()
        if tokens < 2:
            return _error("out_of_memory")
        return MediaItem("image", f"{name}-"), tokens // 2, f"{name}-".encode()

    @precondition(lambda self: self.preparing)
    @rule(which=indices, outcome=st.sampled_from(["ok", "ok", "ok", "broken", "again"]))
    def prepared(self, which: int, outcome: str) -> None:
        entry = self.take(self.preparing, which)
        result: Any = _error("media" if outcome == "broken" else "encoder")
        if outcome == "ok":
            item = PreparedItem("image", entry.digest, {"pixels": PIXELS}, entry.num_tokens)
            result = item, float(entry.num_tokens)
        self.books.preparation.prepared(entry, result)

    # --- workers

    @precondition(lambda self: self.books.holdings.to_encode)
    @rule(worker=st.integers(0, 1))
    def take_batch(self, worker: int) -> None:
        batch = self.books.encoding.take(self.bench.workers[worker])
        if isinstance(batch, Batch):
            assert 1 <= len(batch.entries) <= 3
            self.encoding.append(batch)

    @precondition(lambda self: self.encoding)
    @rule(which=indices, kinds=st.lists(faults, min_size=3, max_size=3), copy_fails=st.booleans())
    def encoded(self, which: int, kinds: Sequence[str | None], copy_fails: bool) -> None:
        batch = self.take(self.encoding, which)
        failures = {
            entry: _error(kind) for entry, kind in zip(batch.entries, kinds, strict=False) if kind is not None
        }
        outputs = {entry: Rows(entry.num_bytes) for entry in batch.entries if entry not in failures}
        placed = self.books.encoding.place(batch, outputs)
        batch.failures = failures
        batch.events = [self.new_event()] if placed else []
        for entry, feature in placed.items():
            if feature.residence is Residence.DEVICE:
                continue
            assert feature.memory is not None and feature.memory.num_bytes >= entry.num_bytes
            if copy_fails:
                failures[entry] = _error("encoder")
                continue
            feature.rows = Rows(entry.num_bytes, "host")
            batch.events.append(self.new_event())
        self.books.encoding.launched(batch)
        self.launched.append(batch)

    @precondition(lambda self: self.encoding)
    @rule(which=indices)
    def split(self, which: int) -> None:
        """A batch fails as a whole."""
        self.encoding += self.books.encoding.split(self.take(self.encoding, which), _error("encoder"))

    @precondition(lambda self: self.launched)
    @rule(which=indices)
    def publish(self, which: int) -> None:
        """Its thread has waited for all of it."""
        batch = self.take(self.launched, which)
        for event in batch.events:
            event.passed = True  # type: ignore[attr-defined]
        self.books.encoding.publish(batch)

    @precondition(lambda self: any(worker.batches for worker in self.bench.workers))
    @rule(worker=st.integers(0, 1), is_running=st.booleans())
    def lose_worker(self, worker: int, is_running: bool) -> None:
        """Its thread is given up while it goes on, or has ended; another takes its place."""
        gone = self.bench.workers[worker]
        self.books.encoding.lose_worker(gone, is_running=is_running)
        if not is_running:
            self.encoding = [each for each in self.encoding if each.worker is not gone]
            self.launched = [each for each in self.launched if each.worker is not gone]
        self.bench.start_worker(gone.name)

    # --- time

    @precondition(lambda self: self.events)
    @rule(which=indices)
    def pass_event(self, which: int) -> None:
        self.take(self.events, which).passed = True

    @precondition(lambda self: self.books.next_deadline() < math.inf)
    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.books.expire()

    @precondition(lambda self: self.books.holdings.news)
    @rule()
    def step(self) -> None:
        step = self.books.step()
        for ticket in step.ready + step.unavailable + step.released:
            self.told[ticket.number] = ticket.state
        assert all(ticket.state in WAITING for ticket in step.deferred)

    @precondition(lambda self: any(self.books.holdings.storage.resting))
    @rule()
    def clear_cache(self) -> None:
        self.books.clear_cache()

    # --- what holds

    @invariant()
    def the_books_are_in_order(self) -> None:
        if hasattr(self, "books"):
            self.books.settle()
            assert not (wrong := audit(self.books)), wrong

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        self.finish_everything()
        self.reached.update({name: getattr(self.books.holdings.stats, name) for name in REACHED})
        assert all(t.state in (State.RELEASED, State.FAILED, State.CANCELLED) for t in self.tickets)
        self.step()
        assert set(self.told) == {ticket.number for ticket in self.tickets}
        self.books.close()
        self.books.settle()
        assert not (wrong := audit(self.books)), wrong
        assert not any(self.books.snapshot().bytes_used.values())

    def finish_everything(self) -> None:
        """Without further faults, every ticket that is released when it is ready comes to its end."""
        for _ in range(200):
            for features in self.reading:
                self.books.end_read(features, None)
            self.reading.clear()
            self.work("ready")
            for event in self.events:
                event.passed = True
            for ticket in list(self.books.holdings.tickets.values()):
                if ticket.state is State.READY:
                    self.books.release(ticket)
            self.books.settle()
            assert not (wrong := audit(self.books)), wrong
            if not self.books.holdings.tickets and not any(worker.batches for worker in self.bench.workers):
                return
        raise AssertionError(f"stuck: {self.books.holdings.tickets}")

    @precondition(lambda self: self.books.holdings.waiting.used)
    @rule(
        until=st.sampled_from(["prepared", "taken", "ready"]), kinds=st.lists(faults, min_size=3, max_size=3)
    )
    def work(self, until: str, kinds: Sequence[str | None] = (None,) * 3) -> None:
        """What CPU workers and workers have before them."""
        for _ in range(6 if until != "submitted" else 0):
            self.take_cpu_job()
            while self.counting:
                self.counted(0)
            while self.digesting:
                self.digested(0, False)
            while self.preparing:
                self.prepared(0, "ok")
            self.books.settle()
        for worker in range(2 if until in ("taken", "ready") else 0):
            self.take_batch(worker)
        while until == "ready" and self.encoding:
            self.encoded(0, kinds, False)
        while until == "ready" and self.launched:
            self.publish(0)

    # --- helpers

    def new_event(self) -> ManualEvent:
        self.events.append(ManualEvent())
        return self.events[-1]

    @staticmethod
    def pick(things: list[Any], which: int) -> Any:
        return things[which % len(things)]

    @staticmethod
    def take(things: list[Any], which: int) -> Any:
        return things.pop(which % len(things))


def _error(kind: str) -> ConnectorError:
    return ConnectorError(kind, kind, retryable=kind != "media")


def test_equal_items_share_rows_also_where_their_key_has_rows_of_another_size() -> None:
    """Else a request could need more memory than was checked when it was submitted, and wait for good."""
    machine = AnyHistory()
    machine.open(device_pages=0, host_pages=4)
    policy = FailurePolicy()
    machine.submit(["c"], policy, True, "", None, False, "ready", odd="c")  # 7 tokens
    machine.submit(
        ["a", "c", "c"], policy, False, "", None, False, "submitted", odd="-"
    )  # 8 of the same name
    machine.finish_everything()
    stats = machine.books.holdings.stats
    assert (stats.misses, stats.joins) == (3, 1)


def test_memory_that_a_device_still_reads_is_waited_for_no_longer_than_it_reads() -> None:
    """Kept rows are evicted for a request also while a copy of them runs; its end lets the request in."""
    machine = AnyHistory()
    machine.open(device_pages=0, host_pages=4)
    machine.submit(["d"], FailurePolicy(), True, "", None, False, "ready", odd="-")  # all of the memory
    machine.begin_read(0)
    machine.end_read(0, is_copied=True)
    machine.books.release(machine.tickets[0])
    machine.submit(["a"], FailurePolicy(), False, "", None, False, "prepared", odd="-")
    assert machine.tickets[1].state is State.NEW
    for event in machine.events:
        event.passed = True
    machine.books.settle()
    machine.work("ready")
    assert machine.tickets[1].state is State.READY


def test_any_history() -> None:
    """Histories that reach what takes many steps, and all together every kind of event."""
    AnyHistory.reached.clear()
    long = settings(
        max_examples=250,
        stateful_step_count=150,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(AnyHistory, settings=long)
    assert all(AnyHistory.reached[name] for name in REACHED), AnyHistory.reached


# --- audits, memory in turn, and batches that end


def test_books_that_were_tampered_with_do_not_add_up() -> None:
    bench = Bench.make()
    batch, storage = launched(bench, "a"), bench.books.holdings.storage
    (entry,) = storage.entries.values()
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
