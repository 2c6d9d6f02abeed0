"""Who is encoded with whom, when, and by which worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxsplit_encoder.connector.books import encoding
from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.encoding import Batch, WorkerStatus
from fxsplit_encoder.connector.books.preparation import Digested
from fxsplit_encoder.connector.fake import FakeEncoder
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError, InputError

from .books.test_any_history import PAGE, AnyHistory, Bench
from .scenes import (
    SlowCopies,
    Stage,
    connector,
    encode_behind,
    image,
    kind_of,
    ready,
    request,
    staged,
    wait,
    wait_until,
    wait_until_queued,
)


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu"])
def test_a_worker_has_a_stream_of_its_own(device: object) -> None:
    """Which stream that is, `tests/gpu` shows."""
    inside: list[tuple[torch.device | None, int]] = []
    seen: list[list[tuple[torch.device | None, int]]] = []

    class OwnStreams(Copies):
        @contextlib.contextmanager
        def own_stream(self, device: torch.device | None, priority: int = 0) -> Iterator[None]:
            inside.append((device, priority))
            yield
            inside.pop()

    encoder: Any = FakeEncoder(on_encode=lambda items: seen.append(list(inside)))
    encoder.device = device
    with connector([lambda: encoder], copies=OwnStreams()) as each:
        ready(each, "a")
    encoder.stream_priority = -2
    with connector([lambda: encoder], copies=OwnStreams()) as each:
        ready(each, "b")
    assert (seen, inside) == ([[(torch.device("cpu"), 0)], [(torch.device("cpu"), -2)]], [])


def test_a_batch_that_is_not_full_waits_as_long_as_it_is_told_to() -> None:
    bench = Bench.make(flush_delay_s=0.005, max_batch_items=2)
    take = lambda: bench.books.encoding.take(bench.workers[0])  # noqa: E731
    _queue(bench, "a")
    assert take() == 0.005
    bench.clock.now = 0.002
    assert take() == pytest.approx(0.003)
    for name in "bc":
        _queue(bench, name)
    assert len(_batch(take()).entries) == 2, "it is full"
    bench.clock.now = 0.008
    assert len(_batch(take()).entries) == 1, "its time has come"


def test_a_long_video_lets_images_that_come_later_pass_but_not_all_of_them() -> None:
    with staged(max_batch_items=1, cpu_workers=1) as (each, stage):
        images = request(*(f"image {number}" for number in range(16)))
        encode_behind(each, stage, request(MediaItem("video", "video", {"tokens": 40})), images)
        order = [names[0] for names in stage.batches]
        assert order.index("video") == 10, "after as many tokens of the other request as it has itself"


def test_images_do_not_wait_for_a_video_that_came_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCHES_IN_FLIGHT", 1)
    with staged(cpu_workers=1) as (each, stage):
        items = [image("video", 100), *(image(name, 4) for name in "abc"), image("large", 20)]
        encode_behind(each, stage, *map(request, items))
        assert stage.batches[1:] == [["a", "b", "c", "large"], ["video"]]


def test_workers_take_shares_of_equal_cost_and_the_least_loaded_goes_first() -> None:
    bench = Bench.make(2, host_bytes=1 << 20)
    for number in range(8):
        _queue(bench, str(number), 1.0)
    first, second = bench.workers
    assert len(_batch(bench.books.encoding.take(first)).entries) == 4
    assert bench.books.encoding.take(first) is None, "the other has nothing in hand"
    assert len(_batch(bench.books.encoding.take(second)).entries) == 4
    assert (first.load, second.load) == (4.0, 4.0)


def test_a_worker_is_not_waited_for_if_it_takes_nothing_more() -> None:
    bench = Bench.make(2, host_bytes=1 << 20)
    bench.workers[1].status = WorkerStatus.DRAINING
    for number in range(3):
        _queue(bench, str(number), 1.0)
    assert len(_batch(bench.books.encoding.take(bench.workers[0])).entries) == 3
    assert bench.books.encoding.take(bench.workers[1]) is None


def test_a_worker_rests_until_it_was_busy_for_no_more_than_its_share() -> None:
    bench = Bench.make(max_busy_share=0.25, max_batch_items=1)
    take = lambda: bench.books.encoding.take(bench.workers[0])  # noqa: E731
    for name in "abc":
        _queue(bench, name)
    first, second = _batch(take()), _batch(take())  # both are in hand at once, and take 3 seconds together
    bench.clock.now = 2.0
    _end(bench, first)
    bench.clock.now = 3.0
    _end(bench, second)
    assert take() == pytest.approx(9.0)
    bench.clock.now = 11.9
    assert take() == pytest.approx(0.1)
    bench.clock.now = 12.1
    third = _batch(take())
    bench.clock.now = 13.1
    _end(bench, third)
    _queue(bench, "d")
    assert take() == pytest.approx(3.0)


class Staging(FakeEncoder):
    def stage(self, item: PreparedItem) -> PreparedItem:
        if item.metadata["media"] == "bad":
            raise ValueError("no room to stage it")
        return replace(item, inputs={"staged": item.inputs["pixel_values"] + 1})


def test_cpu_workers_stage_items_for_their_encoder() -> None:
    seen: list[PreparedItem] = []
    with connector([lambda: Staging(on_encode=seen.extend)]) as each:
        tickets = [each.submit(request(name)) for name in ("a", "bad")]
        assert (wait(tickets[0]), kind_of(tickets[1])) == ("ready", ("encoder", False))
        plain = each.processor.prepare(image("a"))
        assert [[*item.inputs] for item in seen] == [["staged"]]
        assert torch.equal(seen[0].inputs["staged"], plain.inputs["pixel_values"] + 1)
        assert "no room to stage it" in str(tickets[1].error)


def test_workers_get_what_they_encode() -> None:
    images, sounds = Stage(), Stage()
    encoders = [
        lambda: FakeEncoder(on_encode=images, modalities=["image"]),
        lambda: FakeEncoder(on_encode=sounds, modalities=["audio"]),
    ]
    with connector(encoders) as each:
        ready(each, image("a"), MediaItem("audio", "s"), image("b"))
        assert sorted(images.encoded) == ["a", "b"]
        assert sounds.batches == [["s"]]


def test_encoders_have_to_agree_on_the_size_of_rows() -> None:
    with pytest.raises(InputError, match=r"rows of one size for every image; got \[16, 32\] bytes"):
        connector([lambda: FakeEncoder(4), lambda: FakeEncoder(8)])
    with pytest.raises(InputError, match="encoders: expected at least one; got none"):
        connector([])


def test_encoders_start_and_encode_on_one_thread_each() -> None:
    threads: dict[int, set[str]] = {}

    class Watched(FakeEncoder):
        def start(self) -> None:
            threads.setdefault(id(self), set()).add(threading.current_thread().name)

        def encode(self, items: Sequence[PreparedItem]) -> list:
            threads[id(self)].add(threading.current_thread().name)
            return super().encode(items)

        def close(self) -> None:
            threads[id(self)].add(threading.current_thread().name)

    with connector([Watched, Watched]) as each:
        for number in range(20):
            ready(each, f"image {number}")
    assert sorted(threads.values(), key=str) == [{"connector-worker 0"}, {"connector-worker 1"}]


def _queue(bench: Bench, name: str, cost: float = 1.0) -> None:
    """An image that is preprocessed."""
    bench.submit(request(image(name)), [4])
    machine = AnyHistory.of(bench)
    machine.take_cpu_job()
    machine.digested(0, False)
    bench.books.settle()
    entry = bench.books.preparation.take()
    bench.books.preparation.prepared(entry, (PreparedItem("image", entry.digest, {}, 4), cost))
    bench.books.settle()


def _end(bench: Bench, batch: Batch) -> None:
    batch.failures = {each: ConnectorError("for the test", "encoder", False) for each in batch.entries}
    bench.books.encoding.publish(batch)


def _batch(taken: Batch | float | None) -> Batch:
    assert isinstance(taken, Batch)
    return taken


# --- tenants


def test_a_tenant_with_much_to_do_holds_up_no_other() -> None:
    with staged(max_batch_items=1, max_waiting_items=7, cpu_workers=1) as (each, stage):
        first = each.submit(request("first", tenant="many"))
        stage.wait_for_batch()
        many = [each.submit(request(f"m{number}", tenant="many")) for number in range(6)]
        with pytest.raises(ConnectorFullError):
            each.submit(request("one more", tenant="many"))
        few = [each.submit(request(f"f{number}", tenant="few")) for number in range(2)]
        wait_until_queued(*many, *few)
        stage.open()
        assert {wait(ticket) for ticket in (first, *many, *few)} == {"ready"}
        order = stage.encoded
        assert max(order.index("f0"), order.index("f1")) <= 5
        assert each.audit() == []


def test_tenants_get_memory_in_turn() -> None:
    bench = Bench.make(2, host_bytes=2 * PAGE)
    machine = AnyHistory.of(bench)
    for number in range(30):
        bench.submit(request(image(f"m{number}"), image(f"n{number}"), tenant="many"), [4, 4])
    bench.submit(request(image("a"), image("b"), tenant="few"), [4, 4])
    order = []
    while len(order) < 3:
        machine.work("ready")
        for ticket in bench.books.step().ready:
            order.append(ticket.request.tenant)
            bench.books.release(ticket)
        bench.books.settle()
    assert "few" in order
    assert audit(bench.books) == []


# --- who is woken, and how often: what nobody has to do costs nobody a look


class Conditions:
    """Who waits on which condition, and who was notified; of all that are made from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: dict[str, threading.Condition] = {}
        self.notified: list[str] = []
        outer, plain = self, threading.Condition

        class Watched(plain):  # type: ignore[misc,valid-type]
            def wait(self, timeout: float | None = None) -> bool:
                name = threading.current_thread().name
                outer.waiting[name] = self
                try:
                    return super().wait(timeout)
                finally:
                    del outer.waiting[name]

            def notify(self, n: int = 1) -> None:
                outer.notified += [name for name, each in [*outer.waiting.items()] if each is self]
                super().notify(n)

        monkeypatch.setattr(threading, "Condition", Watched)

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: set(names) <= self.waiting.keys())
        self.notified.clear()


@pytest.fixture
def conditions(monkeypatch: pytest.MonkeyPatch) -> Conditions:
    return Conditions(monkeypatch)


@pytest.mark.parametrize("device_bytes", [0, 1 << 20])
def test_features_that_are_kept_wake_no_worker(conditions: Conditions, device_bytes: int) -> None:
    with connector(2, device_bytes=device_bytes, host_bytes=4096) as each:
        for name in "abc":
            ticket = ready(each, name, retention="keep")
            each.release(ticket)
        conditions.wait_for("connector-worker 0", "connector-worker 1")
        for _ in range(50):
            each.step()
        assert conditions.notified == []


def test_cpu_workers_are_not_woken_for_what_they_may_not_do_yet(
    conditions: Conditions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "BATCHES_IN_FLIGHT", 1)
    with staged(input_bytes=1, max_batch_items=1) as (each, stage):
        tickets = [each.submit(request(name)) for name in "abcdef"]
        stage.wait_for_batch()
        conditions.wait_for("connector-cpu-0", "connector-cpu-1")
        for _ in range(50):
            each.step()
        assert not any("cpu" in name for name in conditions.notified)
        stage.open()
        assert {wait(ticket) for ticket in tickets} == {"ready"}


def test_items_are_preprocessed_though_others_are_to_be_hashed() -> None:
    """However fast requests come, those that came before are ready some time."""
    bench = Bench.make(host_bytes=1 << 20)
    kinds = []
    for number in range(12):
        bench.submit(request(f"image {number}"), [4])
        job = bench.books.preparation.take()
        kinds.append(isinstance(job, tuple))
        if isinstance(job, tuple):
            bench.books.preparation.digested(
                *job, Digested(job[1].media, 4, str(job[1].media.media).encode())
            )
        bench.books.settle()
    assert kinds == [True, False] * 6


def test_a_batch_that_comes_while_another_is_computed_is_given_to_the_device_at_once() -> None:
    copies, stage = SlowCopies(), Stage()
    copies.marks_wait = True
    with connector(stage=stage, copies=copies) as each:
        first = each.submit(request("a"))
        wait_until(lambda: len(copies.marks) == 1)
        second = each.submit(request("b"))
        stage.wait_for_batch(), stage.wait_for_batch()
        wait_until(lambda: len(copies.marks) == 2)
        assert (first.state, second.state) == (State.ENCODING, State.ENCODING)
        third = each.submit(request("c"))
        for mark in copies.marks:
            mark.come_to_pass()
        assert (wait(first), wait(second)) == ("ready", "ready")
        wait_until(lambda: len(copies.marks) == 3)
        copies.marks[2].come_to_pass()
        assert wait(third) == "ready"
