"""`SegmentedCapture`: a forward as a list of callables, each the replay of a CUDA graph or an eager step.

Modes differ only in where they break: `full` nowhere, `piecewise` at every splitting op. Without CUDA the
same class records the calls themselves and replays them over the same tensors, so that all but the graph is
tested on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from fxsplit_encoder.capture.pool import GraphPool


class SegmentedCapture:
    """Records while it is a context; replays after.

    Inside the context, every call goes through `captured` (part of a graph) or `eager` (ends the running
    graph, runs now and at every replay). What they return lives at fixed addresses for as long as this object
    does.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.segments: list[Callable[[], Any]] = []
        self.num_graphs = 0
        self.num_eager_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kept: list[Any] = []
        self._scope: Any = None

    def __enter__(self) -> SegmentedCapture:
        if self.segments:
            raise CaptureError("this capture has recorded already; make a new one")
        self._scope = self.pool.capturing()
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._end_graph()
            else:
                self._abandon()
        finally:
            self._scope.__exit__(None, None, None)

    def captured(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a call a part of the running graph, beginning one if need be; returns its result."""
        if self.pool.is_cuda:
            self._begin_graph()
            return call(*args, **kwargs)
        result = call(*args, **kwargs)
        self._kept.append(result)
        self.segments.append(lambda: _copy_results(result, call(*args, **kwargs)))
        self.num_graphs += 1
        return result

    def eager(self, call: Callable[[], Any]) -> None:
        """Breaks the graph: `call` runs now and in its place at every replay, and owns what it writes."""
        self._end_graph()
        call()
        self.segments.append(call)
        self.num_eager_steps += 1

    def replay(self) -> None:
        """Runs every segment in order, on the current stream."""
        for segment in self.segments:
            segment()

    def _begin_graph(self) -> None:
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile; only this thread's unsafe calls are errors.
            self._graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")

    def _end_graph(self) -> None:
        if self._graph is not None:
            graph, self._graph = self._graph, None
            graph.capture_end()
            self.segments.append(graph.replay)
            self.num_graphs += 1

    def _abandon(self) -> None:
        """Leaves no open capture and no half recording behind an exception."""
        graph, self._graph = self._graph, None
        self.segments.clear()
        self._kept.clear()
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:
            self.pool.recover_from_failed_capture()


def _copy_results(kept: Any, new: Any) -> None:
    """Writes a replayed call's results to where the first call's are."""
    if isinstance(kept, torch.Tensor):
        if kept.data_ptr() != new.data_ptr():
            kept.copy_(new)
    elif isinstance(kept, list | tuple):
        for old, value in zip(kept, new, strict=True):
            _copy_results(old, value)
