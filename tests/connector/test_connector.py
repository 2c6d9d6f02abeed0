"""The life of a request through the whole connector, with an encoder that is a stand-in."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from request_scheduler import RequestScheduler
from torch import nn

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder, FakeProcessor
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.keys import TowerIdentity
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.connector.request import TEXT_ONLY, EncodeRequest
from fxsplit_encoder.connector.states import WAITING, State
from fxsplit_encoder.connector.statistics import BOUNDS, Durations
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError, InputError

from .scenes import (
    PATIENCE_S,
    Stage,
    assert_nothing_is_left,
    connector,
    image,
    kind_of,
    prompt,
    ready,
    request,
    rows_of,
    staged,
    wait,
)


def test_a_step_tells_each_change_once() -> None:
    with staged() as (each, stage):
        good, bad = each.submit(request("a")), each.submit(EncodeRequest("r", [image("b", 3)]))
        gone = each.submit(request("c"))
        each.cancel(gone)
        step = each.step()
        assert (step.ready, set(step.deferred), step.unavailable) == ((), {good, bad}, (gone,))
        assert each.step().unavailable == ()
        stage.faults["b"] = lambda: ValueError("bad pixels")
        stage.open()
        assert (wait(good), wait(bad)) == ("ready", "unavailable")
        step = each.step()
        assert (step.ready, step.deferred, step.unavailable) == ((good,), (), (bad,))
        assert each.step() == ((), (), (), (), ())
        assert not each.has_pending_work()
        each.release(good)
        assert each.step().released == (good,)


def test_a_chunk_of_text_alone_has_the_levels_of_its_request() -> None:
    class WithLevels(FakeProcessor):
        def prepare(self, item: MediaItem) -> PreparedItem:
            made = super().prepare(item)
            return replace(made, metadata={**made.metadata, "deepstack_levels": 1})

    with connector(processor=WithLevels()) as each:
        ticket = ready(each, "a", placeholders=prompt(1, 2, 9, 3))
        width = rows_of(image("a")).shape[1] // 2
        for chunk, rows in (((0, 2), 0), ((2, 7), 4)):
            merged = each.merge(ticket, chunk, torch.zeros(chunk[1] - chunk[0], width))
            assert merged.levels.shape == (1, rows, width)


def test_a_merge_that_cannot_be_writes_nothing() -> None:
    placeholders = prompt(9, 1)
    with staged() as (each, stage):
        ticket = each.submit(request("a", placeholders=placeholders))
        out = torch.zeros(5, 8)
        with pytest.raises(InputError, match="expected it to be ready; it is"):
            each.merge(ticket, (0, 5), out)
        stage.open()
        wait(ticket)
        with pytest.raises(InputError, match="within 0 to 5; got 0 to 6"):
            each.merge(ticket, (0, 6), torch.zeros(6, 8))
        with pytest.raises(InputError, match=r"embeddings: expected \(5, width\); got \(4, 8\)"):
            each.merge(ticket, (0, 5), out[:4])
        other = each.submit(request("a", "b", placeholders=placeholders, failure=TEXT_ONLY))
        assert (other.token_counts, kind_of(other), each.audit()) == ((4, 4), ("mismatch", False), [])
        assert "expected 1 of at least 0, one for each item" in str(other.error)
        with pytest.raises(InputError, match="placeholders: expected 0 image tokens"):
            each.submit(request(placeholders=PositionMap([9], [], {"image": 9})))
        two = ready(each, "a", "b", placeholders=prompt(9, 9))
        one = ready(each, "a", placeholders=placeholders)
        plain = ready(each, "a")
        with pytest.raises(InputError, match="expected placeholders; got none"):
            each.merge(plain, (0, 5), out)
        each.release(ticket)
        with pytest.raises(InputError, match="it is released"):
            each.merge(ticket, (0, 5), out)
        with pytest.raises(InputError, match=r"expected rows of \(4 or more, 5\)"):
            each.merge(one, (0, 5), out[:, :5])
        assert out.count_nonzero() == 0
        with each.read(two) as rows, pytest.raises(InputError, match="item: expected an index below 2"):
            assert torch.equal(rows[0].rows, rows_of(image("a")))
            each.hold(two, 2)


def test_an_item_released_before_the_others_can_be_merged_no_more() -> None:
    with connector() as each:
        ticket = ready(each, "a", "b", placeholders=prompt(9, 9))
        each.release(ticket, 0)
        assert ticket.state is State.READY
        each.merge(ticket, (4, 8), torch.zeros(4, 8))
        with pytest.raises(InputError, match="item 0 of request r: expected it to be ready; it is released"):
            each.merge(ticket, (0, 8), torch.zeros(8, 8))


def test_features_are_shared_within_a_salt_only() -> None:
    with connector() as each:
        ready(each, "a", retention="keep")
        same, other = each.submit(request("a")), each.submit(request("a", salt="tenant"))
        wait(same), wait(other)
        stats = each.stats()
        assert (stats.hits, stats.misses, stats.hit_rate) == (1, 2, 1 / 3)


def test_after_other_weights_nothing_old_is_found() -> None:
    with connector() as each:
        first = ready(each, "a", retention="keep")
        each.change_identity(TowerIdentity(b"other weights", "", ""))
        second = ready(each, "a", retention="keep")
        each.release(first), each.release(second)
        ready(each, "a")
        assert (each.stats().hits, each.stats().misses) == (1, 2)


def test_a_request_beyond_the_bound_is_refused_and_costs_nothing() -> None:
    with staged(max_waiting_items=2) as (each, stage):
        tickets = [each.submit(request("a")), each.submit(request("b"))]
        with pytest.raises(ConnectorFullError, match="2 items wait, and max_waiting_items is 2") as refused:
            each.submit(request("c"))
        assert (refused.value.kind, refused.value.retryable) == ("full", True)
        assert each.submit(request()).availability == "ready", "text needs no room"
        with pytest.raises(ConnectorError, match="it has 3 items, and max_waiting_items is 2"):
            each.submit(request("c", "d", "e"))
        stage.open()
        assert [wait(ticket) for ticket in tickets] == ["ready", "ready"]
        ready(each, "c")
        assert each.stats().refused == 1


def test_what_cannot_ever_fit_fails_by_itself() -> None:
    with connector(staging_bytes=320, host_bytes=8192) as each:
        large = each.submit(request(image("a", 11)))
        assert kind_of(large) == ("too_large", False)
        many = each.submit(request("a", "b", "c"))
        assert wait(many) == "unavailable"
        assert str(many.error) == (
            "item 0 of request r (image, 4 tokens): its request takes 12288 bytes, and host_bytes is 8192"
        )
        repeated = image("a")
        ready(each, repeated, repeated, repeated)


def test_closing_twice_cancels_once() -> None:
    stage = Stage(is_open=False)
    each = connector(stage=stage)
    waiting = each.submit(request("a"))
    stage.wait_for_batch()
    stage.open()
    each.close()
    each.close()
    assert waiting.state in (State.CANCELLED, State.READY, State.RELEASED)
    assert each.hold(waiting) == "unavailable"
    assert each.release(waiting) == 0
    assert not each.cancel(waiting)
    with pytest.raises(ConnectorError, match="the connector is closed"):
        each.submit(request("a"))
    with pytest.raises(InputError, match="closed"):
        each.restart_worker("worker 0")
    assert each.audit() == []
    assert not any(each.stats().bytes_used.values())


# --- statistics, and the scheduler in examples/ from an arrival to the end of a prefill


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_durations_are_counted_up_to_the_next_bound(seconds: list[float]) -> None:
    durations = Durations()
    for each in seconds:
        durations.add(each)
    for number, bound in enumerate(BOUNDS):
        assert sum(durations.counts[: number + 1]) == sum(each <= bound for each in seconds)
    assert durations.count == len(seconds) and durations.mean == pytest.approx(sum(seconds) / len(seconds))


def test_what_requests_came_to_is_counted() -> None:
    stage = Stage(faults={"broken": lambda: ValueError("bad pixels")})
    with connector(stage=stage, max_batch_items=4) as each:
        tickets = [
            each.submit(request("a")),
            each.submit(request("a", "b")),
            each.submit(request("broken")),
            each.submit(request("broken", failure=TEXT_ONLY)),
        ]
        for ticket in tickets:
            wait(ticket)
            each.release(ticket)
        stats = each.stats()
    assert (stats.submitted, stats.items, stats.text_only) == (4, 5, 1)
    assert stats.outcomes == {"released": 3, "failed": 1}
    assert stats.failures == {"encoder": 2}
    assert stats.hits + stats.joins == 2 and stats.misses == 3
    assert stats.ready.count == 3
    assert 0 < stats.batch_fill <= 1
    assert set(stats.bytes_peak) >= {"host", "inputs", "staging worker 0"}


def test_a_request_from_its_arrival_to_the_end_of_its_prefill() -> None:
    table = nn.Embedding(10, 8)
    items = [image("a", 3), image("b", 2)]
    with connector() as each:
        scheduler = RequestScheduler(each, table)
        ticket = scheduler.submit(EncodeRequest("r1", items, prompt(1, 9, 2, 9, 3)))
        assert ticket.token_counts == (3, 2)
        wait(ticket)
        assert scheduler.poll() == (["r1"], {})
        text, rows = table(torch.tensor([1, 2, 3])).detach(), [rows_of(item) for item in items]
        expected = torch.cat([text[:1], rows[0], text[1:2], rows[1], text[2:]])
        assert torch.equal(scheduler.embeddings("r1", "cpu"), expected)
        scheduler.prefilled("r1", keep=True)
        assert each.stats().outcomes == {"released": 1}
        wait(scheduler.submit(EncodeRequest("r2", items, prompt(9, 9))))
        assert each.stats().hits == 2


def test_a_request_that_fails_is_reported_with_its_reason() -> None:
    with connector(stage=Stage(faults={"bad": lambda: ValueError("bad pixels")})) as each:
        scheduler = RequestScheduler(each, nn.Embedding(10, 8))
        ticket = scheduler.submit(EncodeRequest("r", [image("bad")], prompt(9)))
        wait(ticket)
        ready, failed = scheduler.poll()
        assert ready == [] and failed == {"r": ticket.error} and ticket.error is not None


# --- many threads at once: nothing is lost, nothing hangs, nothing is left


def test_thousands_of_submissions_at_once() -> None:
    with connector(2, max_waiting_items=20_000, device_bytes=0, host_bytes=97 * 4096) as each:

        def submit(start: int) -> set[str]:
            tickets = [each.submit(request(f"image {number % 97}")) for number in range(start, start + 500)]
            told = set()
            for ticket in tickets:
                told.add(wait(ticket))
                each.release(ticket)
            return told

        with ThreadPoolExecutor(8) as threads:
            assert set().union(*threads.map(submit, range(0, 4000, 500))) == {"ready"}
        stats = each.stats()
        assert (stats.submitted, stats.outcomes[State.RELEASED]) == (4000, 4000)
        assert_nothing_is_left(each)


def test_a_thousand_cancellations_race_with_encoding() -> None:
    with connector(2, cpu_workers=2) as each:
        start = threading.Barrier(2)

        def cancel(tickets: list) -> None:
            start.wait(PATIENCE_S)
            for ticket in tickets:
                each.cancel(ticket)

        for number in range(50):
            tickets = [each.submit(request(f"image {number} {k % 15}")) for k in range(20)]
            canceller = threading.Thread(target=cancel, args=(tickets,))
            canceller.start()
            start.wait(PATIENCE_S)
            for ticket in tickets:
                wait(ticket)
            canceller.join()
            assert all(ticket.state is State.CANCELLED for ticket in tickets)
        assert each.stats().outcomes == {State.CANCELLED: 1000}
    assert_nothing_is_left(each)


def test_tickets_can_be_awaited_and_awaiting_be_given_up() -> None:
    stage = Stage(is_open=False)

    async def scene(each: Connector) -> None:
        ticket, other = each.submit(request("a")), each.submit(request("b"))
        tasks = [asyncio.ensure_future(_of(ticket)) for _ in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_of(ticket), 0.01)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert ticket.state in WAITING, "who gives up waiting does not give up the ticket"
        stage.open()
        assert await tasks[1] == await tasks[2] == await ticket == "ready"
        assert tasks[0].cancelled()
        assert await other == "ready"
        each.release(ticket)
        assert await ticket == "unavailable"

    with connector(stage=stage) as each:
        asyncio.run(scene(each))


def test_a_loop_that_was_closed_meanwhile_is_no_trouble() -> None:
    with staged() as (each, stage):
        ticket = each.submit(request("a"))
        loop = asyncio.new_event_loop()
        task = loop.create_task(_of(ticket))
        loop.run_until_complete(asyncio.sleep(0))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        stage.open()
        assert wait(ticket) == "ready"


async def _of(ticket) -> str:
    return await ticket


def test_closing_races_with_everything() -> None:
    for _ in range(20):
        each = connector([lambda: FakeEncoder()] * 2, cpu_workers=2)
        tickets = [each.submit(request(f"image {number % 7}")) for number in range(40)]
        closers = [threading.Thread(target=each.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(PATIENCE_S)
        assert all(ticket.is_settled for ticket in tickets)
        assert_nothing_is_left(each)
