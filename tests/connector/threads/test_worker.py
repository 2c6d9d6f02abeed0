"""A worker gives its device the next batch while it waits for the last."""

from __future__ import annotations

import threading

from fxsplit_encoder.connector.states import State
from fxsplit_encoder.connector.threads.worker import Landing
from tests.connector.scenes import PATIENCE_S, SlowCopies, Stage, connector, request, wait, wait_until


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


def test_a_fault_that_shows_while_a_batch_is_waited_for_loses_the_worker() -> None:
    copies = SlowCopies()
    copies.marks_wait = True
    with connector(copies=copies) as each:
        ticket = each.submit(request("a"))
        wait_until(lambda: len(copies.marks) == 1)
        copies.marks[0].fail(RuntimeError("an illegal memory access was encountered"))
        wait_until(lambda: len(copies.marks) == 2)
        assert each.stats().lost_workers == 1
        for mark in copies.marks:
            mark.come_to_pass()
        assert wait(ticket) == "ready"


def test_flights_land_in_order_and_a_fault_ends_them() -> None:
    landed: list[int] = []
    told = threading.Event()

    def land(flight: int) -> None:
        if flight == 3:
            raise SystemExit
        landed.append(flight)

    landing = Landing(land, told.set, "landing")
    assert landing.is_empty
    for flight in (1, 2, 3, 4):
        landing.add(flight)
    assert told.wait(PATIENCE_S)
    landing.finish()
    assert (landed, isinstance(landing.fault, SystemExit), landing.is_empty) == ([1, 2], True, False)
