"""Kernels are compared between requests in parts, one run, one check or one timing; another process builds
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxsplit_encoder.kernels.attention import AttentionShape, KernelChooser
from fxsplit_encoder.kernels.attention.chooser import Measurements
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.kernels.store import KernelStore
from fxsplit_encoder.manager.compile_process import build_kernels
from fxsplit_encoder.manager.turns import compare_between_requests, compare_meanwhile
from fxsplit_encoder.pauses import pause, pausing_by
from fxsplit_encoder.runtime.captured_program import Choosers
from tests.kernels.attention.fakes import Everywhere, FakeKernel
from tests.pauses import Pauses

CPU = torch.device("cpu")
CAPTURED = AttentionShape(CPU, torch.bfloat16, 2, 8, 48, 24, 4)
KNOWN = AttentionShape(CPU, torch.bfloat16, 2, 8, 64, 64, 1, host_lengths=True)


class Scene:
    """Kernels and a clock that log what they do, and contexts that log where."""

    def __init__(self, directory: Path | None = None) -> None:
        self.where = "beside"
        self.log: list[tuple[str, str]] = []

        def kernel(name: str) -> FakeKernel:
            def note(out: torch.Tensor) -> torch.Tensor:
                self.log.append((name, self.where))
                return out

            return FakeKernel(name, change=note)

        def clock(call: Callable[[], object], shape: AttentionShape) -> float:
            self.log.append(("clock", self.where))
            return 7.0

        stores = () if directory is None else (lambda device: KernelStore("measured", {}, directory),)
        kernels = [kernel("one"), kernel("two")]
        self.chooser = KernelChooser(measurements=Measurements(kernels, Everywhere(clock), *stores))

    @contextlib.contextmanager
    def at(self, where: str) -> Iterator[None]:
        self.where = where
        try:
            yield
        finally:
            self.where = "beside"

    def run(self, *shapes: AttentionShape) -> None:
        for shape in shapes:
            assert self.where == "turn"
            self.chooser.ranking(shape)
            assert not self.log, "a run measures nothing"
            pause()

    def work(self, *shapes: AttentionShape) -> None:
        with pausing_by(Pauses(lambda: None, around=lambda: self.at("turn"))):
            compare_between_requests(lambda: self.run(*shapes), CPU)


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
    with measuring():
        for shape in (CAPTURED, KNOWN):
            at_once.chooser.ranking(shape)
    assert table(scene) == table(at_once) and len(table(scene)) == 7
    with measuring():
        log = len(scene.log)
        for shape in (CAPTURED, KNOWN):
            scene.chooser.ranking(shape)
    assert len(scene.log) == log, "nothing is left to compare"


class LateKernel(FakeKernel):
    """One that another process is compiling."""

    is_awaited = True


def late_scene() -> Scene:
    scene = Scene()
    measurements = scene.chooser.measurements
    scene.where = "turn"

    def note(out: torch.Tensor) -> torch.Tensor:
        scene.log.append(("late", scene.where))
        return out

    measurements.kernels = (*measurements.kernels, LateKernel("late", change=note))
    return scene


def measure(scene: Scene, *shapes: AttentionShape) -> list[str]:
    """Which kernels a capture has to call for it."""
    scene.log.clear()
    with measuring():
        for shape in shapes:
            scene.chooser.ranking(shape)
    return sorted({what for what, _ in scene.log} - {"clock"})


def test_while_others_compile_what_waits_for_none_of_them_is_compared() -> None:
    scene, at_once = late_scene(), late_scene()
    other = dataclasses.replace(CAPTURED, tokens=96, longest=48)

    def run() -> None:
        for shape in (CAPTURED, KNOWN, other):
            scene.chooser.ranking(shape)
            pause()

    compare_meanwhile(run, lambda: True)
    assert {what for what, _ in scene.log} == {"one", "two", "clock"}
    assert not table(scene), "nothing is decided without the others"
    assert measure(scene, CAPTURED, other) == ["late"]
    assert measure(scene, KNOWN) == ["late", "one", "two"], "other processes may slow calls of the host"
    measure(at_once, CAPTURED, other, KNOWN)
    assert table(scene) == table(at_once)


@pytest.mark.parametrize("moments", range(6))
def test_as_soon_as_others_are_done_all_is_compared_as_ever(moments: int) -> None:
    scene, at_once = late_scene(), late_scene()
    left, num_runs = iter(range(moments)), 0

    def run() -> None:
        nonlocal num_runs
        for shape in (CAPTURED, KNOWN):
            scene.chooser.ranking(shape)
            num_runs += 1
            pause()

    compare_meanwhile(run, lambda: next(left, None) is not None)
    assert num_runs == min(2, (moments + 1) // 2)  # it asks before each run and before each class
    assert not table(scene)
    measure(scene, CAPTURED, KNOWN)
    measure(at_once, CAPTURED, KNOWN)
    assert table(scene) == table(at_once)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_memory_that_runs_out_leaves_a_class_without_a_choice(meanwhile: bool) -> None:
    scene = late_scene() if meanwhile else Scene()
    meter = scene.chooser.measurements.meter

    def none_left(shape: AttentionShape) -> Any:
        raise torch.OutOfMemoryError("none left")

    meter.examples = none_left  # type: ignore[method-assign]
    if meanwhile:
        compare_meanwhile(lambda: scene.chooser.ranking(CAPTURED), lambda: True)
        assert not scene.log
    else:
        scene.work(CAPTURED)
        (found,) = table(scene).values()
        assert not found.microseconds and not found.rejected
