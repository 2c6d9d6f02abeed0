"""How kernels are compared for a class of shapes: first by accuracy, then by time."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fxsplit_encoder._torch.allocator import end_failed_capture
from fxsplit_encoder._torch.deferred_free import defer_frees
from fxsplit_encoder.attention.kernels import AttentionKernel, AttentionShape
from fxsplit_encoder.attention.kernels.generic import PerSegment

_reference = PerSegment()

# What a kernel's error may be: a multiple of that of the first accurate candidate, which is torch's own where
# it works; and a number of roundings of the dtype, for the first one itself and where its error is next to
# none.
_TOLERANCE = 1.1
_FIRST_ROUNDINGS, _FEWEST_ROUNDINGS = 4.0, 0.25

# Time that the timed calls of one kernel should take, in microseconds, and how often they are timed.
_ROUND_US = 500.0
_MOST_CALLS = 20
_ROUNDS = 3

# A kernel that takes this many times as long as another on the first batch is timed on no other.
_FAR_BEHIND = 1.5


@dataclass(slots=True)
class Measured:
    """What was found for one class of shapes."""

    microseconds: dict[str, float] = field(default_factory=dict)
    """Of a call, by the kernel's name; those that are accurate."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Why the other candidates cannot be chosen."""


class Meter:
    """Compares kernels on the device.

    Args:
        timer: microseconds of a call; replaced in tests.
    """

    def __init__(self, timer: Callable[[Callable[[], object], AttentionShape], float] | None = None) -> None:
        self.timer = microseconds if timer is None else timer
        self._found: dict[tuple[object, ...], float] = {}
        """Errors and times that are known, by kernel and call: classes may have a call in common."""

    def can_measure(self, device: torch.device) -> bool:
        """Whether choices are measured here: on a CPU there is nothing to choose from."""
        return device.type == "cuda"

    @torch.no_grad()
    def measure(self, kernels: Sequence[AttentionKernel], shape: AttentionShape) -> Measured:
        """Errors and times of all kernels on random values. What a kernel raises is why it is rejected.

        A call that another class has too is measured once: segments that are known to be equal are also
        segments that are known.
        """
        calls = [(replace(shape, equal=False), *lengths) for lengths in example_lengths(shape)]
        wanted = {("time", kernel.name, call) for kernel in kernels for call in calls}
        examples = make_examples(shape) if wanted - self._found.keys() else []
        references = [_expected(example) for example in examples]
        measured = Measured()

        def error_on(kernel: AttentionKernel, number: int) -> float:
            return self._once(
                ("error", kernel.name, calls[number]),
                lambda: _error(kernel, examples[number], references[number]),
            )

        def time_on(kernel: AttentionKernel, number: int) -> float:
            return self._once(
                ("time", kernel.name, calls[number]),
                lambda: self.timer(_call(kernel, examples[number], shape), shape),
            )

        fastest = float("inf")
        rounding = torch.finfo(shape.dtype).eps
        limit = _FIRST_ROUNDINGS * rounding
        for kernel in kernels:
            try:
                error = statistics.fmean(error_on(kernel, number) for number in range(len(calls)))
                if not error <= limit:  # it may be NaN, where a row was not written
                    measured.rejected[kernel.name] = f"error {error:.2g}; allowed: {limit:.2g}"
                    continue
                first = time_on(kernel, 0)
                fastest = min(fastest, first)
                others = range(1, len(calls)) if first <= _FAR_BEHIND * fastest else ()
                times = [first, *(time_on(kernel, number) for number in others)]
            except Exception as problem:
                measured.rejected[kernel.name] = f"{type(problem).__name__}: {problem}"
                continue
            if not measured.microseconds:
                limit = max(_TOLERANCE * error, _FEWEST_ROUNDINGS * rounding)
            measured.microseconds[kernel.name] = statistics.fmean(times)
        return measured

    def _once(self, key: tuple[object, ...], find: Callable[[], float]) -> float:
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


def _call(kernel: AttentionKernel, example: Example, shape: AttentionShape) -> Callable[[], object]:
    """What is timed. Eager attention between captured graphs has its memory, which a kernel may have to copy
    its result to.
    """
    out = (
        torch.empty(example.query.shape, dtype=shape.dtype, device=shape.device)
        if shape.host_lengths
        else None
    )
    return lambda: kernel(*example[:-1], out)


def _expected(example: Example) -> Tensor:
    """In float32, which is exact relative to the 16-bit values that are compared."""
    query, key, value = (tensor.float() for tensor in example[:3])
    out = _reference(query, key, value, example.cu_seqlens, example.max_seqlen, example.scale)
    return out[: example.rows]


def _error(kernel: AttentionKernel, example: Example, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    # Freed at once, so that the kernel is likely to get this memory: a row that it does not write is
    # then NaN, instead of the right one from an earlier kernel.
    torch.full_like(example.query, float("nan"), memory_format=torch.contiguous_format)
    out = kernel(*example[:-1])[: example.rows].float()
    return float((out - expected).norm() / expected.norm())


def microseconds(call: Callable[[], object], shape: AttentionShape) -> float:
    """Of a call, the median. Where the host knows the segments, of eager calls, so that what they cost the
    host counts too. Otherwise, of calls inside a CUDA graph.
    """
    stream = _stream(shape.device)
    stream.wait_stream(torch.cuda.current_stream(shape.device))
    with torch.cuda.stream(stream):
        call()
        calls = max(1, min(_MOST_CALLS, int(_ROUND_US / max(1.0, _elapsed(call)))))
        if shape.host_lengths:
            times = [_elapsed(call, calls) for _ in range(_ROUNDS)]
        else:
            graph = _record(call, calls)
            graph.replay()
            times = [_elapsed(graph.replay) / calls for _ in range(_ROUNDS)]
    return statistics.median(times)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: the allocator keeps the memory of every stream apart."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _elapsed(call: Callable[[], object], calls: int = 1) -> float:
    """Microseconds of a call, mean of `calls` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def _record(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls; its failure leaves the device as it was."""
    graph, memory = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    uses, handle = memory.use_count(), cast("Any", memory.id)
    with defer_frees():
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                call()
            graph.capture_end()
        except BaseException:
            _abandon(graph, memory, uses)
            raise
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, memory: torch.cuda.MemPool, uses: int) -> None:
    """Ends a capture that failed. If that fails too, the random generators refuse to run until another
    capture succeeds.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        end_failed_capture(graph, memory, uses)
        scratch = torch.zeros(1, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            scratch.add_(1)


# --- segments and values on which kernels are compared


class Example(NamedTuple):
    """The arguments of one call, and how many of its rows lie inside a segment (the first ones)."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    scale: float
    rows: int


def example_lengths(shape: AttentionShape) -> list[list[int]]:
    """Segments that a call of this shape may have.

    One list where the host knows them: one segment of the greatest length, the others share the rest. Two for
    a captured call: as many of the greatest length as fit, then empty ones; and all segments
    equal, with rows left over after the last.
    """
    if shape.equal:
        return [[shape.longest] * shape.segments]
    if shape.host_lengths:
        rest = min(shape.tokens - shape.longest, shape.longest * (shape.segments - 1))
        return [[shape.longest, *_share(rest, shape.segments - 1)]]
    full = max(1, min(shape.segments, shape.tokens // shape.longest))
    spread = min(shape.tokens - shape.tokens // 8, shape.longest * shape.segments)
    return [[shape.longest] * full + [0] * (shape.segments - full), _share(spread, shape.segments)]


def _share(tokens: int, segments: int) -> list[int]:
    ends = [tokens * i // segments for i in range(segments + 1)] if segments else [0]
    return [end - start for start, end in itertools.pairwise(ends)]


def pairs(lengths: list[int]) -> int:
    """Pairs of tokens that attend to each other, to which the work is proportional."""
    return sum(length**2 for length in lengths)


def make_examples(shape: AttentionShape) -> list[Example]:
    """Random values, as a fused projection lays them out, for every list of `example_lengths`."""
    made = []
    # Of its own, so that measuring does not change the random numbers of the program.
    generator = torch.Generator(shape.device).manual_seed(0)
    for lengths in example_lengths(shape):
        size = (shape.tokens, 3, shape.heads, shape.head_dim)
        qkv = torch.randn(size, dtype=shape.dtype, device=shape.device, generator=generator)
        boundaries = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=shape.device)
        query, key, value = qkv.unbind(1)
        scale = shape.head_dim**-0.5
        made.append(Example(query, key, value, cu_seqlens, shape.longest, scale, boundaries[-1]))
    return made
