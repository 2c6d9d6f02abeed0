"""Who is woken, and how often: what nobody has to do costs nobody a look."""

from __future__ import annotations

import threading

import pytest

from fxsplit_encoder.connector.books import encoding
from fxsplit_encoder.connector.books.preparation import Digested
from fxsplit_encoder.connector.states import State
from tests.connector.books.test_any_history import Bench
from tests.connector.scenes import (
    SlowCopies,
    Stage,
    connector,
    ready,
    request,
    staged,
    wait,
    wait_until,
)


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
