"""Which kernel attends: measured for each class of shapes at warm-up, or pinned.

`Measurements` holds what was found and is shared by the whole process; a `KernelChooser` adds one
configuration's pins. Kernels are timed inside `measuring()` only, which captures and warm-ups enter;
everywhere else, and while a CUDA graph is being captured, the nearest class that was measured decides, and
torch's own kernel where there is none.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor

from fxsplit_encoder.attention.cache import MeasurementCache, Table, describe_environment
from fxsplit_encoder.attention.invariant import invariant_kernel, invariant_names
from fxsplit_encoder.attention.kernels import KERNELS, AttentionKernel, AttentionShape
from fxsplit_encoder.attention.measure import Measured, Meter, example_lengths, pairs
from fxsplit_encoder.attention.pins import AUTO, parse_attention
from fxsplit_encoder.errors import ConfigError

logger = logging.getLogger(__name__)

# A kernel replaces the first candidate, torch's own where it works, if it takes at most this much of its
# time.
_REQUIRED_GAIN = 0.95

# How far the numbers of a measured class may be from a shape, as the sum of the logarithms of their ratios.
_FARTHEST = 3.0

# What an eager call costs at least, however little it attends to: the host's part of it. That of the dense
# kernels was 38 to 141 microseconds on the host of an H200, with a median of 55
# (benchmarks/results/attention.json).
_HOST_US = 50.0

# Distinct calls whose kernel is remembered.
_MOST_CALLS = 4096

# Numbers of segments that are measured together where the host has the lengths.
_KNOWN_SEGMENTS = (1, 4, 16)

_measuring: ContextVar[bool] = ContextVar("fxsplit_encoder_measuring_attention", default=False)


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Inside, a class of shapes that is met for the first time is measured: at warm-up, before captures."""
    token = _measuring.set(True)
    try:
        yield
    finally:
        _measuring.reset(token)


# Every product of an invariant program asks for it: no frame of Python.
is_measuring: Callable[[], bool] = _measuring.get
"""Whether `measuring` encloses the call."""


class Measurements:
    """What is known of every class of shapes, on every device.

    Args:
        kernels: candidates, in order of preference where nothing was measured.
        meter: compares them.
        cache: makes the cache of a device; None: nothing is kept for other processes.
    """

    def __init__(
        self,
        kernels: Sequence[AttentionKernel] = KERNELS,
        meter: Meter | None = None,
        cache: Callable[[torch.device], MeasurementCache] | None = None,
    ) -> None:
        self.kernels = tuple(kernels)
        self.meter = Meter() if meter is None else meter
        self._cache = cache
        self._tables: dict[torch.device, Table] = {}
        self._nearest: dict[AttentionShape, AttentionShape | None] = {}
        self._lock = threading.Lock()
        self.version = 0
        """Grows whenever something was measured, so that remembered choices are made again."""

    def candidates(self, shape: AttentionShape) -> list[AttentionKernel]:
        """The kernels that work here and compute this shape; last resorts only where there is no other."""
        usable = [kernel for kernel in self.kernels if works(kernel, shape)]
        return [kernel for kernel in usable if not kernel.is_last_resort] or usable

    def find(self, shape: AttentionShape) -> tuple[AttentionShape, Measured] | None:
        """The class of this shape, or the nearest that was measured, and what was found.

        Inside `measuring()` the class itself is measured, unless a CUDA graph is being captured.
        """
        own_tokens = any(kernel.depends_on_tokens and works(kernel, shape) for kernel in self.kernels)
        rounded = shape.rounded(own_tokens=own_tokens)
        table = self._table(shape.device)
        if rounded not in table and self._may_measure(shape):
            self._measure(rounded)
        if rounded in table:
            return rounded, table[rounded]
        if rounded not in self._nearest:
            others = [other for other in table if _same_kind(other, rounded) and table[other].microseconds]
            nearest = min(others, key=lambda other: _distance(other, rounded), default=None)
            if nearest is not None and _distance(nearest, rounded) > _FARTHEST:
                nearest = None
            self._nearest[rounded] = nearest
        known = self._nearest[rounded]
        return None if known is None else (known, table[known])

    def table(self, device: torch.device) -> Mapping[AttentionShape, Measured]:
        """All classes that were measured on a device, now or by an earlier process."""
        return dict(self._table(device))

    def add(self, device: torch.device, table: Mapping[AttentionShape, Measured]) -> None:
        """Takes over what was measured elsewhere, of classes of which nothing is known here."""
        known = self._table(device)
        with self._lock:
            known.update({shape: found for shape, found in table.items() if shape not in known})
            self._nearest.clear()
            self.version += 1

    def _may_measure(self, shape: AttentionShape) -> bool:
        return (
            _measuring.get()
            and self.meter.can_measure(shape.device)
            and not (shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        )

    def _table(self, device: torch.device) -> Table:
        if device not in self._tables:
            with self._lock:
                if device not in self._tables:
                    make = self._cache if self.meter.can_measure(device) else None
                    self._tables[device] = {} if make is None else make(device).load(device)
        return self._tables[device]

    def _measure(self, shape: AttentionShape) -> None:
        """Measures a class, and with one known segment others of as many tokens: what runs at known lengths
        has any number of segments, while warm-up sees only one.
        """
        shapes = {shape}
        if shape.host_lengths and shape.segments == 1:
            shapes |= {
                replace(shape, longest=shape.tokens // segments, segments=segments, equal=equal)
                for segments in _KNOWN_SEGMENTS
                if segments <= shape.tokens
                for equal in (False, True)
            }
        with self._lock:
            table = self._tables[shape.device]
            new = {each: self._compare(each) for each in shapes if each not in table}
            table.update(new)
            self._nearest.clear()
            self.version += 1
            if self._cache is not None:
                found = {each: measured for each, measured in new.items() if measured.microseconds}
                self._cache(shape.device).store(found, shape.device)

    def _compare(self, shape: AttentionShape) -> Measured:
        candidates = self.candidates(shape)
        if (
            not candidates
            or candidates[0].is_last_resort
            or (len(candidates) == 1 and not shape.host_lengths)
        ):
            return Measured()  # nothing to choose from, and no time that anything depends on
        try:
            measured = self.meter.measure(candidates, shape)
        except torch.OutOfMemoryError:
            logger.warning("not enough memory to compare kernels for %s", shape)
            return Measured()
        logger.info("attention, %s: microseconds %s", shape, measured.microseconds)
        if measured.rejected:
            logger.info("attention, %s: not chosen: %s", shape, measured.rejected)
        return measured


def works(kernel: AttentionKernel, shape: AttentionShape) -> bool:
    """Whether a kernel computes this shape and can run on its device."""
    if not shape.host_lengths and not kernel.capturable and shape.device.type == "cuda":
        return False
    return kernel.supports(shape) and kernel.unavailable_reason(shape.device) is None


def _same_kind(shape: AttentionShape, other: AttentionShape) -> bool:
    def kind(shape: AttentionShape) -> tuple[object, ...]:
        return shape.dtype, shape.heads, shape.head_dim, shape.host_lengths, shape.equal

    return kind(shape) == kind(other)


def _distance(shape: AttentionShape, other: AttentionShape) -> float:
    ratios = (
        max(1, getattr(shape, name)) / max(1, getattr(other, name))
        for name in ("tokens", "longest", "segments")
    )
    return sum(abs(math.log2(ratio)) for ratio in ratios)


MEASUREMENTS = Measurements(cache=lambda device: MeasurementCache(describe_environment(device)))
"""Those of this process."""


class KernelChooser:
    """Chooses the kernel of every call: the pinned one, else the fastest that was measured.

    Args:
        attention: the setting of that name, see `attention.pins`.
        measurements: where times come from.
        invariant: whether one kernel attends everywhere, see `attention.invariant`; of the settings a
            kernel's name and `auto` allow that.

    Raises:
        ConfigError: the setting names an unknown kernel or condition.
    """

    def __init__(
        self,
        attention: str | Mapping[str, str] = AUTO,
        measurements: Measurements = MEASUREMENTS,
        *,
        invariant: bool = False,
    ) -> None:
        self.pins = parse_attention(attention)
        self.measurements = measurements
        self.invariant = invariant
        self._by_heads: dict[tuple[object, ...], AttentionKernel] = {}
        self._by_call: dict[tuple[object, ...], AttentionKernel] = {}
        self._version = 0
        self._warned: set[str] = set()

    def check(self, device: torch.device) -> None:
        """Checks that every pinned kernel works on a device.

        Raises:
            ConfigError: one does not, and why.
        """
        kernels = {kernel.name: kernel for kernel in self.measurements.kernels}
        pinned = {pin.kernel for pin in self.pins} - {AUTO}
        problems = [
            f"attention: {name} cannot run on {device}: {reason}"
            for name in sorted(pinned)
            if (reason := kernels[name].unavailable_reason(device)) is not None
        ]
        if self.invariant and not pinned <= (allowed := {*invariant_names(tuple(kernels.values()), device)}):
            problems += [
                f"attention: contradicts invariant: {name} may attend by several algorithms on {device}; "
                f"allowed: {', '.join((AUTO, *sorted(allowed)))}"
                for name in sorted(pinned - allowed)
            ]
        if problems:
            raise ConfigError(*problems)

    def of(
        self, query_THD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, equal: bool = False
    ) -> AttentionKernel:
        """The kernel of a call whose segments the host does not know, or that are a batch (`equal`). A call
        that has come before costs one look-up in a dictionary.
        """
        call = (
            *(query_THD.shape, query_THD.dtype, query_THD.device, cu_seqlens.shape, max_seqlen, equal),
            _measuring.get(),  # what was chosen without measuring does not count inside
        )
        if self._version != self.measurements.version or len(self._by_call) >= _MOST_CALLS:
            self._by_call.clear()
            self._version = self.measurements.version
        kernel = self._by_call.get(call)
        if kernel is None:
            shape = shape_of(query_THD, max_seqlen, cu_seqlens.shape[0] - 1, equal=equal)
            kernel = self._by_call[call] = self._ready(shape)
        return kernel

    def _ready(self, shape: AttentionShape) -> AttentionKernel:
        """The chosen kernel; but what plans each shape is for captures, and other calls seldom recur."""
        ranking = self.ranking(shape)
        if _measuring.get() or self.pinned(shape) is not None:
            return ranking[0]
        return next((kernel for kernel in ranking if not kernel.plans_each_shape), ranking[0])

    def ranking(self, shape: AttentionShape) -> tuple[AttentionKernel, ...]:
        """The kernels that may compute this shape, the chosen one first; at least one."""
        if self.invariant:
            return (self.only(shape),)
        candidates = self.measurements.candidates(shape)
        pinned = self.pinned(shape)
        if pinned is not None:
            return (pinned, *(kernel for kernel in candidates if kernel is not pinned))
        found = self.measurements.find(shape)
        if found is None:
            return tuple(candidates)
        times, rejected = found[1].microseconds, found[1].rejected
        measured = sorted((k for k in candidates if k.name in times), key=lambda k: times[k.name])
        first = candidates[0]
        if first in measured and times[measured[0].name] > _REQUIRED_GAIN * times[first.name]:
            measured.remove(first)
            measured.insert(0, first)
        rest = [k for k in candidates if k.name not in times and k.name not in rejected]
        return (*measured, *rest) or tuple(candidates)

    def only(self, shape: AttentionShape) -> AttentionKernel:
        """The kernel of every call with heads like these, where `invariant` is set.

        Raises:
            ConfigError: there is none.
        """
        heads = (shape.device, shape.dtype, shape.heads, shape.head_dim)
        if heads not in self._by_heads:
            pinned = next((pin.kernel for pin in self.pins if pin.kernel != AUTO), None)
            # Of the calls that there are the least is known of a captured one.
            any_call = replace(shape, host_lengths=False, equal=False)
            self._by_heads[heads] = invariant_kernel(self.measurements.kernels, any_call, pinned)
        return self._by_heads[heads]

    @property
    def chosen(self) -> list[str]:
        """The kernels that `only` has chosen so far, each with what it attends to."""
        return sorted(
            f"{heads}x{head_dim} {str(dtype).removeprefix('torch.')}: {kernel.name}"
            for (_, dtype, heads, head_dim), kernel in self._by_heads.items()
        )

    def estimate(self, shape: AttentionShape, lengths: Sequence[int]) -> float | None:
        """Microseconds that the chosen kernel will take for known segments; None: nothing was measured.

        The time of the nearest class, scaled by the pairs of tokens that attend to each other.
        """
        found = self.measurements.find(shape)
        if found is None:
            return None
        measured_shape, measured = found
        chosen = measured.microseconds.get(self.ranking(shape)[0].name)
        if chosen is None:
            return None
        work = pairs(list(lengths)) / max(1, pairs(example_lengths(measured_shape)[0]))
        return max(chosen * work, min(chosen, _HOST_US))

    def pinned(self, shape: AttentionShape) -> AttentionKernel | None:
        """The kernel that is pinned for a shape, if one is and it computes this shape."""
        name = next((pin.kernel for pin in self.pins if pin.holds(shape)), AUTO)
        kernel = next((kernel for kernel in self.measurements.kernels if kernel.name == name), None)
        if kernel is None or works(kernel, shape):
            return kernel
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "attention: %s is pinned but does not compute %s; another kernel does", name, shape
            )
        return None


def shape_of(
    query_THD: Tensor, longest: int, segments: int, *, host_lengths: bool = False, equal: bool = False
) -> AttentionShape:
    """The shape of a call."""
    tokens, heads, head_dim = query_THD.shape
    return AttentionShape(
        *(query_THD.device, query_THD.dtype, heads, head_dim, tokens, longest, segments), host_lengths, equal
    )


# --- the chooser of a call

_of_process = KernelChooser()
_current: ContextVar[KernelChooser] = ContextVar("fxsplit_encoder_kernel_chooser", default=_of_process)

# Every call of attention asks for it: no frame of Python.
current_chooser: Callable[[], KernelChooser] = _current.get
"""The chooser of the enclosing `choosing`, or the process's own, which pins nothing."""


# Entered for every request: a class takes a third of the time of a generator.
class choosing:
    """Inside, this chooser decides: for captures and for what runs eagerly between them."""

    __slots__ = ("_chooser", "_token")

    def __init__(self, chooser: KernelChooser) -> None:
        self._chooser = chooser

    def __enter__(self) -> None:
        self._token = _current.set(self._chooser)

    def __exit__(self, *raised: object) -> None:
        _current.reset(self._token)
