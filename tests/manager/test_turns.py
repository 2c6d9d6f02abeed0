"""Turns: one at a time, requests first, and steps go on under any load."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fxsplit_encoder.manager import lifecycle as module
from fxsplit_encoder.manager.lifecycle import serving_scope
from fxsplit_encoder.manager.turns import StoppedError, Turns
from fxsplit_encoder.runtime.captured_program import Choosers

from ..waiting import wait_until


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(5) as pool:
        yield pool


def test_one_at_a_time_whoever_it_is(threads: ThreadPoolExecutor) -> None:
    turns, inside, most = Turns(requests=3, seconds=0.01, quiet=0.0), [0], [0]

    def enter() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0)
        inside[0] -= 1

    def serve() -> None:
        for _ in range(300):
            with turns, turns:  # whoever has it may enter again
                enter()

    def work() -> None:
        for _ in range(20):
            with turns.step(), turns:
                enter()

    for each in [threads.submit(function) for function in (serve, serve, serve, work, work)]:
        each.result(60)
    assert most == [1]


def test_a_step_is_due_after_so_many_requests_under_a_load_without_pauses(
    threads: ThreadPoolExecutor,
) -> None:
    turns = Turns(requests=10, seconds=1e9, quiet=1e9)
    stop, served, at_step = threading.Event(), [0], []

    def serve() -> None:
        while not stop.is_set():
            with turns:
                served[0] += 1

    for _ in range(3):
        threads.submit(serve)
    for _ in range(3):
        with turns.step():
            at_step.append(served[0])
    stop.set()
    assert at_step[0] >= 10 and all(b - a >= 10 for a, b in itertools.pairwise(at_step))


def test_a_step_is_due_after_a_time_and_at_once_where_nobody_asks() -> None:
    with Turns(requests=10**9, seconds=0.01, quiet=1e9).step():
        pass
    with Turns(requests=10**9, seconds=1e9, quiet=0.0).step():
        pass
    with Turns(requests=10**9, seconds=1e9, quiet=1e9).step(at_once=True):
        pass


def test_requests_that_wait_go_before_a_step(threads: ThreadPoolExecutor) -> None:
    turns, order = Turns(requests=100, seconds=1e9, quiet=0.0), []

    def enter(context: Any, name: str) -> None:
        with context:
            order.append(name)

    with turns:
        waiting = [threads.submit(enter, turns, "request") for _ in range(2)]
        wait_until(lambda: turns.num_waiting == 2)
        waiting.append(threads.submit(enter, turns.step(), "step"))
        time.sleep(0.02)
    for each in waiting:
        each.result(60)
    assert order == ["request", "request", "step"]


def test_a_step_that_nobody_wants_is_not_begun_and_one_that_raises_gives_the_turn_back() -> None:
    turns = Turns(quiet=0.0)
    with pytest.raises(StoppedError), turns.step(lambda: True):
        raise AssertionError("begun")
    with pytest.raises(ValueError), turns.step():
        raise ValueError
    with turns, turns:  # neither holds up anybody
        pass


def lent(
    threads: ThreadPoolExecutor, turns: Turns, work: Any, is_stopped: Any = lambda: False
) -> Future[Any]:
    """What a thread lends, once it does."""
    future = threads.submit(turns.lend, work, is_stopped)
    wait_until(lambda: turns.lent is not None)
    return future


def test_lent_work_is_done_by_the_thread_of_a_request_after_it_and_in_its_turn(
    threads: ThreadPoolExecutor,
) -> None:
    turns, order = Turns(), list[Any]()

    def work() -> int:
        with turns:  # it has the turn
            order.append(threading.get_ident())
        return 7

    found = lent(threads, turns, work)
    time.sleep(0.02)
    assert not order, "nobody has served a request"
    with pytest.raises(ValueError), turns:
        raise ValueError
    assert not order, "it waits for one that does not fail"
    with turns, turns:
        order.append("request")
    assert found.result(60) == 7 and order == ["request", threading.get_ident()]
    turns.assist()
    assert len(order) == 2, "once"
    found = lent(threads, turns, work)
    turns.assist()
    assert found.result(60) == 7


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError("its own"), "its own"),
        # An interrupt is meant for the thread that does the work.
        (KeyboardInterrupt(), "KeyboardInterrupt while it worked for another thread"),
    ],
)
def test_what_lent_work_raises_is_told_the_one_that_lent_it_and_the_turn_is_given_back(
    error: BaseException, said: str, threads: ThreadPoolExecutor
) -> None:
    def work() -> None:
        raise error

    turns = Turns()
    found = lent(threads, turns, work)
    is_interrupt = isinstance(error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) if is_interrupt else contextlib.nullcontext(), turns:
        pass
    assert said in str(found.exception(60))
    with turns.step():
        pass


def test_lent_work_that_nobody_wants_any_more_is_not_done(threads: ThreadPoolExecutor) -> None:
    turns, stopped, done = Turns(), threading.Event(), list[int]()
    found = lent(threads, turns, lambda: done.append(1), stopped.is_set)
    stopped.set()
    with pytest.raises(StoppedError):
        found.result(60)
    with turns:
        pass
    assert not done


# --- what surrounds a request


def test_it_is_all_four_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, kernels = Turns(), Choosers()
    before = [chooser.current.get(None) for chooser in kernels.all]
    with pytest.raises(KeyError), torch.inference_mode():
        with serving_scope(turns, kernels, torch.device("cpu")):
            assert turns.owner is not None
            assert [chooser.current.get(None) for chooser in kernels.all] == list(kernels.all)
            assert not torch.is_inference_mode_enabled()
            with serving_scope(turns, kernels, torch.device("cpu")):
                pass
            assert turns.owner is not None
            raise KeyError
    assert turns.owner is None
    assert [chooser.current.get(None) for chooser in kernels.all] == before


def test_a_device_that_cannot_be_entered_gives_the_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(device: torch.device) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(module, "on_device", gone)
    turns, kernels = Turns(), Choosers()
    with pytest.raises(RuntimeError, match="no such device"):
        with serving_scope(turns, kernels, torch.device("cpu")):
            raise AssertionError
    assert turns.owner is None
    assert torch.is_grad_enabled()
