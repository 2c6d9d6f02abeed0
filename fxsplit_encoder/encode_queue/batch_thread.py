"""Threads: `BatchThread` launches batches and has them landed in order, `Clock` waits for deadlines."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

from fxsplit_encoder.errors import EncoderLostError

logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")

EXIT_SECONDS = 30.0
"""How long the end of the interpreter waits for batches that are being encoded: a thread that encodes while
the interpreter is taken down would abort the process."""


def join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Wait for threads until a deadline on the monotonic clock; one that hangs is left to itself."""
    for thread in threads:
        thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        if thread.is_alive():
            logger.warning("%s does not come to an end; it is left to itself", thread.name)


def deadline_of(timeout_s: float | None) -> float:
    """The deadline on the monotonic clock that is so far away; None: infinitely."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables of an error's frames: a log handler may keep it, and so whole batches."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class BatchThread(ABC, Generic[BatchT]):
    """A thread that takes batches from a source and launches them, which returns as soon as a device or
    process has the work; a second thread lands them in order, which waits, so that the next is launched.

    An Exception of `launch` concerns the batch, which is split. `FATAL` ones, what is no Exception, and
    errors of other methods end the thread, and `lost` is called.
    """

    FATAL = (EncoderLostError, torch.AcceleratorError)
    """What encodes is of no more use: it is gone, or the context of its device is broken."""

    def __init__(self, name: str, work: threading.Condition) -> None:
        self.name, self.work = name, work
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._landing = threading.Thread(target=self._land_all, name=f"{name}-landing", daemon=True)
        self._launched: queue.Queue[BatchT | None] = queue.Queue()
        self._fault: BaseException | None = None
        """What ended the landing thread."""

    @abstractmethod
    def serving(self) -> AbstractContextManager[None]:
        """Start what encodes, on this thread; batches are taken inside."""

    @abstractmethod
    def take(self) -> BatchT | None:
        """The next batch, once there is one; None: there will be none. Waits on `work`, and calls `check`
        whenever it wakes.
        """

    @abstractmethod
    def launch(self, batch: BatchT) -> None:
        """Give a batch to what encodes."""

    @abstractmethod
    def split(self, batch: BatchT, error: Exception) -> Sequence[BatchT]:
        """The halves of a batch whose launch failed, to be launched; none: its only item has failed."""

    def launched(self, batch: BatchT) -> bool:
        """Called once a batch is launched; whether landing it would not wait."""
        return False

    @abstractmethod
    def land(self, batch: BatchT) -> None:
        """Wait for the results of a batch and publish them."""

    @abstractmethod
    def lost(self, error: BaseException) -> None:
        """A fault ends this thread; everything that was launched has landed, or never will."""

    @abstractmethod
    def close(self) -> None:
        """Give back what encodes, on this thread."""

    def run(self, batch: BatchT) -> None:
        """Launch a batch on this thread, and land it or have it landed; a part at a time if it fails."""
        try:
            self.launch(batch)
        except self.FATAL:
            raise
        except Exception as error:
            for half in self.split(batch, error):
                self.run(half)
            return
        try:
            is_over = self.launched(batch)
        except Exception as error:  # no item is to blame
            raise EncoderLostError(f"{self.name} cannot go on: {error}") from error
        if is_over and not self._launched.unfinished_tasks:
            self.land(batch)
        else:
            self._launched.put(batch)

    def check(self) -> None:
        """Raise the fault that ended the landing thread, if one did."""
        if self._fault is not None:
            raise self._fault

    def _land_all(self) -> None:
        try:
            while (batch := self._launched.get()) is not None:
                self.land(batch)
                del batch  # and its tensors, which may be large
                self._launched.task_done()
        except BaseException as error:
            self._fault = error
            with self.work:
                self.work.notify_all()

    def _finish_landing(self) -> None:
        """Return once every batch has landed, or a fault has ended the landing thread."""
        if self._landing.is_alive():
            self._launched.put(None)
            self._landing.join()

    def _run(self) -> None:
        try:
            self._landing.start()
            with self.serving():
                while self._run_next():
                    pass
                self._finish_landing()
                self.check()
        except BaseException as error:  # whatever ends this thread must not end the work that it had
            logger.warning("%s is lost", self.name, exc_info=True)
            self._finish_landing()
            self.lost(error)
            _clear_frames(error)
        finally:
            try:
                self.close()
            except Exception:
                logger.warning("%s could not be closed", self.name, exc_info=True)

    def _run_next(self) -> bool:
        batch = self.take()
        if batch is not None:
            self.run(batch)
        return batch is not None


class Clock:
    """A thread that calls `expire` whenever the next deadline has passed.

    Args:
        lock: under which deadlines change.
        next_deadline: on the clock `now`, called with the lock; infinite: nothing has one.
        expire: called without the lock; leaves no deadline that has passed.
    """

    def __init__(
        self,
        lock: threading.Lock,
        next_deadline: Callable[[], float],
        expire: Callable[[], None],
        now: Callable[[], float],
        name: str,
    ) -> None:
        self._changed = threading.Condition(lock)
        self._next_deadline = next_deadline
        self._expire = expire
        self._now = now
        self._awaited = math.inf
        self._is_stopping = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def look(self) -> None:
        """Look at deadlines that may have come closer; called with the lock."""
        if self._next_deadline() < self._awaited:
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread; called with the lock."""
        self._is_stopping = True
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_stopping:
                    return
                self._awaited = self._next_deadline()
                if (left := self._awaited - self._now()) > 0:
                    # Deadlines further away than a wait may be are looked at again.
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
            self._expire()
