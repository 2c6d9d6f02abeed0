"""Many threads at once: nothing is lost, nothing hangs, nothing is left."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder
from fxsplit_encoder.connector.states import WAITING, State

from .scenes import PATIENCE_S, Stage, assert_nothing_is_left, connector, request, staged, wait


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
