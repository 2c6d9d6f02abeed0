"""The memory that captures share, the order of their replays, and recorded ops in place of graphs."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.allocator import (
    borrowed,
    defer_frees,
    end_failed_capture,
    free_later,
    memory_pool,
)
from fxsplit_encoder._torch.device import indexed
from fxsplit_encoder._torch.dispatch import tree_map_only
from fxsplit_encoder._torch.distributed import is_collective, wait_for
from fxsplit_encoder._torch.streams import capture_streams
from fxsplit_encoder.capture.buffers import copy_results, storage_address, tensors_in


class GraphPool:
    """Owns the memory of one generation of captures.

    Captures share the memory of their intermediate values, so at most one may run at a time: `replaying`
    takes a lock and orders streams. The pool is released as a whole (`retire`).

    Args:
        stream: the stream to capture on; None: a new one. Libraries keep a workspace per stream for good
            (cuBLAS 32 MiB on Hopper), so pools that never capture at once share one.
        priority: of that stream, which captured kernels keep.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        priority: int = 0,
    ) -> None:
        self.priority = priority
        self.device = indexed(device)
        self.used_bytes = 0
        """Bytes of all captures together."""
        self.is_cuda = device.type == "cuda"
        # Held for as long as the pool is in use: without it the pool would die with the last capture that is
        # released.
        self._memory = memory_pool(self.device) if self.is_cuda else None
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._uses = 0  # use count of the memory before the capture that began last
        self._superseded: list[Any] = []
        self._allocated: set[int] = set()  # addresses of captured allocations
        # Warm-up and capture share a stream, so that libraries' per-stream workspaces exist before a capture
        # begins.
        if stream is None and self.is_cuda:
            stream = capture_streams(self.device).take(priority)
        self.stream: Any = stream
        self._lock = threading.RLock()
        self._last_replay: torch.cuda.Event | None = None
        self._last_stream: torch.cuda.Stream | None = None

    @property
    def handle(self) -> Any:
        """The pool for `torch.cuda.CUDAGraph.capture_begin`."""
        return None if self._memory is None else self._memory.id

    def reserved_bytes(self) -> int:
        """Bytes that this process's allocator reserves; a capture adds the difference around it."""
        return torch.cuda.memory_reserved(self.device) if self.is_cuda else 0

    def note_allocated(self, results: object, arguments: object) -> None:
        """Records the memory that a captured call allocated: of its results, unless an argument lies there
        too. `torch.cuda.memory_snapshot` walks over every block, and crashed torch 2.11 after some hundred
        pools.
        """
        made, given = (
            {storage_address(tensor) for tensor in tensors_in(values) if tensor.device == self.device}
            for values in (results, arguments)
        )
        self._allocated |= made - given - {0}  # empty ones lie at 0

    def owns(self, tensor: Tensor) -> bool:
        """Whether a captured call allocated the memory of a tensor; never without CUDA."""
        return self.is_cuda and storage_address(tensor) in self._allocated

    def hold(self, tensor: Tensor) -> Tensor:
        """An alias of a tensor for a step that reads it at every replay: borrows memory of the pool, else
        owns it. Owning the pool's, 27 layers of 4096 patches would keep 0.8 GB instead of 0.03.
        """
        return borrowed(tensor) if self.owns(tensor) else tensor.detach()

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        """Excludes other replays until the outputs are read, and orders replays across streams."""
        return _Replaying(self)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """As `warming`, for a capture: the memory then outlives released captures."""
        with self.warming():
            if self.stream is not None:
                self._set_anchor()
            yield

    @contextlib.contextmanager
    def warming(self) -> Iterator[None]:
        """Runs on the pool's stream, after the caller's stream, which then waits for it."""
        with self._lock, defer_frees():
            if self.stream is None:
                yield
                return
            caller = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(caller)
            with self.on_stream():
                if self._memory is not None:
                    capture_streams(self.device).reserve_workspaces(self.stream)
                yield
            caller.wait_stream(self.stream)

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Makes the pool's stream the current one; nothing without CUDA."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Begins the capture of a graph on the current stream."""
        self._uses = 0 if self._memory is None else self._memory.use_count()
        # Other threads may use CUDA meanwhile; only this thread's unsafe calls are errors.
        graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends it. The graph may be empty, as between two breaks in a row."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()

    def recover_from_failed_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """Makes allocators and random generators usable after `end` raised for a graph.

        The generators refuse to run outside of a capture until another one succeeds: that of the anchor. The
        host's allocator keeps recording to the old pool, so later captures get new memory.
        """
        assert self._memory is not None
        with torch.cuda.device(self.device):
            end_failed_capture(graph, self._memory, self._uses)
        self._superseded.append(self._memory)
        self._renew_memory()
        self._set_anchor()

    def retire(self) -> None:
        """Returns the memory to the device, after all captures are released."""
        self.used_bytes = 0
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            self._superseded.clear()
            self._renew_memory()
            torch.cuda.empty_cache()

    def _renew_memory(self) -> None:
        self._anchor = None
        self._memory = memory_pool(self.device)
        self._allocated.clear()

    def _set_anchor(self) -> None:
        """Captures an empty graph, unless there is one, and holds it as long as the memory.

        The host's allocator counts the graphs of a pool, and never captures to one again whose count was zero
        ("use_count > 0 INTERNAL ASSERT FAILED").
        """
        if self._anchor is None:
            anchor = torch.cuda.CUDAGraph()
            self.begin(anchor)
            self.end(anchor)
            self._anchor = anchor

    # Bound here: at the interpreter's exit a module's names may be gone before its objects.
    def __del__(self, free_later: Callable[[Iterable[Any]], None] = free_later) -> None:
        free_later(self.__dict__.values())


# Entered for every request: a class takes a third of the time of a generator.
class _Replaying(contextlib.AbstractContextManager[None]):
    __slots__ = ("_pool", "_stream")

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        pool = self._pool
        self._stream: torch.cuda.Stream | None = None
        pool._lock.acquire()
        if not pool.is_cuda:
            return
        try:
            current = torch.cuda.current_stream(pool.device.index)  # of a number torch asks less
            if pool._last_replay is not None and pool._last_stream != current:
                current.wait_event(pool._last_replay)
            self._stream = current
        finally:
            if self._stream is None:
                pool._lock.release()

    def __exit__(self, *raised: object) -> None:  # what failed half-way may have enqueued work too
        pool = self._pool
        try:
            if self._stream is not None:
                if pool._last_replay is None:
                    pool._last_replay = torch.cuda.Event()
                pool._last_replay.record(self._stream)
                pool._last_stream = self._stream
        finally:
            pool._lock.release()


class RecordedOps:
    """Records ops with their arguments, and repeats them over the same memory: in place of a CUDA graph."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def record(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
    ) -> None:
        """Appends a call that was just made."""
        if _changes_no_data(call, args, kwargs, results):
            return
        # Aliases: what later changes a tensor's shape in place (`unsqueeze_`) leaves them as they are.
        kept = tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), dict(kwargs), results))
        self._calls.append((call, *kept))

    def replay(self) -> None:
        """Repeats every call, and writes its results to the memory of those recorded."""
        for call, args, kwargs, results in self._calls:
            made = call(*args, **kwargs)
            if is_collective(call):
                wait_for(made)  # else its result may come later
            copy_results(results, made)


def _changes_no_data(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> bool:
    if torch.Tag.inplace_view in getattr(call, "tags", ()):
        return True
    given, made = tensors_in((tuple(args), dict(kwargs))), tensors_in(results)
    if not given and not made:  # a marker of the profiler, say
        return True
    # `reshape` is called a view and may yet copy.
    memory = {storage_address(tensor) for tensor in given}
    return bool(getattr(call, "is_view", False)) and all(storage_address(tensor) in memory for tensor in made)
