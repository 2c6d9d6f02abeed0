"""A scheduler of work that notes where it pauses, has the turn and records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class Pauses:
    """Calls back at each pause, and enters a context around each turn."""

    seconds_paused = 0.0

    def __init__(
        self,
        at_pause: Callable[[], object],
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        at_capture: Callable[[], object] = lambda: None,
    ) -> None:
        self._at_pause = at_pause
        self._around = around
        self._at_capture = at_capture

    def pause(self) -> None:
        self._at_pause()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._around():
            yield

    def recording(self) -> contextlib.AbstractContextManager[None]:
        self._at_capture()
        return contextlib.nullcontext()
