"""Choose the kernel of a call, measured for each class of calls at warm-up.

Kernels are timed inside `measuring()` alone; elsewhere the nearest measured class decides, else torch's own.
"""

from __future__ import annotations

import contextlib
import logging
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic

import torch

from fxsplit_encoder.kernels.kernel import KernelT, ShapeT, distance, works
from fxsplit_encoder.kernels.meter import Measured, Meter
from fxsplit_encoder.kernels.store import KernelStore, describe_host

logger = logging.getLogger(__name__)

# A kernel replaces the first candidate, torch's own where it works, if it takes at most this much of its
# time.
_REQUIRED_GAIN = 0.95

# A kernel is not compared where another class shows that it takes longer than the fastest by this factor, and
# by all that the two classes differ in besides. Tiles that fill another wave change a time by the rest.
_BEATEN = 1.5

# How far the numbers of a measured class may be from a call, as the sum of the logarithms of their ratios.
_FARTHEST = 3.0

# Distinct calls whose kernel is remembered.
MOST_CALLS = 4096

_measuring: ContextVar[list[float] | None] = ContextVar("fxsplit_encoder_measuring_kernels", default=None)

_unmeasured: ContextVar[Unmeasured | None] = ContextVar("fxsplit_encoder_unmeasured_kernels", default=None)


def is_measuring() -> bool:
    """Whether `measuring` was entered."""
    return _measuring.get() is not None


@contextlib.contextmanager
def measuring(seconds: list[float] | None = None) -> Iterator[None]:
    """Measures classes of calls that are met for the first time, and appends what each takes to `seconds`."""
    token = _measuring.set([] if seconds is None else seconds)
    try:
        yield
    finally:
        _measuring.reset(token)


@contextlib.contextmanager
def collecting(found: Unmeasured) -> Iterator[None]:
    """Enters classes of calls that are met for the first time in `found`; they are not measured."""
    token = _unmeasured.set(found)
    try:
        yield
    finally:
        _unmeasured.reset(token)


def kept(device: torch.device, directory: Path | None = None) -> KernelStore:
    """Returns the store of what is measured in a device's environment."""
    return KernelStore("measured", describe_host(device), directory)


class KernelMeasurements(Generic[ShapeT, KernelT]):
    """Measurements of one operation by class of calls and device; `kernels` are in order of preference."""

    def __init__(
        self,
        shape: type[ShapeT],
        kernels: Sequence[KernelT],
        meter: Meter[ShapeT, KernelT],
        store: Callable[[torch.device], KernelStore] | None = None,
    ) -> None:
        self.shape = shape
        self.kernels = tuple(kernels)
        self.meter = meter
        self._store = store
        self._tables: dict[torch.device, dict[ShapeT, Measured]] = {}
        self._loaded: set[ShapeT] = set()
        self._nearest: dict[ShapeT, ShapeT | None] = {}
        self._lock = threading.Lock()
        self.version = 0
        """Grows with every measurement, so that remembered choices are made again."""

    def keep_nothing_new(self, device: torch.device) -> None:
        """Loads the store of a device; later measurements are not written."""
        self._table(device)
        self._store = None

    def candidates(self, shape: ShapeT) -> list[KernelT]:
        """The kernels that work here, and compute this shape; last resorts only where there is no other."""
        usable = [kernel for kernel in self.kernels if works(kernel, shape)]
        return [kernel for kernel in usable if not kernel.is_last_resort] or usable

    def class_of(self, shape: ShapeT) -> ShapeT:
        """Returns the class of calls that share a kernel with this one."""
        return shape.rounded()

    def find(self, shape: ShapeT) -> Measured | None:
        """Returns the measurement of a shape's class, or of the nearest class that was measured."""
        rounded = self.class_of(shape)
        table = self._table(shape.device)
        if rounded in self._loaded and self._may_measure(shape):
            self._loaded.discard(rounded)
            known = {*table[rounded].microseconds, *table[rounded].rejected}
            # A package may have been missing, or a kernel have failed.
            if any(kernel.name not in known for kernel in self.candidates(rounded)):
                del table[rounded]
        if rounded not in table and self._may_measure(shape):
            if (seconds := _measuring.get()) is not None:
                begin = time.perf_counter()
                self.compare(rounded)
                seconds.append(time.perf_counter() - begin)
            elif (unmeasured := _unmeasured.get()) is not None:
                unmeasured[self, rounded] = None
        if rounded in table:
            return table[rounded]
        if rounded not in self._nearest:
            if len(self._nearest) >= MOST_CALLS:
                self._nearest.clear()
            near = [each for each in self._of_its_kind(rounded) if distance(each, rounded) <= _FARTHEST]
            self._nearest[rounded] = min(near, key=lambda each: distance(each, rounded), default=None)
        nearest = self._nearest[rounded]
        return None if nearest is None else table[nearest]

    def table(self, device: torch.device) -> Mapping[ShapeT, Measured]:
        """Returns all classes that were measured on a device, now or by an earlier process."""
        return dict(self._table(device))

    def add(self, device: torch.device, table: Mapping[ShapeT, Measured]) -> None:
        """Adds measurements of another process; known classes stay."""
        known = self._table(device)
        with self._lock:
            known.update({shape: found for shape, found in table.items() if shape not in known})
            self._nearest.clear()
            self.version += 1

    def _may_measure(self, shape: ShapeT) -> bool:
        return (
            (is_measuring() or _unmeasured.get() is not None)
            and self.meter.can_measure(shape.device)
            and not (shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        )

    def _table(self, device: torch.device) -> dict[ShapeT, Measured]:
        if device not in self._tables:
            with self._lock:
                if device not in self._tables:
                    table: dict[ShapeT, Measured] = {}
                    if self._store is not None and self.meter.can_measure(device):
                        table = self._store(device).read_table(self.shape, device)
                    self._tables[device] = table
                    self._loaded.update(table)
        return self._tables[device]

    def compare(self, shape: ShapeT) -> None:
        """Measures a class and those measured with it; other threads may choose kernels."""
        device = shape.device
        table = self._table(device)
        new = {each: self._compare(each) for each in shape.measured_with() if each not in table}
        self.add(device, new)
        if self._store is not None:
            found = {each: measured for each, measured in new.items() if measured.microseconds}
            with self._lock:
                self._store(device).add_to_table(found, self.shape, device)

    def compare_unawaited(self, shape: ShapeT) -> None:
        """Compares the kernels of captured classes that wait for no other process, for `compare` to reuse."""
        table = self._table(shape.device)
        for each in shape.measured_with():
            # What others take of the processors counts in the times of calls that are not captured.
            candidates = self._to_compare(each) if each.is_captured and each not in table else []
            if candidates and not candidates[0].is_awaited:  # accuracy is judged by the first
                self._measure([kernel for kernel in candidates if not kernel.is_awaited], each)

    def _to_compare(self, shape: ShapeT) -> list[KernelT]:
        """The candidates that may be the fastest; none where there is nothing to choose from."""
        candidates = self.candidates(shape)
        if len(candidates) < 2 or candidates[0].is_last_resort:
            return []
        table, beaten = self._table(shape.device), set[str]()
        for other in self._of_its_kind(shape):
            times = table[other].microseconds
            # Of two kernels, one may take as long as there and the other longer by all that there is more.
            limit = min(times.values()) * _BEATEN * 2.0 ** distance(other, shape)
            beaten |= {name for name, taken in times.items() if taken > limit}
        return [candidates[0], *(kernel for kernel in candidates[1:] if kernel.name not in beaten)]

    def _of_its_kind(self, shape: ShapeT) -> list[ShapeT]:
        """Measured classes of one kind with this."""
        kind, table = (shape.dtype, shape.kind()), self.table(shape.device)
        return [o for o, found in table.items() if found.microseconds and (o.dtype, o.kind()) == kind]

    def _compare(self, shape: ShapeT) -> Measured:
        candidates = self._to_compare(shape)
        if not candidates:
            return Measured()
        measured = self._measure(candidates, shape)
        for kernel in self.candidates(shape):
            if kernel not in candidates:
                measured.rejected[kernel.name] = "far behind in a class nearby"
        logger.info("%s, %s: %s", shape.operation, shape, measured)
        return measured

    def _measure(self, kernels: Sequence[KernelT], shape: ShapeT) -> Measured:
        try:
            return self.meter.measure(kernels, shape)
        except torch.OutOfMemoryError:
            logger.warning("not enough memory to compare kernels for %s", shape)
            return Measured()


Unmeasured = dict[tuple[KernelMeasurements[Any, Any], Any], None]
"""Classes of calls that are to be measured, in the order in which they were met, with what measures them."""


class Chooser(Generic[ShapeT, KernelT]):
    """Chooses the kernel of every call: the fastest that was measured, unless one is `pinned`."""

    def __init__(self, measurements: KernelMeasurements[ShapeT, KernelT]) -> None:
        self.measurements = measurements
        self.by_call: dict[tuple[object, ...], KernelT] = {}
        self._known_version = 0

    def pinned(self, shape: ShapeT) -> KernelT | None:
        """Returns the kernel that the user wants for a shape, if there is one and it computes this shape."""
        return None

    def remembered(self, call: tuple[object, ...], shape: Callable[[], ShapeT]) -> KernelT:
        """Returns the kernel of the call with the key `call`; `shape` makes its shape."""
        if _unmeasured.get() is not None:
            return self._ready(shape())
        call = (*call, _measuring.get() is None)  # what was chosen without measuring does not count inside
        if self._known_version != self.measurements.version or len(self.by_call) >= MOST_CALLS:
            self.by_call.clear()
            self._known_version = self.measurements.version
        kernel = self.by_call.get(call)
        if kernel is None:
            kernel = self.by_call[call] = self._ready(shape())
        return kernel

    def _ready(self, shape: ShapeT) -> KernelT:
        """The chosen kernel; but what plans each shape is for captures, and other calls seldom recur."""
        ranking = self.ranking(shape)
        if is_measuring() or self.pinned(shape) is not None:
            return ranking[0]
        return next((kernel for kernel in ranking if not kernel.plans_each_shape), ranking[0])

    def ranking(self, shape: ShapeT) -> tuple[KernelT, ...]:
        """Returns the kernels that may compute this shape, the chosen one first; at least one."""
        candidates = self.measurements.candidates(shape)
        pinned = self.pinned(shape)
        if pinned is not None:
            return (pinned, *(kernel for kernel in candidates if kernel is not pinned))
        found = self.measurements.find(shape)
        if found is None:
            return tuple(candidates)
        times, rejected = found.microseconds, found.rejected
        measured = sorted((k for k in candidates if k.name in times), key=lambda k: times[k.name])
        first = candidates[0]
        if first in measured and times[measured[0].name] > _REQUIRED_GAIN * times[first.name]:
            measured.remove(first)
            measured.insert(0, first)
        rest = [k for k in candidates if k.name not in times and k.name not in rejected]
        return (*measured, *rest) or tuple(candidates)


# Of an error in a report.
_LONGEST_REASON = 160


def failing(table: Mapping[Any, Measured]) -> dict[str, str]:
    """Errors by name of the kernels that worked for no class of a kind, as those that cannot be built do."""
    working = {(name, s.dtype, s.kind()) for s, found in table.items() for name in found.microseconds}
    return {
        name: textwrap.shorten(found.rejected[name], _LONGEST_REASON, placeholder="...")
        for s, found in table.items()
        for name in found.failed
        if (name, s.dtype, s.kind()) not in working
    }
