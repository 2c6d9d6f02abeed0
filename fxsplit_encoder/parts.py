"""Work in parts: a generator that yields between them, so that something else may come in between."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, TypeVar

Result = TypeVar("Result")

Coming: TypeAlias = Literal["capture"] | None
"""What the next part is, where it matters which thread does it. While one that captures a CUDA graph runs, a
thread that waits for the whole device fails, and the capture with it; so it is for the thread that would."""

Parts: TypeAlias = Generator[Coming, None, Result]
"""The parts of what returns a result; between two of them it says what comes."""


def in_one_go(work: Generator[Any, None, Result]) -> Result:
    """Does all parts, and returns what the work returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def each_within(context: Callable[[], AbstractContextManager[Any]], work: Parts[Result]) -> Parts[Result]:
    """The same parts, each inside a context of its own, which what comes in between does not see."""
    while True:
        with context():
            try:
                coming = next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        yield coming
