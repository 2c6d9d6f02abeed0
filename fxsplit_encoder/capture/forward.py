"""One forward captured at one size, with its static inputs, outputs and memory; and how calls are timed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import OutOfMemoryError, Tensor, nn

from fxsplit_encoder.capture.breakable import (
    DEFAULT_SPLITTING_OPS,
    Attended,
    BreakableCUDAGraphCapture,
    LiveSegments,
    SegmentedCapture,
    name_of,
)
from fxsplit_encoder.capture.buffers import StaticValue
from fxsplit_encoder.capture.inputs import (
    StaticInputs,
    fill_cu_seqlens,
    pad_cu_seqlens,
    pad_cu_seqlens_on_device,
)
from fxsplit_encoder.capture.parameters import CheckedParameters, StaticParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.compile.branches import StepBranches
from fxsplit_encoder.compile.derived import DerivedParameters
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError, FxSplitError, ReplayError
from fxsplit_encoder.kernels.attention import KnownSegments, varlen_attention
from fxsplit_encoder.pauses import pause, recording

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import Bindings, Program


class RowCount:
    """The number of real rows, which masks read on the device; the host writes only changes."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tensor = torch.full((), rows, dtype=torch.int64, device=device)
        self._rows = rows

    def set(self, rows: int) -> None:
        """Takes effect for later work on the current stream."""
        if rows != self._rows:
            self.tensor.fill_(rows)
            self._rows = rows


@dataclass(frozen=True, slots=True)
class ProgramBody:
    """A program of one size over static inputs."""

    program: Program
    bindings: Bindings
    """With the static inputs in their slots."""

    def __call__(self, segments: Iterable[KnownSegments] = ()) -> list[Any]:
        """Runs the region; `segments` as for `Program.finish`."""
        return self.program.finish(self.bindings.copy(), segments)


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One size of a forward, ready to be captured."""

    inputs: StaticInputs
    body: ProgramBody | Callable[[], Sequence[Any]]
    """Runs over the tensors of `inputs`: a program, step by step, or a module's own code."""
    parameters: CheckedParameters
    rows: int | None
    """Tokens (rows) of the capture; None: it is never padded."""
    segment_inputs: Sequence[str] = ()
    """Cumulative lengths of attention. Those of a module's own code are found at the capture."""
    num_rows: RowCount | None = None
    single_segment: Callable[[], CaptureRequest] | None = None
    """Makes the same request for one segment: empty ones cost time (benchmarks/cases/attention.py)."""
    splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS
    """Where a module's own code breaks in mode "breakable"."""
    is_alone: bool = False
    """As for `BreakableCUDAGraphCapture`."""
    lengths: Sequence[str] = ()
    """Inputs of a module's own code that look like cumulative lengths."""

    @property
    def modes(self) -> list[str]:
        """The modes in which it can be captured."""
        if not isinstance(self.body, ProgramBody):
            return ["full", "breakable"]
        return ["full", "piecewise"] if self.body.program.splits else ["full"]

    def exact_body(self) -> Callable[[], Any]:
        """Returns the body as it runs at the exact shape, on one segment as long as the rows."""
        single = self.single_segment() if self.single_segment is not None else self
        body = single.body
        if not isinstance(body, ProgramBody) or not single.segment_inputs:
            return body
        rows = single.rows
        assert rows is not None
        lengths = [single.inputs.tensors[name] for name in single.segment_inputs]
        # Of frames, that is: windows, which are cut much finer, keep the bound that was traced.
        frames = [KnownSegments(each, [0, rows]) for each in lengths if each.shape[0] == 2]
        return functools.partial(body, frames)


WARMUPS = 2
"""Runs of a forward before it is captured: the first prepares what is prepared once."""


class CapturedForward:
    """Replays a forward over static inputs, in mode "full", "piecewise" (of a program) or "breakable" (of a
    module's own code).
    """

    def __init__(self, request: CaptureRequest, mode: str, pool: GraphPool) -> None:
        self.inputs = request.inputs
        self.parameters = request.parameters
        self.segment_inputs = tuple(request.segment_inputs)
        self._lengths = tuple(request.lengths)
        self.rows = request.rows
        self.num_rows = request.num_rows
        self.mode = mode
        self.pool = pool
        self.compiled = isinstance(request.body, ProgramBody)
        assert not (self.compiled and mode == "breakable"), "a program breaks in mode piecewise"
        self.live = LiveSegments()
        self.capture = (
            SegmentedCapture(pool, self.live)
            if self.compiled
            else BreakableCUDAGraphCapture(
                pool,
                splitting_ops=request.splitting_ops,
                breaks=mode == "breakable",
                live=None if self.rows is None else self.live,
                is_alone=request.is_alone,
            )
        )
        self._body = request.body
        self._derived = (
            request.body.program.derived if isinstance(request.body, ProgramBody) else DerivedParameters()
        )
        self._derived_stamp: object = None  # of the last replay that checked parameters
        self._compared: object = None  # memory of the graph's comparison of derived parameters' sources
        self.outputs: list[Any] = []
        self.output_addresses: list[int] = []
        self.num_bytes = 0
        self.for_one_segment: CapturedForward | None = None
        """A full graph for batches of one segment, which is released with this one."""
        self.must_be_full = False
        """Whether batches may leave only segments to padding."""
        self._weights: object = None
        """Holds the memory of parameters, which a replay reads before their addresses are checked."""
        self._boundaries: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        """The cumulative lengths loaded last, of inputs that the host knows: as given, and as numbers."""
        self._loaded_rows: int | None = None
        """Of the batch; None: cumulative lengths tell them, if any."""

    @property
    def is_unbroken(self) -> bool:
        """Whether this is a graph of a module's own code that no mode would break."""
        capture = self.capture
        return isinstance(capture, BreakableCUDAGraphCapture) and not (capture.breaks or capture.met_break)

    def record(self, warmups: int = WARMUPS) -> None:
        """Warms the forward up at full depth, then captures it. Keeps nothing if it fails. CaptureError: it
        cannot be captured; names the op and the module, if known. CaptureMemoryError: out of memory.
        """
        what = "one shape" if self.rows is None else f"{self.rows} rows"
        if self.pool.is_cuda:
            self._warm_up(warmups, what)
        with recording():
            self._record(what)

    def _warm_up(self, runs: int, what: str) -> None:
        with self._failing(what), torch.inference_mode(False), torch.no_grad():
            with self.pool.warming():
                for _ in range(runs):
                    self._body()
            torch.cuda.current_stream(self.pool.device).synchronize()

    def _record(self, what: str) -> None:
        before = self.pool.reserved_bytes()
        with self._failing(what), torch.inference_mode(False), torch.no_grad():
            with self.capture:
                self.outputs = list(self._record_steps())
            if isinstance(self.capture, BreakableCUDAGraphCapture):
                assert isinstance(self.parameters, StaticParameters)
                self.parameters = self.parameters.with_those_at(self.capture.read)
            self._weights = self.parameters.memory()
        # The pool owns the memory, so that the next, smaller capture may use it too: replays exclude one
        # another, and what a replay returns is copied before the next.
        self.outputs = [self.pool.hold(t) if isinstance(t, torch.Tensor) else t for t in self.outputs]
        self.output_addresses = [t.data_ptr() for t in self.outputs if isinstance(t, torch.Tensor)]
        if self.pool.is_cuda:
            self.num_bytes = self.pool.reserved_bytes() - before
        else:
            self.num_bytes = sum(t.nbytes for t in self.outputs if isinstance(t, torch.Tensor))
        if not self.compiled:
            self._find_segment_inputs()
        self.pool.used_bytes += self.num_bytes

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            place = _place(error.__traceback__, self.capture.running)
            if isinstance(error, OutOfMemoryError):
                # A stored error would keep alive what the frames hold.
                traceback.clear_frames(error.__traceback__)
                for frame, _ in traceback.walk_tb(error.__traceback__):
                    # Before Python 3.13 a frame keeps the dictionary that was asked of it; asking again
                    # empties it.
                    _ = frame.f_locals
                raise CaptureMemoryError(f"out of memory while capturing {what}{place}: {error}") from error
            if isinstance(error, FxSplitError) and not isinstance(error, CaptureError):
                raise
            reason = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
            raise CaptureError(f"capturing {what} failed{place}: {reason}") from error

    def _record_steps(self) -> Sequence[Any]:
        body = self._body
        if not isinstance(body, ProgramBody):
            return body()
        if self.pool.is_cuda and self._derived.recipes:
            self._compared = self.capture.captured(self._derived.compare)
        if self.mode == "full" and not self.pool.is_cuda:
            # Replaying the forward as one call keeps no intermediate value, as a graph's pool keeps none for
            # others.
            return self.capture.captured(body)  # type: ignore[no-any-return]
        breaks = self.mode == "piecewise"
        # A graph ends with all its branches, and between graphs the host launches what would run beside.
        branches = StepBranches(self.pool.device, active=not breaks)
        program, bindings = body.program, body.bindings.copy()
        program.fill_num_rows(bindings)
        for step in program.region:
            args, kwargs = bindings.arguments(step)
            is_attention = step.call is varlen_attention
            self.capture.running = step.name if step.kind == "piece" else name_of(step.call)
            if not (breaks and step.kind == "split"):
                if is_attention:
                    self.live.note(args[0], args[3], args[4])
                result = self.capture.captured(functools.partial(branches.run, step), *args, **kwargs)
            elif is_attention:
                result = self.capture.break_at_attention(tuple(args), masked=False)  # pieces mask pad rows
            else:
                result = self.capture.break_at(step.call, args, kwargs)
            bindings.store(step, result)
        branches.join()
        return program.results(bindings)

    def _find_segment_inputs(self) -> None:
        self.segment_inputs = tuple(
            name
            for name, buffer in self.inputs.buffers.items()
            if name in self.segment_inputs or (self._attended(name) and buffer.padding_logic is None)
        )
        for name in self._lengths:  # another library's attention reads them
            if name not in self.segment_inputs:
                self.inputs.buffers[name].padding_logic = fill_cu_seqlens

    def _attended(self, name: str) -> Attended | None:
        return self.live.attended.get(self.inputs.buffers[name].tensor.data_ptr())

    def _captured_rows(self, name: str) -> int:
        attended = self._attended(name)
        if attended is not None:
            return attended.rows
        assert self.rows is not None
        return self.rows

    def load(self, values: Mapping[str, StaticValue | None], rows: int | None) -> None:
        """Fills the static inputs with a batch of `rows` rows (None: as many as before), padded by empty
        segments; ReplayError where something does not fit, before anything is copied. Eager attention
        reads the real segments of cumulative lengths on the CPU; those on a device are not read.
        """
        if self.must_be_full:
            # A program is captured only where empty segments change nothing.
            self.inputs.check_full(values, but=self.segment_inputs if self.compiled else ())
        padded, held, boundaries = self._prepared(values)
        self.inputs.load(padded, held)
        self._boundaries = boundaries
        if self.compiled:
            for name, buffer in self.inputs.buffers.items():
                if name not in held:
                    buffer.remember(values.get(name))
        self._loaded_rows = rows
        if self.num_rows is not None and rows is not None:
            self.num_rows.set(rows)
        if self.mode != "full":  # nothing else reads them
            self._set_live(rows)

    def _prepared(
        self, values: Mapping[str, StaticValue | None]
    ) -> tuple[dict[str, StaticValue | None], set[str], dict[str, tuple[Tensor, tuple[int, ...]]]]:
        """The values with lengths padded, the names of those already in place, and the lengths known here."""
        padded: dict[str, StaticValue | None] = dict(values)
        held: set[str] = set()
        boundaries: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        for name, buffer in self.inputs.buffers.items():
            value, known = values.get(name), None
            if name in self.segment_inputs and isinstance(value, torch.Tensor):
                known = self._boundaries.get(name)
                # Another capture over the same buffer may have loaded lengths that are not known here.
                if not (self.compiled and known is not None and known[0] is value and buffer.holds(value)):
                    entries = buffer.tensor.shape[0]
                    if value.device.type != "cpu":
                        padded[name] = pad_cu_seqlens_on_device(value, entries)
                        continue
                    lengths = tuple(value.tolist())
                    boundaries[name] = value, lengths
                    padded[name] = pad_cu_seqlens(lengths, entries, self._captured_rows(name))
                    continue
            # What is captured as it is called may write to its inputs; a program does not.
            if self.compiled and buffer.holds(value):
                held.add(name)
                padded[name] = None
                if known is not None:
                    boundaries[name] = known
        return padded, held, boundaries

    def _set_live(self, rows: int | None) -> None:
        if len(self._boundaries) < len(self.segment_inputs):
            self.live.set(None, ())
            return
        known = []
        for name, (_, lengths) in self._boundaries.items():
            buffer = self.inputs.buffers[name].tensor
            known.append(KnownSegments(buffer[: len(lengths)], lengths))
        self.live.set(rows, known)

    def replay(self, *, debug: bool = False, parameters_are_checked: bool = False) -> list[Any]:
        """Runs the captured forward on the static inputs; returns its outputs, which the next replay
        overwrites. WeightsMovedError: parameters lie elsewhere than at the capture. ReplayError: another rule
        was found broken.

        Args:
            debug: whether to check every rule (as listed below), which waits for the device.
            parameters_are_checked: whether the caller checked them, but for writes that leave no version.
        """
        derived = self._derived
        if debug:
            self.parameters.check_addresses()
            derived.refresh()
            self._check_before_replay()
        derived.follow_writes()
        try:
            self.capture.replay()
        except (RuntimeError, AssertionError):
            # Recorded steps run on parameters as they are now, which may be cast or laid out anew.
            self.parameters.check_addresses()
            raise
        if not parameters_are_checked:
            # While the device works, which takes longer. Should one have moved, the replay has read what is
            # still held for it, and its outputs reach nobody. Should one have changed that is kept in another
            # form, the capture runs once more on the new one.
            self.parameters.check_addresses()
            if derived.refresh(self._derived_stamp):
                self.capture.replay()
            self._derived_stamp = derived.stamp
        if debug:
            self._check_output_padding()
        return self.outputs

    def _check_before_replay(self) -> None:
        outputs = [output for output in self.outputs if isinstance(output, torch.Tensor)]
        places = [(name, each.tensor, each.address) for name, each in self.inputs.buffers.items()]
        for number, (output, address) in enumerate(zip(outputs, self.output_addresses, strict=True)):
            places.append((f"output {number}", output, address))
        for name, tensor, address in places:
            if (now := tensor.data_ptr()) != address:
                raise ReplayError(
                    f"capture rule 6: {name}: its captured buffer moved from {address:#x} to {now:#x}; "
                    "static inputs and outputs must not be resized or replaced"
                )
        for name, buffer in self.inputs.buffers.items():
            if name in self.segment_inputs:
                _check_lengths(name, buffer.tensor, self._captured_rows(name), self._attended(name))
            elif buffer.token_dim is not None:
                _check_finite(buffer.name, buffer.tensor, buffer.token_dim, buffer.dirty_rows)

    def _check_output_padding(self) -> None:
        real, rows = self._loaded_rows, self.rows
        for name in self.segment_inputs if real is None or rows is None else ():
            real, rows = int(self.inputs.buffers[name].tensor[-1]), self._captured_rows(name)
        if real is None or rows is None:
            return
        for number, output in enumerate(self.outputs):
            if isinstance(output, torch.Tensor) and output.dim():
                _check_finite(f"output {number}", output, 0, -(-real * output.shape[0] // rows))

    def measure(self) -> float:
        """Measures the least milliseconds of a replay on the static inputs."""
        return measure_ms(self.replay, self.pool.device)

    def release(self) -> None:
        """Drops graphs and outputs; their memory returns to the pool."""
        if self.for_one_segment is not None:
            self.for_one_segment.release()
        self.capture.release()
        self.outputs = []
        self.output_addresses = []
        self._weights = self._compared = None


def _place(frames: TracebackType | None, running: str | None) -> str:
    modules = [
        frame.f_locals["self"]
        for frame, _ in traceback.walk_tb(frames)
        if isinstance(frame.f_locals.get("self"), nn.Module)
    ]
    place = f" at {running}" if running is not None else ""
    if not modules:
        return place
    root, innermost = modules[0], modules[-1]
    name = next((name for name, module in root.named_modules() if module is innermost), "")
    return f"{place} in {type(innermost).__name__}" + (f" ({name})" if name else "")


# What `debug` checks at every replay, by capture rule. They read values on the host, so a debugged replay
# waits for the device.
#
#     1  pad rows are finite, of inputs and of outputs
#     2  cumulative lengths rise from 0, end within the captured rows, and keep the captured bound
#     6  inputs and outputs are where they were at the capture


def _check_lengths(name: str, cu_seqlens: Tensor, rows: int, attended: Attended | None) -> None:
    """Raises ReplayError unless cumulative lengths fit `rows` and the captured bound (capture rule 2)."""
    lengths = cu_seqlens.tolist()
    if lengths[0] != 0:
        raise ReplayError(f"capture rule 2: {name}: starts at {lengths[0]}; cumulative lengths start at 0")
    for entry, (start, end) in enumerate(itertools.pairwise(lengths), start=1):
        if end < start:
            raise ReplayError(f"capture rule 2: {name}: entry {entry} falls from {start} to {end}")
        if attended is not None and end - start > attended.bound:
            raise ReplayError(
                f"capture rule 2: {name}: segment {entry - 1} has {end - start} rows; attention was captured "
                f"for at most {attended.bound}"
            )
    if lengths[-1] > rows:
        raise ReplayError(f"capture rule 2: {name}: ends at {lengths[-1]}; the capture has {rows} rows")


def _check_finite(name: str, tensor: Tensor, dim: int, first: int) -> None:
    if not tensor.is_floating_point() or first >= tensor.shape[dim]:
        return
    pad = tensor.narrow(dim, first, tensor.shape[dim] - first)
    finite = pad.isfinite().movedim(dim, 0).flatten(1).all(1) if pad.dim() > 1 else pad.isfinite()
    if not finite.all():
        row = first + int((~finite).nonzero()[0])
        raise ReplayError(
            f"capture rule 1: {name}: pad row {row} is not finite; the batch ends at row {first}"
        )


# --- timing

REPEATS = 3

# Milliseconds after which two are enough: a good part of capturing a ladder is waiting for what is timed.
_LONG_MS = 30.0

# The host's share of a run from which on the device is taken to keep up with it. A choice.
_BOUND_BY_HOST = 0.9

# Before another run of what takes longer, requests may go first.
_PAUSE_MS = 10.0


class MeasuredRun(NamedTuple):
    """Least milliseconds of a call: what other processes take of a device or a processor only adds."""

    wall: float
    """To the end of its device work."""
    host: float
    """Until it returns."""

    @property
    def is_bound_by_host(self) -> bool:
        """Whether the device keeps up with the host, which is busy nearly all the time."""
        return self.host >= _BOUND_BY_HOST * self.wall


def measure_run(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> MeasuredRun:
    """Times a call on the current stream after one warm-up, less often if it is long, with pauses."""
    last = _timed(call, device)
    runs: list[MeasuredRun] = []
    while len(runs) < repeats and (len(runs) < 2 or sum(run.wall for run in runs) < _LONG_MS):
        if last.wall > _PAUSE_MS:
            pause()
        last = _timed(call, device)
        runs.append(last)
    walls, hosts = zip(*runs, strict=True)
    return MeasuredRun(min(walls), min(hosts))


def _timed(call: Callable[[], Any], device: torch.device) -> MeasuredRun:
    # For the stream, not the device: another thread may be capturing, which that would break.
    wait = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    host = (time.perf_counter() - start) * 1e3
    wait()
    return MeasuredRun((time.perf_counter() - start) * 1e3, host)


def measure_ms(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Measures the least milliseconds of a call after one warm-up, to the end of its device work."""
    return measure_run(call, device, repeats).wall
