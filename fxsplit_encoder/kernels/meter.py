"""Compare the kernels of a class of calls, first by accuracy, then by time."""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, cast

import torch
from torch import Tensor

from fxsplit_encoder._torch.allocator import defer_frees, end_failed_capture
from fxsplit_encoder._torch.device import indexed, wait_on_device
from fxsplit_encoder._torch.streams import capture_streams
from fxsplit_encoder.kernels.kernel import CallShape, Kernel, KernelT, ShapeT
from fxsplit_encoder.pauses import has_turn

logger = logging.getLogger(__name__)

# What a kernel's error may be, in roundings of the dtype: that of the first candidate, and where its error is
# next to none.
_FIRST_ROUNDINGS, _FEWEST_ROUNDINGS = 4.0, 0.25

# Time that the timed calls of one kernel should take, in microseconds, and how often they are timed.
_ROUND_US = 500.0
MOST_CALLS_TIMED = 32
_ROUNDS = 5

# A kernel that takes this many times as long as another on the first example is timed on no other.
_FAR_BEHIND = 1.5

# How long the device waits, in times of what launching the calls takes the host.
_HOST_TIMES = 2.0

# Fewer where the device waits until all of them are launched.
_CALLS_BEHIND_A_WAIT = 8

_without_graphs: ContextVar[bool] = ContextVar("fxsplit_encoder_timing_without_graphs", default=False)


@dataclass(slots=True)
class Measured:
    """Errors and times of the kernels for one class of calls."""

    microseconds: dict[str, float] = field(default_factory=dict)
    """Of a call, by the name of an accurate kernel."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Why the other candidates cannot be chosen."""
    failed: list[str] = field(default_factory=list)
    """Those of them that raised, and not because they do not compute such calls."""


@dataclass(frozen=True, slots=True)
class Example:
    """One call on random values."""

    arguments: tuple[Any, ...]
    """The first is a tensor of the dtype of the result."""
    shape: tuple[int, ...]
    """Of the result."""
    reference: Callable[..., Tensor]
    """Computes the result in float32, which is exact relative to the compared 16-bit values."""
    timed_arguments: Callable[[], Sequence[tuple[Any, ...]]]
    """Makes the arguments of the calls whose time counts, in turn."""
    rows: int | None = None
    """Rows of the result that count, the first ones; None: all."""

    def expected(self) -> Tensor:
        """Computes the result by the reference."""
        return self.reference(*self.arguments)[: self.rows]

    def result(self, kernel: Any) -> Tensor:
        """Computes the result by a kernel, in memory that held NaN: rows that it does not write show."""
        self.arguments[0].new_full(self.shape, float("nan"))
        result: Tensor = kernel(*self.arguments)
        return result[: self.rows]

    def timed(self, kernel: Any) -> Callable[[], object]:
        """Returns the call whose time counts, each time with the next arguments."""
        arguments = itertools.cycle(self.timed_arguments())
        return lambda: kernel(*next(arguments))


class Meter(ABC, Generic[ShapeT, KernelT]):
    """Compares kernels on the device; `timer` gives the microseconds of a call."""

    tolerance: ClassVar[float] = 1.1
    """Allowed error, as a multiple of that of the first accurate candidate."""

    def __init__(self, timer: Callable[[Callable[[], object], CallShape], float] | None = None) -> None:
        self.timer = microseconds if timer is None else timer
        self._found: dict[tuple[object, ...], float] = {}
        """Errors and times that are known, by kernel and call: classes may have a call in common."""

    @abstractmethod
    def examples(self, shape: ShapeT) -> Sequence[Example]:
        """Returns the calls of this shape on which kernels are compared."""

    def calls(self, shape: ShapeT) -> Sequence[tuple[object, ...]]:
        """Returns a key for each of `examples`, under which its results are reused."""
        return [(shape,)]

    def can_measure(self, device: torch.device) -> bool:
        """Whether choices are measured here: on a CPU there is nothing to choose from."""
        return device.type == "cuda"

    @torch.no_grad()
    def measure(self, kernels: Sequence[KernelT], shape: ShapeT) -> Measured:
        """Errors and times of all kernels on random values; an error that one raises rejects it."""
        logger.debug("%s: references for the comparison of kernels", shape)
        calls = self.calls(shape)
        wanted = {("time", kernel.name, call) for kernel in kernels for call in calls}
        examples = self.examples(shape) if wanted - self._found.keys() else []
        references = [example.expected() for example in examples]
        measured = Measured()

        def once(what: str, kernel: KernelT, number: int) -> float:
            key = (what, kernel.name, calls[number])
            if key not in self._found:
                example = examples[number]
                self._found[key] = (
                    self.timer(example.timed(kernel), shape)
                    if what == "time"
                    else _error(kernel, example, references[number])
                )
            return self._found[key]

        fastest = float("inf")
        rounding = torch.finfo(shape.dtype).eps
        limit = _FIRST_ROUNDINGS * rounding
        # The first is the reference; of the others those come last that wait for other processes.
        for kernel in [*kernels[:1], *sorted(kernels[1:], key=lambda kernel: kernel.is_awaited)]:
            logger.debug("%s: %s is checked", shape, kernel.name)
            times: list[float] = []
            try:
                error = statistics.fmean(once("error", kernel, number) for number in range(len(calls)))
                if not error <= limit:  # it may be NaN, where a row was not written
                    measured.rejected[kernel.name] = f"error {error:.2g}; allowed: {limit:.2g}"
                    continue
                for number in range(len(calls)):
                    if number and times[0] > _FAR_BEHIND * fastest:
                        break
                    with has_turn():  # results are compared, and kernels compiled, beside requests
                        times.append(once("time", kernel, number))
                    fastest = min(fastest, times[0])
            except Exception as problem:
                measured.rejected[kernel.name] = f"{type(problem).__name__}: {problem}"
                if not isinstance(problem, NotImplementedError):
                    measured.failed.append(kernel.name)
                continue
            if not measured.microseconds:
                limit = max(self.tolerance * error, _FEWEST_ROUNDINGS * rounding)
            measured.microseconds[kernel.name] = statistics.fmean(times)
        return measured


def _error(kernel: Kernel[Any], example: Example, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    out = example.result(kernel).float()
    return float((out - expected).norm() / expected.norm())


@contextlib.contextmanager
def timing_without_graphs() -> Iterator[None]:
    """Times calls for CUDA graphs without a capture, during which no other thread may wait for the device."""
    token = _without_graphs.set(True)
    try:
        yield
    finally:
        _without_graphs.reset(token)


def microseconds(call: Callable[[], object], shape: CallShape) -> float:
    """The time of a call inside a CUDA graph, or of eager calls, what they cost the host included.

    The least of several: what other processes take of the GPU, or of the host, only adds.
    """
    streams = capture_streams(indexed(shape.device))
    stream = streams.take()  # the last one again: the allocator keeps the memory of every stream apart
    streams.reserve_workspaces(stream)
    stream.wait_stream(torch.cuda.current_stream(shape.device))
    with torch.cuda.stream(stream):
        call()
        calls = max(1, min(MOST_CALLS_TIMED, int(_ROUND_US / max(1.0, _elapsed(call)))))
        if shape.is_captured and _without_graphs.get():
            calls = min(calls, _CALLS_BEHIND_A_WAIT)
            times = [_elapsed(call, calls, behind_a_wait=True) for _ in range(_ROUNDS)]
        elif shape.is_captured:
            graph = _record(call, calls)
            graph.replay()
            times = [_elapsed(graph.replay) / calls for _ in range(_ROUNDS)]
        else:
            times = [_elapsed(call, calls) for _ in range(_ROUNDS)]
    return min(times)


def _elapsed(call: Callable[[], object], calls: int = 1, *, behind_a_wait: bool = False) -> float:
    """Microseconds of a call, mean of `calls` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if behind_a_wait:
        begin = time.perf_counter()
        call()
        wait_on_device(_HOST_TIMES * calls * (time.perf_counter() - begin))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def _record(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    graph, memory = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    uses, handle = memory.use_count(), cast("Any", memory.id)
    with defer_frees(), contextlib.ExitStack() as failed:
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        failed.callback(_abandon, graph, memory, uses)
        for _ in range(calls):
            call()
        graph.capture_end()
        failed.pop_all()
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, memory: torch.cuda.MemPool, uses: int) -> None:
    """Ends a capture that failed. If that fails too, random generators work again after another capture."""
    try:
        graph.capture_end()
    except RuntimeError:
        end_failed_capture(graph, memory, uses)
        scratch = torch.zeros(1, dtype=torch.float32, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            scratch.add_(1)
