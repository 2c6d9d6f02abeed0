"""Turns: one at a time, requests first, steps go on under any load; kernels are compared in such steps."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fxsplit_encoder.kernels.attention import AttentionShape, KernelChooser
from fxsplit_encoder.kernels.attention.chooser import Measurements
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.kernels.store import KernelStore
from fxsplit_encoder.manager import lifecycle as module
from fxsplit_encoder.manager.compile_process import build_kernels
from fxsplit_encoder.manager.lifecycle import serving_scope
from fxsplit_encoder.manager.turns import StoppedError, Turns, compare_ahead
from fxsplit_encoder.pauses import pause, pausing_by
from fxsplit_encoder.runtime.captured_program import Choosers
from tests.kernels.attention.fakes import Everywhere, FakeKernel
from tests.pauses import Pauses

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


def awaiting(
    threads: ThreadPoolExecutor, turns: Turns, work: Any, is_stopped: Any = lambda: False
) -> Future[None]:
    """Work that waits for another thread's lock."""

    def do_work() -> None:
        with turns.handed_over(is_stopped):
            work()
        with turns.step():  # the lock is no longer this thread's
            pass

    future = threads.submit(do_work)
    wait_until(lambda: turns.is_wanted)
    return future


def test_a_lock_is_handed_over_after_a_request_whose_thread_waits(threads: ThreadPoolExecutor) -> None:
    turns, order = Turns(), list[str]()

    def work() -> None:
        with turns:  # it has the lock
            time.sleep(0.02)
            order.append("work")

    done = awaiting(threads, turns, work)
    time.sleep(0.02)
    assert not order, "nobody has served a request"
    with pytest.raises(ValueError), turns:
        raise ValueError
    assert not order, "it waits for one that does not fail"
    with turns:
        with turns:
            order.append("request")
        assert turns.owner == threading.get_ident()
    assert order == ["request", "work"] and turns.owner is None
    done.result(60)
    turns.assist()
    assert len(order) == 2, "once"
    done = awaiting(threads, turns, work)
    turns.assist()
    assert len(order) == 3
    done.result(60)


def test_an_interrupt_waits_for_the_end_of_work_whose_error_is_its_own(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, order = Turns(), list[str]()
    wait_for, interrupts = threading.Condition.wait_for, iter([KeyboardInterrupt])

    def interrupted(self: threading.Condition, *given: Any) -> bool:
        for error in interrupts:
            raise error
        return wait_for(self, *given)

    def work() -> None:
        time.sleep(0.02)
        order.append("work")
        raise TimeoutError

    done = awaiting(threads, turns, work)
    monkeypatch.setattr(threading.Condition, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt), turns:
        pass
    assert order == ["work"] and isinstance(done.exception(60), TimeoutError)
    with turns.step():
        pass


def test_work_that_nobody_wants_any_more_is_not_begun(threads: ThreadPoolExecutor) -> None:
    turns, stopped, done = Turns(), threading.Event(), list[int]()
    waiting = awaiting(threads, turns, lambda: done.append(1), stopped.is_set)
    stopped.set()
    with pytest.raises(StoppedError):
        waiting.result(60)
    with turns:
        pass
    assert not done


def test_it_is_all_four_contexts() -> None:
    turns, kernels = Turns(), Choosers()
    before = KernelChooser.current.get()
    with pytest.raises(KeyError), torch.inference_mode():
        with serving_scope(turns, kernels, torch.device("cpu")):
            assert turns.owner is not None
            assert KernelChooser.current.get() is kernels.attention
            assert not torch.is_inference_mode_enabled()
            with serving_scope(turns, kernels, torch.device("cpu")):
                pass
            assert turns.owner is not None
            raise KeyError
    assert turns.owner is None
    assert KernelChooser.current.get() is before


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


# --- kernels are compared between requests in parts: a part is one run, one check or one timing


CPU = torch.device("cpu")
CAPTURED = AttentionShape(CPU, torch.bfloat16, 2, 8, 48, 24, 4)
KNOWN = AttentionShape(CPU, torch.bfloat16, 2, 8, 64, 64, 1, host_lengths=True)


class Scene:
    """Kernels and a clock that log what they do, and contexts that log where."""

    def __init__(self, directory: Path | None = None) -> None:
        self.where = "beside"
        self.log: list[tuple[str, str]] = []

        def clock(call: Callable[[], object], shape: AttentionShape) -> float:
            self.log.append(("clock", self.where))
            return 7.0

        stores = () if directory is None else (lambda device: KernelStore("measured", {}, directory),)
        kernels = [self.kernel("one"), self.kernel("two")]
        self.chooser = KernelChooser(measurements=Measurements(kernels, Everywhere(clock), *stores))

    def kernel(self, name: str, kind: type[FakeKernel] = FakeKernel) -> FakeKernel:
        def note(out: torch.Tensor) -> torch.Tensor:
            self.log.append((name, self.where))
            return out

        return kind(name, change=note)

    def run(self, *shapes: AttentionShape) -> None:
        for shape in shapes:
            assert self.where == "turn"
            self.chooser.ranking(shape)
            assert not self.log, "a run measures nothing"
            pause()

    def work(self, *shapes: AttentionShape) -> None:
        with pausing_by(Pauses(lambda: None, around=lambda: mock.patch.object(self, "where", "turn"))):
            compare_ahead(lambda: self.run(*shapes), CPU)


def table(scene: Scene) -> Any:
    return scene.chooser.measurements.table(CPU)


@pytest.mark.parametrize(
    ("is_known", "measured", "built"),
    [(False, True, ["one", "two"]), (True, True, []), (False, False, [])],
    ids=["unknown", "compared before", "a CPU"],
)
def test_another_process_builds_what_will_be_compared_and_keeps_no_time(
    is_known: bool, measured: bool, built: list[str], tmp_path: Path
) -> None:
    if is_known:
        assert measure(Scene(tmp_path), CAPTURED)
    before, scene = [*tmp_path.iterdir()], Scene(tmp_path)
    generation: Any = SimpleNamespace(
        pool=SimpleNamespace(device=CPU),
        scope=SimpleNamespace(measured=measured),
        planned_captures=lambda: CAPTURED,
        run=scene.chooser.ranking,
    )
    build_kernels(generation, Choosers(attention=scene.chooser))
    assert sorted({what for what, _ in scene.log} - {"clock"}) == built
    assert [*tmp_path.iterdir()] == before and bool(before) == is_known


def test_a_run_and_one_timing_have_the_turn_and_checks_have_not() -> None:
    scene = Scene()
    scene.work(CAPTURED, KNOWN, CAPTURED)
    # Two kernels: of the captured class on two calls, of the known ones on one segment, four and sixteen.
    assert [each for each in scene.log if each[0] == "clock"] == [("clock", "turn")] * (2 * 2 + 2 * 3)
    assert {where for what, where in scene.log if what != "clock"} == {"beside"}


def test_what_is_found_is_what_a_capture_would_have_found() -> None:
    scene, at_once = Scene(), Scene()
    scene.work(CAPTURED, KNOWN)
    measure(at_once, CAPTURED, KNOWN)
    assert table(scene) == table(at_once) and len(table(scene)) == 7
    measure(scene, CAPTURED, KNOWN)
    assert not scene.log, "nothing is left to compare"


class LateKernel(FakeKernel):
    """One that another process is compiling."""

    is_awaited = True


def late_scene() -> Scene:
    scene = Scene()
    measurements = scene.chooser.measurements
    measurements.kernels = (*measurements.kernels, scene.kernel("late", LateKernel))
    return scene


def measure(scene: Scene, *shapes: AttentionShape) -> list[str]:
    """Which kernels a capture has to call for it."""
    scene.log.clear()
    with measuring():
        for shape in shapes:
            scene.chooser.ranking(shape)
    return sorted({what for what, _ in scene.log} - {"clock"})


def test_what_waits_for_other_processes_is_compared_last_and_all_as_ever() -> None:
    scene, at_once = late_scene(), late_scene()
    other = dataclasses.replace(CAPTURED, tokens=96, longest=48)
    scene.work(CAPTURED, KNOWN, other)
    before = [what for what, _ in scene.log[: scene.log.index(("late", "beside"))]]
    # Two kernels on two calls of two captured classes: other processes may slow those of the host.
    assert set(before) == {"one", "two", "clock"} and before.count("clock") == 2 * 2 * 2
    assert measure(at_once, CAPTURED, KNOWN, other) == ["late", "one", "two"]
    assert table(scene) == table(at_once)


def test_memory_that_runs_out_leaves_a_class_without_a_choice() -> None:
    scene = late_scene()
    meter = scene.chooser.measurements.meter

    def none_left(shape: AttentionShape) -> Any:
        raise torch.OutOfMemoryError("none left")

    meter.examples = none_left  # type: ignore[method-assign]
    scene.work(CAPTURED)
    (found,) = table(scene).values()
    assert not found.microseconds and not found.rejected
