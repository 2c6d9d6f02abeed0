"""How kernels are compared for a class of shapes: first by accuracy, then by time."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fxsplit_encoder._torch.allocator import end_failed_capture
from fxsplit_encoder._torch.deferred_free import defer_frees
from fxsplit_encoder.attention.examples import Example, make_examples
from fxsplit_encoder.attention.kernels import AttentionKernel, AttentionShape
from fxsplit_encoder.attention.kernels.generic import PerSegment

_reference = PerSegment()

# What a kernel's error may be: so many times that of the first accurate candidate, which is torch's own where
# it works; and so many roundings of the dtype, for the first one itself and where its error is next to none.
_TOLERANCE = 1.1
_FIRST_ROUNDINGS, _FEWEST_ROUNDINGS = 4.0, 0.25

# Time that the timed calls of one kernel should take, in microseconds, and how often they are timed.
_ROUND_US = 500.0
_MOST_CALLS = 20
_ROUNDS = 3

# A kernel that takes so many times as long as another on the first batch is timed on no further one.
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

    def can_measure(self, device: torch.device) -> bool:
        """Whether choices are measured here: on a CPU there is nothing to choose from."""
        return device.type == "cuda"

    @torch.no_grad()
    def measure(self, kernels: Sequence[AttentionKernel], shape: AttentionShape) -> Measured:
        """Errors and times of all kernels on random values. What a kernel raises is why it is rejected."""
        examples = make_examples(shape)
        references = [_expected(example) for example in examples]
        measured = Measured()
        fastest = float("inf")
        rounding = torch.finfo(shape.dtype).eps
        limit = _FIRST_ROUNDINGS * rounding
        for kernel in kernels:
            try:
                errors = map(functools.partial(_error, kernel), examples, references)
                error = sum(errors) / len(examples)
                if not error <= limit:  # it may be no number, where a row was not written
                    measured.rejected[kernel.name] = f"error {error:.2g}; allowed: {limit:.2g}"
                    continue
                first = self.timer(_call(kernel, examples[0], shape), shape)
                fastest = min(fastest, first)
                others = examples[1:] if first <= _FAR_BEHIND * fastest else []
                times = [first, *(self.timer(_call(kernel, example, shape), shape) for example in others)]
            except Exception as problem:
                measured.rejected[kernel.name] = f"{type(problem).__name__}: {problem}"
                continue
            if not measured.microseconds:
                limit = max(_TOLERANCE * error, _FEWEST_ROUNDINGS * rounding)
            measured.microseconds[kernel.name] = statistics.fmean(times)
        return measured


def _call(kernel: AttentionKernel, example: Example, shape: AttentionShape) -> Callable[[], object]:
    """What is timed. Eager attention between captured graphs has its memory, which a kernel may have to copy
    its result to.
    """
    out = torch.empty(example.query.shape, dtype=shape.dtype, device=shape.device) if shape.exact else None
    return lambda: kernel(*example[:-1], out)


def _expected(example: Example) -> Tensor:
    """In float32, which is exact beside the 16-bit values that are compared."""
    query, key, value = (tensor.float() for tensor in example[:3])
    out = _reference(query, key, value, example.cu_seqlens, example.max_seqlen, example.scale)
    return out[: example.rows]


def _error(kernel: AttentionKernel, example: Example, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    # Freed at once, so that the kernel is likely to get this memory: a row that it forgets is then no number,
    # instead of the right one from an earlier kernel.
    torch.full_like(example.query, float("nan"), memory_format=torch.contiguous_format)
    out = kernel(*example[:-1])[: example.rows].float()
    return float((out - expected).norm() / expected.norm())


def microseconds(call: Callable[[], object], shape: AttentionShape) -> float:
    """Of a call, the median. Where the host knows the segments, of eager calls, so that what they cost the
    host counts too. Otherwise, of calls inside of a CUDA graph.
    """
    stream = _stream(shape.device)
    stream.wait_stream(torch.cuda.current_stream(shape.device))
    with torch.cuda.stream(stream):
        call()
        calls = max(1, min(_MOST_CALLS, int(_ROUND_US / max(1.0, _elapsed(call)))))
        if shape.exact:
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
    """Microseconds of a call, mean of so many in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def _record(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls; its failure leaves the device as it was."""
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
