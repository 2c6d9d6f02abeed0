"""Work in parts: a generator that yields between them, so that something else may come in between."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")

Parts: TypeAlias = Generator[None, None, Result]
"""The parts of what returns a result."""


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
                next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        yield
