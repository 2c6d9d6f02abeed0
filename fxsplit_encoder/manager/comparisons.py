"""Kernels compared before captures ask for them: between requests, in parts that hold up nobody for long, and
while other processes compile further ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxsplit_encoder.kernels import Unmeasured, collecting
from fxsplit_encoder.parts import Parts, each_within

_END: Any = object()

Around = Callable[[], AbstractContextManager[object]]


def compare_between_requests(
    runs: Parts[None], device: torch.device, *, step: Around, beside: Around
) -> Parts[None]:
    """Compares the kernels of every class of calls that some runs meet, a part each time that it is asked for
    one.

    A run, and the timing of one kernel on one call, is a step. Checking a kernel's results is none: it may
    compile the kernel first, for seconds, and other work on the device does not change it.

    Args:
        runs: a run a part.
        device: where they are.
        step: what is around a step.
        beside: what is around the rest, on this thread, while requests are served.
    """
    unmeasured: Unmeasured = {}

    @contextlib.contextmanager
    def collecting_step() -> Iterator[None]:
        with step(), collecting(unmeasured):
            yield

    yield from each_within(collecting_step, runs)
    # Of its own, so that requests do not queue behind it.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    for measurements, shape in unmeasured:
        parts = measurements.comparing(shape)
        coming = next(parts, None)
        while coming is not None:
            with step() if coming == "time" else beside():
                if stream is not None and coming == "time":
                    # A step has the current stream wait for the requests before it.
                    stream.wait_stream(torch.cuda.current_stream(device))
                    stream.synchronize()
                with torch.cuda.stream(stream):
                    coming = next(parts, None)
            yield None
    if stream is not None:
        # While a capture is open torch frees none of the blocks that it keeps for later.
        torch.cuda.empty_cache()


def compare_meanwhile(runs: Parts[None], is_compiling: Callable[[], bool]) -> None:
    """Compares the kernels of every class of calls that some runs meet, but for those that other processes
    are still compiling, until these are done.

    Args:
        runs: a run a part.
        is_compiling: whether they are still at it.
    """
    unmeasured: Unmeasured = {}
    with contextlib.closing(runs):
        while is_compiling():
            known = len(unmeasured)
            with collecting(unmeasured):
                if next(runs, _END) is _END:
                    return
            for measurements, shape in list(unmeasured)[known:]:
                if not is_compiling():
                    return
                measurements.compare_unawaited(shape)
