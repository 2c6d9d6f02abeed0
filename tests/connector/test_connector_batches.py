"""Who is encoded with whom, when, and by which worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.connector.books import encoding
from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.encoding import Batch, Worker, WorkerStatus
from fxsplit_encoder.connector.books.tickets import Account
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError, InputError

from . import tiny_vision
from .books.test_any_history import PAGE, AnyHistory, Bench
from .scenes import (
    PATIENCE_S,
    SlowCopies,
    Stage,
    assert_nothing_is_left,
    connector,
    encode_behind,
    image,
    kind_of,
    names_of,
    ready,
    request,
    rows_in,
    rows_of,
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
        def own_stream(self, device: torch.device | str | None, priority: int = 0) -> Iterator[None]:
            inside.append((None if device is None else torch.device(device), priority))
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
    assert len(bench.books.encoding.take(first).entries) == 4
    assert bench.books.encoding.take(first) is None, "the other has nothing in hand"
    assert len(bench.books.encoding.take(second).entries) == 4
    assert (first.load, second.load) == (4.0, 4.0)


def test_a_worker_is_not_waited_for_if_it_takes_nothing_more() -> None:
    bench = Bench.make(2, host_bytes=1 << 20)
    bench.workers[1].status = WorkerStatus.DRAINING
    for number in range(3):
        _queue(bench, str(number), 1.0)
    assert len(bench.books.encoding.take(bench.workers[0]).entries) == 3
    assert bench.books.encoding.take(bench.workers[1]) is None


def test_a_worker_rests_until_it_was_busy_for_no_more_than_its_share() -> None:
    bench = Bench.make(max_busy_share=0.25, max_batch_items=1)
    take = lambda: bench.books.encoding.take(bench.workers[0])  # noqa: E731
    for name in "abc":
        _queue(bench, name)
    first, second = take(), take()  # both are in hand at once, and take 3 seconds together
    bench.clock.now = 2.0
    _end(bench, first)
    bench.clock.now = 3.0
    _end(bench, second)
    assert take() == pytest.approx(9.0)
    bench.clock.now = 11.9
    assert take() == pytest.approx(0.1)
    bench.clock.now = 12.1
    third = take()
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


@pytest.mark.parametrize("device_bytes", [0, 1 << 20])
def test_features_that_are_kept_wake_no_worker(monkeypatch: pytest.MonkeyPatch, device_bytes: int) -> None:
    conditions = Conditions(monkeypatch)
    with connector(2, device_bytes=device_bytes, host_bytes=4096) as each:
        for name in "abc":
            ticket = ready(each, name, retention="keep")
            each.release(ticket)
        conditions.wait_for("connector-worker 0", "connector-worker 1")
        for _ in range(50):
            each.step()
        assert conditions.notified == []


def test_cpu_workers_are_not_woken_for_what_they_may_not_do_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = Conditions(monkeypatch)
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
            bench.books.preparation.digested(*job, (job[1].media, 4, str(job[1].media.media).encode()))
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


# --- slices of a long video: images pass between them, an engine gets its share, and rows are the same


class Slicing(FakeEncoder):
    """Cuts what has a number of rows by rows, whose values do not depend on that."""

    def slices(self, item: PreparedItem, most_cost: float) -> list[PreparedItem]:
        most, first = int(most_cost), 0
        made = []
        while first < item.num_tokens:
            count = min(most, item.num_tokens - first)
            facts = {**item.metadata, "first": first}
            made.append(replace(item, num_tokens=count, metadata=facts))
            first += count
        return made

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        features = super().encode(items)
        firsts: list[Any] = [item.metadata.get("first", 0) for item in items]
        return [rows + first for rows, first in zip(features, firsts, strict=True)]


class Seen:
    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []

    def __call__(self, items: Sequence[PreparedItem]) -> None:
        tokens = [item.num_tokens for item in items]
        self.batches.append(list(zip(names_of(items), tokens, strict=True)))


@pytest.mark.parametrize("encoder", [FakeEncoder, Slicing])
def test_nothing_is_cut_unless_asked_for(encoder: Any) -> None:
    seen = Seen()
    settings = {} if encoder is Slicing else {"max_slice_cost": 4.0}
    with connector([lambda: encoder(on_encode=seen)], **settings) as each:
        ready(each, image("long", 10))
        assert seen.batches == [[("long", 10)]]


def test_items_that_are_not_cut_are_encoded_together() -> None:
    stage = Stage(is_open=False)
    with connector(
        [lambda: Slicing(on_encode=stage)], stage=stage, max_slice_cost=4.0, max_batch_items=3
    ) as each:
        items = [image("a", 2), image("long", 6), image("b", 3)]
        told = encode_behind(each, stage, *map(request, items))
        assert told == ["ready"] * 4
        assert stage.batches == [["first"], ["a", "b"], ["long"], ["long"]]
        for item in items:
            assert torch.equal(rows_in(each, ready(each, item)), rows_of(item))


def test_a_device_has_no_more_than_two_slices_and_images_pass_between_them() -> None:
    copies, seen = SlowCopies(), Seen()
    copies.marks_wait = True
    with connector([lambda: Slicing(on_encode=seen)], copies=copies, max_slice_cost=4.0) as each:
        video = each.submit(request(image("video", 20)))
        wait_until(lambda: len(copies.marks) == 2)
        assert len(seen.batches) == 2
        small = each.submit(request(image("image", 2)))
        large = each.submit(request(image("large", 6)))
        wait_until_queued(small, large)
        assert len(seen.batches) == 2
        copies.marks[0].come_to_pass()
        wait_until(lambda: len(copies.marks) == 4)  # the image's, and that of the third slice
        assert [batch[0] for batch in seen.batches[2:]] == [("image", 2), ("video", 4)]
        assert each.audit() == []
        copies.marks[2].come_to_pass()
        assert wait(small) == "ready", "while the video is encoded"
        assert video.availability == large.availability == "deferred"
        finisher = threading.Thread(target=_pass_all, args=(copies, each), daemon=True)
        finisher.start()
        assert (wait(video), wait(large)) == ("ready", "ready")
        copies.marks_wait = False
        assert torch.equal(rows_in(each, video), rows_of(image("video", 20)))
        for ticket in (video, small, large):
            each.release(ticket)
        finisher.join(PATIENCE_S)
        assert_nothing_is_left(each)


def _pass_all(copies: SlowCopies, each: Connector) -> None:
    def nothing_waits() -> bool:
        for mark in list(copies.marks):
            mark.come_to_pass()
        return each.stats().waiting_items == 0

    wait_until(nothing_waits)


def test_a_slice_that_fails_fails_its_item_alone() -> None:
    def fail(items: Sequence[PreparedItem]) -> None:
        if any(item.metadata.get("first") == 4 for item in items):
            raise ValueError("the second slice")

    with connector([lambda: Slicing(on_encode=fail)], max_slice_cost=4.0) as each:
        long, short = each.submit(request(image("long", 10))), each.submit(request(image("short", 3)))
        assert (kind_of(long), wait(short)) == (("encoder", False), "ready")
        each.release(short)
        assert each.stats().lost_workers == 0
        assert_nothing_is_left(each)


def test_a_device_that_is_lost_between_slices_is_no_items_fault() -> None:
    copies = SlowCopies()
    copies.marks_wait = True
    with connector([Slicing], copies=copies, max_slice_cost=4.0) as each:
        ticket = each.submit(request(image("long", 12)))
        wait_until(lambda: len(copies.marks) == 2)
        copies.marks_wait = False
        copies.marks[0].fail(RuntimeError("an illegal memory access was encountered"))
        assert wait(ticket) == "ready", "by another worker"
        assert each.stats().lost_workers == 1
        assert torch.equal(rows_in(each, ticket), rows_of(image("long", 12)))
        each.release(ticket)
        assert_nothing_is_left(each)


# --- shares


def test_a_worker_rests_after_every_slice_and_not_again_at_the_end() -> None:
    worker = Worker("w", frozenset(), Account("staging", 0))
    worker.finish(0.0, 1.0, 0.25, is_slice=True)
    assert worker.rests_until == 4.0
    worker.finish(4.0, 6.0, 0.25, is_slice=True)
    assert worker.rests_until == 12.0
    worker.finish(0.0, 13.0, 0.25)
    assert worker.rests_until == 16.0, "of the last slice alone"


def test_a_worker_that_rests_between_slices_ends_when_it_is_told_to() -> None:
    seen = Seen()
    with connector([lambda: Slicing(on_encode=seen)], max_slice_cost=4.0, max_busy_share=1e-9) as each:
        ticket = each.submit(request(image("long", 12)))
        wait_until(lambda: len(seen.batches) == 1)
        assert ticket.wait(0.05) == "deferred"
        assert len(seen.batches) == 1
    assert len(seen.batches) == 3, "what it has in hand it finishes, without a rest"


# --- a real tower


@pytest.fixture(scope="module")
def tiny() -> ManagerEncoder:
    return tiny_vision.encoder()


@pytest.mark.parametrize("normalize_later", [False, True])
@pytest.mark.parametrize("num_slices", [2, 3, 5, 99])
def test_a_video_is_cut_by_frames(tiny: ManagerEncoder, num_slices: int, normalize_later: bool) -> None:
    frames = [tiny_vision.crop(number).resize((64, 64)) for number in range(10)]
    processor = tiny_vision.processor(normalize_later=normalize_later)
    item = tiny.stage(processor.prepare(MediaItem("video", frames, {"do_sample_frames": False})))
    num_frames = int(item.inputs["video_grid_thw"][0, 0])
    assert num_frames == 5
    cut = tiny.slices(item, tiny.predict_cost(item) / num_slices * 1.001)
    counts = [int(each.inputs["video_grid_thw"][0, 0]) for each in cut]
    assert len(cut) == min(num_slices, num_frames) and max(counts) - min(counts) <= 1
    assert sum(each.num_tokens for each in cut) == item.num_tokens
    with torch.no_grad():
        (whole,) = tiny.encode([item])
        parts = [tiny.encode([each])[0] for each in cut]
    assert [len(rows) for rows in parts] == [each.num_tokens for each in cut]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)


def test_what_cannot_be_cut_is_not(tiny: ManagerEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    photograph = tiny_vision.processor().prepare(MediaItem("image", tiny_vision.crop(0)))
    assert tiny.slices(photograph, 1e-6) == [photograph]
    clip = tiny_vision.processor().prepare(MediaItem("video", tiny_vision.clip(3)))
    assert tiny.slices(clip, 1e6) == [clip], "it is short enough"
    more = replace(clip, inputs={**clip.inputs, "seconds": torch.ones(1)})
    assert tiny.slices(more, 1e-6) == [more], "who knows what the input says of the frames"
    monkeypatch.setattr(type(tiny.manager.tower), "frames_are_independent", False)
    assert tiny.slices(clip, 1e-6) == [clip]
