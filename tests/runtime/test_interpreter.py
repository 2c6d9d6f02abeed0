"""Who waits for the interpreter how long."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from fxsplit_encoder.runtime.interpreter import OFTEN, collecting_what_is_new, switching_often


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_inside_and_as_before_after_the_last_of_several() -> None:
    with pytest.raises(RuntimeError, match="inside"), switching_often():
        assert sys.getswitchinterval() == pytest.approx(OFTEN)
        with switching_often():
            pass
        assert sys.getswitchinterval() == pytest.approx(OFTEN)
        raise RuntimeError("inside")
    assert sys.getswitchinterval() == 0.005


def test_what_is_shorter_already_stays() -> None:
    sys.setswitchinterval(1e-5)
    shorter = sys.getswitchinterval()
    with switching_often():
        assert sys.getswitchinterval() == shorter
    assert sys.getswitchinterval() == shorter


def test_who_sets_another_one_meanwhile_keeps_it() -> None:
    with switching_often():
        sys.setswitchinterval(0.001)
    assert sys.getswitchinterval() == 0.001


def test_collections_leave_out_what_was_there_before() -> None:
    with collecting_what_is_new():
        with collecting_what_is_new():
            pass
        inside = len(gc.get_objects())
        frozen = gc.get_freeze_count()
        assert frozen > 10 * inside  # every module that this process has
    assert gc.get_freeze_count() == 0


def test_garbage_made_inside_is_found() -> None:
    class Node:
        other: Node

    def make_circle() -> weakref.ref[Node]:
        first, second = Node(), Node()
        first.other, second.other = second, first
        return weakref.ref(first)

    with collecting_what_is_new():
        circle = make_circle()
        gc.collect()
        assert circle() is None


def test_who_has_frozen_objects_keeps_them_frozen() -> None:
    try:
        gc.freeze()
        with collecting_what_is_new():
            pass
        assert gc.get_freeze_count() > 0
        gc.unfreeze()
        with collecting_what_is_new():
            made = [[] for _ in range(100_000)]
            gc.freeze()
        assert gc.get_freeze_count() > len(made)
    finally:
        gc.unfreeze()


def test_what_is_frozen_here_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: [count(), counted.append(count())][0])
    for _ in range(2):
        with collecting_what_is_new(), collecting_what_is_new():
            gc.collect()
    assert counted == [0, 0]
    assert count() == 0
