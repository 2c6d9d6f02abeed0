"""`SegmentedCapture`: a forward as a list of callables, each the replay of a CUDA graph or an eager step.

Modes differ only in where they break: `full` nowhere, `piecewise` at every splitting op, `breakable` there
and wherever the code asks for it (`capture.breakable`). Without CUDA the same class records the calls
themselves and replays them over the same tensors, so that all but the graph is tested on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch

from fxsplit_encoder._torch.allocator import free_later
from fxsplit_encoder.capture.buffers import copy_results
from fxsplit_encoder.capture.pool import GraphPool, RecordedOps
from fxsplit_encoder.errors import CaptureError, ReplayError


class SegmentedCapture:
    """Records while it is a context; replays after.

    Inside the context, every call goes through `captured` (part of a graph) or `eager` (ends the running
    graph, runs now and at every replay). What they return lives at fixed addresses for as long as this object
    does.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.segments: list[Callable[[], Any]] = []
        """What a replay calls, in order."""
        self.num_graphs = 0
        self.num_eager_breaks = 0
        self.running: str | None = None
        """The op or piece that was called last, for the reason of a failure."""
        self._graph: torch.cuda.CUDAGraph | RecordedOps | None = None
        self._kept: list[Any] = []
        self._scope: Any = None
        self._is_complete = False

    def __enter__(self) -> Self:
        if self._is_complete:
            raise CaptureError("this capture has recorded already; make a new one")
        self._scope = self.pool.capturing()
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._check_stream()
                self._end_graph()
                self._is_complete = True
        finally:
            if not self._is_complete:
                self._abandon()
            self._scope.__exit__(None, None, None)

    def captured(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a call a part of the running graph, beginning one if need be; returns its result."""
        if self.pool.is_cuda:
            self._begin_graph()
        if self._graph is not None:
            result = call(*args, **kwargs)
            self.pool.note_allocated(result, (args, kwargs))
            return result
        result = call(*args, **kwargs)
        self._kept.append(result)
        self.segments.append(lambda: copy_results(result, call(*args, **kwargs)))
        self.num_graphs += 1
        return result

    def eager(self, call: Callable[[], Any], first: Callable[[], Any] | None = None) -> Any:
        """Breaks the graph: `call` runs at every replay in its place, and owns what it writes. Now `first`
        runs if there is one, else `call`; returns its result.

        Raises:
            CaptureError: the current stream is another than the one that is captured.
        """
        self._check_stream()
        self._end_graph()
        result = (first or call)()
        self.segments.append(call)
        self.num_eager_breaks += 1
        return result

    def replay(self) -> None:
        """Runs every segment in order, on the current stream.

        Raises:
            ReplayError: nothing is recorded, or not to its end.
        """
        if not self._is_complete:
            raise ReplayError("nothing to replay: the capture has not ended, has failed, or was released")
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.replay()
        for segment in self.segments:
            segment()

    def release(self) -> None:
        """Drops graphs and eager steps; their memory returns to the pool, and the object records again."""
        free_later(self.segments)
        self.segments.clear()
        self._kept.clear()
        self.num_graphs = self.num_eager_breaks = 0
        self._is_complete = False

    def _check_stream(self) -> None:
        """A graph ends on the stream that it began on, and a replay runs its steps on one stream."""
        own = self.pool.stream
        if own is not None and torch.cuda.current_stream(self.pool.device) != own:
            raise CaptureError(
                "a break or the end of the capture was reached on another stream than the captured one; let "
                "the captured stream wait for the other, and leave it, before that"
            )

    def _new_graph(self) -> torch.cuda.CUDAGraph | RecordedOps:
        return torch.cuda.CUDAGraph()

    def _begin_graph(self) -> None:
        if self._graph is None:
            self._check_stream()
            self._graph = self._new_graph()
            self.pool.begin(self._graph)

    def _end_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            self.pool.end(graph)
        except RuntimeError:
            if isinstance(graph, torch.cuda.CUDAGraph):
                self.pool.recover_from_failed_capture(graph)
            raise
        self.segments.append(graph.replay)
        self.num_graphs += 1

    def _abandon(self) -> None:
        """Ends an open capture after an exception, on the stream on which its graph began."""
        with self.pool.on_stream(), contextlib.suppress(RuntimeError):
            self._end_graph()
        self.release()

    # Bound here: at the interpreter's exit a module's names may be gone before its objects.
    def __del__(self, free_later: Callable[[Iterable[Any]], None] = free_later) -> None:
        free_later(self.__dict__.values())
