"""How a program's steps are recorded: pieces into graphs, splitting ops into them too, or between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fxsplit_encoder.attention import KnownSegments, varlen_attention
from fxsplit_encoder.capture.breaks import RecordedBreak, name_of
from fxsplit_encoder.capture.eager_attention import LiveSegments, break_at_attention
from fxsplit_encoder.capture.memory import OwnedBuffers
from fxsplit_encoder.capture.segmented import SegmentedCapture
from fxsplit_encoder.compile import Step
from fxsplit_encoder.compile.program import DirectRunner


class ExactRunner(DirectRunner):
    """Runs at the exact shape, with the batch's own segments in place of the traced bound.

    The bound that a trace carries is often the token count: right for every batch, but FlashAttention 2
    launches blocks for it.

    Args:
        segments: those that attention reads and the host knows.
    """

    def __init__(self, segments: Iterable[KnownSegments]) -> None:
        self.live = LiveSegments(None, segments)

    def run_split(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the op; attention on the batch's own segments."""
        if step.call is varlen_attention:
            query, key, value, cu_seqlens, _, scale = args
            known = self.live.of(cu_seqlens)
            if known is not None:
                return known.attend(query, key, value, scale)
        return step.call(*args, **kwargs)


class RecordingRunner:
    """Runs a region's steps inside a `SegmentedCapture`."""

    def __init__(self, capture: SegmentedCapture, *, breaks: bool, live: LiveSegments) -> None:
        self.capture = capture
        self.breaks = breaks
        self.live = live
        self._attention_buffers = OwnedBuffers()
        self._buffers = OwnedBuffers()

    def run_piece(self, step: Step, args: Sequence[Any]) -> Any:
        """Records the piece into the running graph."""
        self.capture.running = step.name
        return self.capture.captured(step.call, *args)

    def run_split(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Records the op into the running graph, or breaks the graph there."""
        self.capture.running = name_of(step.call)
        if step.call is not varlen_attention:
            return self._run_op(step, args, kwargs)
        if self.breaks:
            # The pieces around it mask pad rows.
            return break_at_attention(
                self.capture, self._attention_buffers, self.live, tuple(args), masked=False
            )
        self.live.note(args[0], args[3], args[4])
        return self.capture.captured(step.call, *args, **kwargs)

    def _run_op(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.breaks:
            return self.capture.captured(step.call, *args, **kwargs)
        recorded = RecordedBreak(step.call, args, kwargs, self.capture.pool, self._buffers)
        return self.capture.eager(recorded, lambda: recorded.first_run(args, kwargs))
