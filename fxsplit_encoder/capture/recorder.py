"""How a program is recorded: its pieces into graphs, its splitting ops into them too, or between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxsplit_encoder.attention import varlen_attention
from fxsplit_encoder.capture.breaks import RecordedBreak, name_of
from fxsplit_encoder.capture.eager_attention import LiveSegments, break_at_attention
from fxsplit_encoder.capture.memory import OwnedBuffers
from fxsplit_encoder.capture.segmented import SegmentedCapture
from fxsplit_encoder.compile.branches import StepBranches

if TYPE_CHECKING:
    from fxsplit_encoder.compile import Step


class StepRecorder:
    """Calls the steps of a region inside a `SegmentedCapture`.

    Args:
        breaks: whether graphs end at splitting ops, which then run eagerly at every replay.
        live: the segments of the batch that is replayed, for attention between graphs.
    """

    def __init__(self, capture: SegmentedCapture, *, breaks: bool, live: LiveSegments) -> None:
        self.capture = capture
        self.breaks = breaks
        self.live = live
        self._attention_buffers = OwnedBuffers()
        self._buffers = OwnedBuffers()
        # A graph ends with all its branches, and between graphs the host launches what would run beside.
        self._branches = StepBranches(capture.pool.device, active=not breaks)

    def record(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a step as part of the running graph, or breaks the graph there; returns its result."""
        is_attention = step.call is varlen_attention
        breaks = self.breaks and step.kind == "split"
        self.capture.running = step.name if step.kind == "piece" else name_of(step.call)
        if breaks and is_attention:
            # The pieces around it mask pad rows.
            return break_at_attention(
                self.capture, self._attention_buffers, self.live, tuple(args), masked=False
            )
        if breaks:
            recorded = RecordedBreak(step.call, args, kwargs, self.capture.pool, self._buffers)
            return self.capture.eager(recorded, lambda: recorded.first_run(args, kwargs))
        if is_attention:
            self.live.note(args[0], args[3], args[4])
        return self.capture.captured(self._branches.placed(step), *args, **kwargs)

    def finish(self) -> None:
        """Behind the last step: what runs beside ends in the running graph."""
        self._branches.join()
