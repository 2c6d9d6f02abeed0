"""`CapturedForward`: one forward captured at one size, with its static inputs, its outputs and its memory."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.attention import KnownSegments
from fxsplit_encoder.capture.runner import LiveSegments, RecordingRunner, borrowed
from fxsplit_encoder.capture.segmented import SegmentedCapture
from fxsplit_encoder.capture.segments import pad_cu_seqlens, pad_cu_seqlens_on_device
from fxsplit_encoder.compile import DIRECT
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError, FxSplitError, ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from fxsplit_encoder.capture.buffers import StaticInputs, StaticValue
    from fxsplit_encoder.capture.parameters import StaticParameters
    from fxsplit_encoder.capture.pool import GraphPool
    from fxsplit_encoder.compile import Runner

    Forward = Callable[[Runner], Sequence[Any]]

_WARMUPS = 2

# Milliseconds that timing one thing may take before it is cut short.
_LONG_MS = 100.0


class CapturedForward:
    """Replays a forward over static inputs.

    Args:
        inputs: the static inputs that the forward reads.
        segment_inputs: names of the inputs that are cumulative lengths of attention.
        rows: tokens (rows) that the capture holds.
        num_rows: where the forward's masks read the number of real rows; None if it has none.
        mode: "full" or "piecewise".
    """

    def __init__(
        self,
        inputs: StaticInputs,
        parameters: StaticParameters,
        segment_inputs: Sequence[str],
        rows: int,
        num_rows: Tensor | None,
        mode: str,
        pool: GraphPool,
    ) -> None:
        self.inputs = inputs
        self.parameters = parameters
        self.segment_inputs = tuple(segment_inputs)
        self.rows = rows
        self.num_rows = num_rows
        self.mode = mode
        self.pool = pool
        self.capture = SegmentedCapture(pool)
        self.live = LiveSegments()
        self.outputs: list[Any] = []
        self.output_addresses: list[int] = []
        self.num_bytes = 0

    def record(self, forward: Forward) -> None:
        """Warms the forward up at full depth, then captures it.

        Raises:
            CaptureMemoryError: out of device memory, or over the pool's limit. Nothing is kept.
            CaptureError: the forward did something that cannot be captured. Nothing is kept.
        """
        before = self.pool.reserved_bytes()
        try:
            with torch.inference_mode(False), torch.no_grad():
                if self.pool.is_cuda:
                    with self.pool.capturing():
                        for _ in range(_WARMUPS):
                            forward(DIRECT)
                    torch.cuda.synchronize(self.pool.device)
                    before = self.pool.reserved_bytes()
                with self.capture:
                    self.outputs = list(self._record_steps(forward))
        except torch.OutOfMemoryError as error:
            raise CaptureMemoryError(f"out of memory while capturing {self.rows} rows: {error}") from error
        except FxSplitError:
            raise
        except Exception as error:  # whatever a captured forward raises costs its budget, not the others'
            raise CaptureError(
                f"capturing {self.rows} rows failed: {type(error).__name__}: {error}"
            ) from error
        if self.pool.is_cuda:
            # The pool owns the memory, so that the next, smaller capture may use it too: replays exclude one
            # another, and what a replay returns is copied before the next.
            self.outputs = [borrowed(t) if isinstance(t, torch.Tensor) else t for t in self.outputs]
        self.output_addresses = [t.data_ptr() for t in self.outputs if isinstance(t, torch.Tensor)]
        self.num_bytes = (
            self.pool.reserved_bytes() - before if self.pool.is_cuda else _num_bytes(self.outputs)
        )
        try:
            self.pool.charge(self.num_bytes, f"the capture of {self.rows} rows")
        except CaptureMemoryError:
            self.release()
            raise

    def _record_steps(self, forward: Forward) -> Sequence[Any]:
        if self.mode == "full" and not self.pool.is_cuda:
            # Replaying the forward as one call keeps no intermediate value, as a graph's pool keeps none for
            # others.
            return self.capture.captured(forward, DIRECT)  # type: ignore[no-any-return]
        return forward(RecordingRunner(self.capture, breaks=self.mode == "piecewise", live=self.live))

    def load(self, values: Mapping[str, StaticValue | None], rows: int | None) -> None:
        """Fills the static inputs with a batch of `rows` rows (None: as many as before), padded.

        Cumulative lengths are extended by empty segments. Those on the CPU are checked, and eager attention
        steps then see the true segments; those on another device are not read.

        Raises:
            ReplayError: something does not fit; nothing has been copied then.
        """
        padded = dict(values)
        known: list[KnownSegments] = []
        for name in self.segment_inputs:
            given = values.get(name)
            if not isinstance(given, torch.Tensor):
                continue
            buffer = self.inputs.buffers[name].tensor
            if given.device.type == "cpu":
                padded[name] = pad_cu_seqlens(given, buffer.shape[0], self.rows)
                if self.mode == "piecewise":  # nothing else reads them
                    known.append(KnownSegments(buffer[: given.shape[0]], given.tolist()))
            else:
                padded[name] = pad_cu_seqlens_on_device(given, buffer.shape[0])
        self.inputs.load(padded)
        if self.num_rows is not None and rows is not None:
            self.num_rows.fill_(rows)
        if len(known) == len(self.segment_inputs):
            self.live.set(rows, known)
        else:
            self.live.clear()

    def replay(self, *, debug: bool = False) -> list[Any]:
        """Runs the captured forward on what the static inputs hold; returns its outputs, which the next
        replay overwrites.

        Raises:
            ReplayError: a captured address has changed.
        """
        self.parameters.check_addresses()
        if debug:
            self.inputs.check_addresses()
            addresses = [t.data_ptr() for t in self.outputs if isinstance(t, torch.Tensor)]
            if addresses != self.output_addresses:
                raise ReplayError("a captured output has moved; outputs must not be resized or replaced")
        with torch.no_grad():
            self.capture.replay()
        return self.outputs

    def measure(self, repeats: int = 5) -> float:
        """Median milliseconds of a replay on what the static inputs hold."""
        return measure_ms(self.replay, self.pool.device, repeats)

    def release(self) -> None:
        """Drops graphs and outputs; their memory returns to the pool."""
        self.capture.segments.clear()
        self.capture = SegmentedCapture(self.pool)
        self.outputs = []


def _num_bytes(values: Sequence[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def measure_ms(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Median milliseconds of a call after one warm-up, to the end of its device work.

    Fewer than `repeats` are timed where they take long.
    """
    call()
    times: list[float] = []
    while len(times) < repeats and (len(times) < 2 or sum(times) < _LONG_MS):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median_low(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
