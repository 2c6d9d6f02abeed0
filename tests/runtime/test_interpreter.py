"""How often threads take turns in the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from fxsplit_encoder.runtime.interpreter import OFTEN, switching_often


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
