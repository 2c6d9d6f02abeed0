"""Two threads that wait for time to pass: for deadlines, and for devices that still use memory."""

from __future__ import annotations

import logging
import threading

from fxsplit_encoder.connector.threads.core import Core

logger = logging.getLogger(__name__)


class Clock:
    """Fails what was not ready in time, whether or not anybody asks for steps."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.thread = threading.Thread(target=self._run, name="connector-clock", daemon=True)

    def _run(self) -> None:
        core, books = self._core, self._core.books
        while True:
            with core.lock:
                if core.is_stopping:
                    return
                core.awaited_deadline = books.next_deadline()
                remaining = None
                if core.awaited_deadline is not None:
                    remaining = core.awaited_deadline - books.parts.clock()
                if remaining is None or remaining > 0:
                    core.deadline_came_closer.wait(remaining)
                    continue
            with core.change():
                books.expire()


class Warden:
    """Frees memory that was let go of while a device used it, once the device is through with it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.thread = threading.Thread(target=self._run, name="connector-warden", daemon=True)

    def _run(self) -> None:
        core = self._core
        while True:
            with core.lock:
                features = list(core.books.parts.storage.quarantine)
                events = [event for feature in features for event in feature.read_events]
                if not events:
                    if core.is_stopping and not features:
                        return
                    core.quarantine_filled.wait()
                    continue
            for event in events:
                try:
                    event.synchronize()
                except RuntimeError:
                    # The device is gone, and with it whatever used the memory.
                    logger.warning("a device that was to be waited for is lost", exc_info=True)
            with core.change():
                pass
