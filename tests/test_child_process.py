"""A process that runs a module of this library: what it is asked, how it ends, and what it says at last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fxsplit_encoder.child_process import Child, start_module

MODULE = "echo_of_lines"
CODE = """
import os, sys, time
for line in sys.stdin:
    if line == "sleep\\n":
        time.sleep(600)
    if line == "fail\\n":
        sys.exit("said at last")
    print(os.environ["WORD"], line, end="", flush=True)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


def child(**options: bool) -> Child:
    return Child(MODULE, environment={"WORD": "heard"}, **options)


def test_it_answers_lines_and_ends_when_it_is_asked_no_more() -> None:
    one = child(is_heard=True)
    one.ask("this")
    lines = one.lines()
    assert next(lines) == "heard this\n" and one.status is None
    assert one.end(60) == 0 and one.status == 0
    assert [*lines] == [] and one.last_words() == ""
    one.close()
    one.close()
    one.kill()
    assert one.last_words() == ""


def test_what_it_says_at_last_is_known() -> None:
    one = child()
    one.ask("fail")
    assert one.end(60) == 1
    assert one.last_words() == "said at last"
    one.close()


@pytest.mark.parametrize("own_session", [False, True])
def test_one_that_does_not_end_is_killed(own_session: bool) -> None:
    one = child(own_session=own_session)
    one.ask("sleep")
    assert one.end(0.1) == -9
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)
    one.close()


def test_one_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        start_module(MODULE, (), {})
