"""Breakable capture: an eager module becomes CUDA graphs with eager steps between them.

with BreakableCUDAGraphCapture(pool) as capture:
    y = module(x)           # breaks at attention, and at what `eager_break_during_capture` decorates
x.copy_(other)
capture.replay()            # y holds the result for `other`

Its base, `SegmentedCapture`, also captures compiled programs. Without CUDA both record calls and replay them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from fxsplit_encoder._torch.allocator import free_later
from fxsplit_encoder._torch.dispatch import (
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from fxsplit_encoder._torch.distributed import calls_other_ranks, num_ranks
from fxsplit_encoder.capture.buffers import OwnedBuffers, storage_address, tensors_in, unstrided
from fxsplit_encoder.capture.pool import GraphPool, RecordedOps
from fxsplit_encoder.compile.options import DENSE_ATTENTION, splitting_targets
from fxsplit_encoder.errors import CaptureError, ReplayError
from fxsplit_encoder.kernels.attention import KnownSegments, attend, varlen_attention

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_SPLITTING_OPS = ("fxsplit::varlen_attention", DENSE_ATTENTION)

# Ops that read what a device computes on the host, so that no graph holds them. CUDA refuses them too, but
# after it has invalidated the capture; here they are refused before.
_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)
_MASKS = (torch.bool, torch.uint8)
_NUMBERS = ("bool", "int", "float", "complex", "number")
# What the host knows of a tensor without its values.
_METADATA = frozenset(
    """size stride numel dim storage_offset sym_size sym_stride sym_numel sym_storage_offset is_contiguous
    sym_is_contiguous is_pinned is_set_to is_same_size is_coalesced sparse_dim dense_dim _dimI _dimV q_scale
    q_zero_point q_per_channel_axis _fused_sdp_choice _has_same_storage_numel _use_cudnn_ctc_loss
    _use_miopen_ctc_loss _nested_get_ragged_idx""".split()
)


_this_thread = threading.local()

# torch counts active dispatch modes in global variables, which two threads would leave in disorder: such
# captures are made one after the other.
_one_at_a_time = threading.RLock()


def active_capture() -> BreakableCUDAGraphCapture | None:
    """Returns the breakable capture that this thread is recording."""
    return getattr(_this_thread, "capture", None)


def eager_break_during_capture(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function or op that must run eagerly: it reads values on the host, say.

    While this thread records a `BreakableCUDAGraphCapture`, a call ends the running graph, runs eagerly, is
    recorded and begins the next graph. Inside another break, in mode "full", under `torch.compile` and
    outside of captures it is a plain call.

    At every replay it gets the recorded tensors, with their contents of that time. It may return tensors,
    None, numbers and strings, in tuples, lists and dicts; shapes and all that is not a tensor must stay the
    same. If it works on another CUDA stream, the current one has to wait for that before it returns.
    """
    is_op = isinstance(function, OpOverload | OpOverloadPacket)

    @functools.wraps(function, updated=() if is_op else functools.WRAPPER_UPDATES)
    def breaking(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = None if torch.compiler.is_compiling() else active_capture()
        if capture is None:
            return function(*args, **kwargs)
        result: R = capture.break_at(function, args, kwargs)
        return result

    return breaking


class SegmentedCapture:
    """Records calls as a list of callables, each the replay of a CUDA graph or an eager step."""

    def __init__(self, pool: GraphPool, live: LiveSegments | None = None) -> None:
        self.pool = pool
        self.live = LiveSegments() if live is None else live
        """The segments of the batch that is replayed, for attention between graphs."""
        self.segments: list[Callable[[], Any]] = []
        self.running: str | None = None
        """The op or piece that was called last, for error messages."""
        self._graph: torch.cuda.CUDAGraph | RecordedOps | None = None
        self._scope: Any = None
        self.release()

    def __enter__(self) -> Self:
        if self._is_complete:
            raise CaptureError("this capture has recorded already; make a new one")
        self._scope = self.pool.capturing()
        self._scope.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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
        """Calls as part of the running graph, or of a new one; returns the result."""
        self._begin_graph()
        results = call(*args, **kwargs)
        if (kind := unstrided(tensors_in(results))) is not None:
            raise CaptureError(f"{self.running} cannot be captured: it makes a {kind} tensor")
        if isinstance(self._graph, RecordedOps):
            self._graph.record(call, args, kwargs, results)
        else:
            self.pool.note_allocated(results, (args, kwargs))
        return results

    def eager(self, call: Callable[[], Any], first: Callable[[], Any] | None = None) -> Any:
        """Ends the graph, runs `first` or `call`, which replays run, and returns its result."""
        self._check_stream()
        self._end_graph()
        result = (first or call)()
        self.segments.append(call)
        self.num_eager_breaks += 1
        return result

    def break_at(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function as a break; CaptureError if its result cannot be kept at a fixed address."""
        step = RecordedBreak(function, args, kwargs, self.pool, self._buffers)
        self.running = step.name
        return self.eager(step, lambda: step.first_run(args, kwargs))

    def break_at_attention(
        self, args: tuple[Tensor, Tensor, Tensor, Tensor, int, float], *, masked: bool
    ) -> Tensor:
        """Breaks at `varlen_attention` over the real rows, with zero pad rows if `masked`."""
        buffers, live = self._attention_buffers, self.live  # a step that held this object would be a cycle
        query, key, value, cu_seqlens = (self.pool.hold(tensor) for tensor in args[:4])
        max_seqlen, scale = args[4:]
        live.note(query, cu_seqlens, max_seqlen)
        captured_rows = query.shape[0]
        real = (query, key, value)  # of the last replay: the same number of rows often comes again

        def attend_to_real_rows() -> None:
            nonlocal real
            known, rows = live.of(cu_seqlens), live.rows
            real_rows = captured_rows if rows is None else rows
            if real[0].shape[0] != real_rows:
                real = (query[:real_rows], key[:real_rows], value[:real_rows])
            if known is not None:
                known.attend_out(*real, scale, out)
            else:
                attend(*real, cu_seqlens, max_seqlen, scale, out)
            end = rows if known is None else known.boundaries[-1]
            if masked and end is not None:
                buffers.clear_behind(out, end)
            elif masked:
                _clear_pad_rows(out, cu_seqlens)

        out, result = buffers.acquire(query, torch.contiguous_format)
        self.eager(attend_to_real_rows)
        return result

    def replay(self) -> None:
        """Runs every segment in order, on the current stream; ReplayError unless a capture was completed."""
        if not self._is_complete:
            raise ReplayError("nothing to replay: the capture has not ended, has failed, or was released")
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.replay()
        for segment in self.segments:
            segment()

    def release(self) -> None:
        """Drops graphs, eager steps and their buffers; the object records again."""
        free_later(self.segments)
        self.segments.clear()
        self.num_graphs = self.num_eager_breaks = 0
        self._is_complete = False
        self._buffers = OwnedBuffers()
        # Of their own: what another step wrote, which need not be finite, must not become their pad rows.
        self._attention_buffers = OwnedBuffers()

    def _check_stream(self) -> None:
        own = self.pool.stream
        if own is not None and torch.cuda.current_stream(self.pool.device) != own:
            raise CaptureError(
                "a break or the end of the capture was reached on another stream than the captured one; let "
                "the captured stream wait for the other, and leave it, before that"
            )

    def _begin_graph(self) -> None:
        if self._graph is not None:
            return
        self._check_stream()
        if self.pool.is_cuda:
            self._graph = torch.cuda.CUDAGraph()
            self.pool.begin(self._graph)
        else:
            self._graph = RecordedOps()

    def _end_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            return
        if not isinstance(graph, RecordedOps):
            try:
                self.pool.end(graph)
            except RuntimeError:
                self.pool.recover_from_failed_capture(graph)
                raise
        self.segments.append(graph.replay)
        self.num_graphs += 1

    def _abandon(self) -> None:
        with self.pool.on_stream(), contextlib.suppress(RuntimeError):
            self._end_graph()
        self.release()

    # Bound here: at the interpreter's exit a module's names may be gone before its objects.
    def __del__(self, free_later: Callable[[Iterable[Any]], None] = free_later) -> None:
        free_later(self.__dict__.values())


class BreakableCUDAGraphCapture(SegmentedCapture):
    """Captures the ops inside its context, without gradients, and replays them.

    Results of captured ops keep their addresses as long as they are referred to. Warm the code up before. One
    context may be open in a thread; another thread waits to open its own. A function compiled by
    `torch.compile` runs eagerly inside.

    Args:
        pool: the memory; None: a new pool on the current CUDA device, or on the CPU.
        splitting_ops: names of ops that break.
        breaks: False: nothing breaks (mode "full").
        live: the segments of a padded batch, for eager attention; rows outside of them are then zero.
        is_alone: whether to refuse collectives where there are other ranks, which may not capture the same.
    """

    def __init__(
        self,
        pool: GraphPool | None = None,
        *,
        splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS,
        breaks: bool = True,
        live: LiveSegments | None = None,
        is_alone: bool = False,
    ) -> None:
        if pool is None:
            pool = GraphPool(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        super().__init__(pool, live)
        self.breaks = breaks
        self._is_alone = is_alone
        self._is_padded = live is not None
        self._targets = splitting_targets(splitting_ops)
        self._modes = contextlib.ExitStack()
        self.met_break = False
        """Whether anything broke, or would with `breaks`."""
        self.read: set[int] = set()
        """Addresses of the memory that ops read, breaks included."""

    def __enter__(self) -> Self:
        if active_capture() is not None:
            raise CaptureError(
                "this thread is recording another BreakableCUDAGraphCapture; captures do not nest"
            )
        with contextlib.ExitStack() as entered:
            super().__enter__()
            entered.push(super().__exit__)
            modes = entered.enter_context(contextlib.ExitStack())
            modes.enter_context(_one_at_a_time)
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
            self._begin_graph()
            modes.enter_context(_EveryOp(self))
            entered.pop_all()
        self._modes = modes
        self.read.clear()
        _this_thread.capture = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _this_thread.capture = None
        self._modes.close()
        if error is None and self._graph is None:  # nothing was recorded since
            error = CaptureError("a break failed inside this capture, so nothing of it is kept")
            super().__exit__(type(error), error, None)
            raise error
        super().__exit__(kind, error, traceback)

    def break_at(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function as a break, or as it is inside another one."""
        self.met_break = True
        if self._graph is None or not self.breaks:
            return function(*args, **kwargs)
        return super().break_at(function, args, kwargs)

    def eager(self, call: Callable[[], Any], first: Callable[[], Any] | None = None) -> Any:
        """As `SegmentedCapture.eager`, and begins the next graph."""
        with contextlib.ExitStack() as at_failure:
            at_failure.callback(self._abandon)
            result = super().eager(call, first)
            self._begin_graph()
            at_failure.pop_all()
        return result

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records or runs an op that was called in the context."""
        given = tensors_in((args, kwargs))
        self.read.update(storage_address(tensor) for tensor in given if unstrided([tensor]) is None)
        if self._graph is None:  # inside a break
            return op(*args, **kwargs)
        self.running = op.name()
        if (kind := unstrided(given)) is not None:
            raise CaptureError(f"{op.name()} cannot be captured: it reads a {kind} tensor")
        if self._is_alone and calls_other_ranks(op):
            refuse_collectives([op.name()])
        if op in self._targets:
            self.met_break = True
            if op is varlen_attention:
                return self._run_attention(args, kwargs)
            if self.breaks:
                return self.break_at(op, args, kwargs)
        refuse_synchronization(op, args, kwargs, self.pool.device)
        return self.captured(op, *args, **kwargs)

    def _run_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [argument.name for argument in schema_of(varlen_attention).arguments]
        args = (*args, *(kwargs[name] for name in names[len(args) :]))
        if self.breaks:
            return self.break_at_attention(args, masked=self._is_padded)
        self.live.note(args[0], args[3], args[4])
        return self.captured(masked_attention if self._is_padded else varlen_attention, *args)


class _EveryOp(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, capture: BreakableCUDAGraphCapture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._capture.run_op(func, args, kwargs or {})


def refuse_collectives(ops: Iterable[str]) -> None:
    """Raises CaptureError for ops that other ranks have to call as well, where there are others."""
    names = ", ".join(ops)
    if names and num_ranks() > 1:
        raise CaptureError(
            f"it calls other ranks ({names}), and nothing says which of them capture the same; pass the "
            "process_group of the ranks that share the weights"
        )


def refuse_synchronization(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> None:
    """Raises CaptureError if the op, called with these arguments, would wait for `device`."""
    if op in _COPIES:
        reason = _waiting_copy(args, kwargs, device)
    elif _depends_on_values(op, args, kwargs) and any(
        tensor.device.type == device.type for tensor in tensors_in((args, kwargs))
    ):
        reason = "the host needs values that the device computes"
    else:
        return
    if reason is not None:
        raise CaptureError(f"{op.name()} cannot be captured: {reason}")


def _depends_on_values(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if op in _INDEXING:  # by numbers it does not; a single value of the host is written through a mask
        masks = any(index is not None and index.dtype in _MASKS for index in args[1])
        return masks and (
            op is torch.ops.aten.index.Tensor or args[2].numel() != 1 or args[2].device.type != "cpu"
        )
    if op is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return any(tag in _READS_VALUES for tag in getattr(op, "tags", ())) or _gives_numbers(op)


@functools.cache
def _gives_numbers(op: Any) -> bool:
    """Whether an op returns host numbers that are no shapes, on which code may branch."""
    schema = schema_of(op)
    if schema is None or schema.name.split("::")[1] in _METADATA:
        return False
    kinds = [str(result.type).removeprefix("List[").removesuffix("]") for result in schema.returns]
    return bool(kinds) and all(kind in _NUMBERS for kind in kinds)


def _waiting_copy(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> str | None:
    if "device" in kwargs or len(args) == 1:  # aten::_to_copy(source, *, device, non_blocking)
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        non_blocking = kwargs.get("non_blocking", False)
    else:  # aten::copy_(target, source, non_blocking)
        target, source = args[0].device, args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if source.device.type == target.type or device.type not in (source.device.type, target.type):
        return None
    if not non_blocking:
        return f"a copy from {source.device.type} to {target.type} waits for the device"
    if source.device.type == "cpu" and not source.is_pinned():
        return "a copy from memory of the host that is not pinned waits for the device"
    return None


class Attended(NamedTuple):
    """The rows and the bound with which attention over some cumulative lengths was captured."""

    rows: int
    """Of the query."""
    bound: int
    """Rows of the longest segment, at most."""


class LiveSegments:
    """The segments of the running batch, which eager attention reads at every replay."""

    def __init__(self) -> None:
        self.attended: dict[int, Attended] = {}
        """By the addresses of cumulative lengths."""
        self.set(None, ())

    def set(self, rows: int | None, segments: Iterable[KnownSegments]) -> None:
        """Sets the real rows (None: all captured ones) and the segments of the batch."""
        self.rows = rows
        self._by_address = {each.cu_seqlens.data_ptr(): each for each in segments}

    def of(self, cu_seqlens: Tensor) -> KnownSegments | None:
        """Returns the segments behind captured cumulative lengths; None: not known."""
        return self._by_address.get(cu_seqlens.data_ptr())

    def note(self, query: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """Records a captured attention."""
        address, bound = cu_seqlens.data_ptr(), max_seqlen
        if address in self.attended:
            bound = min(bound, self.attended[address].bound)
        self.attended[address] = Attended(query.shape[0], bound)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """`fxsplit::varlen_attention` with zeros outside every segment, without a host read."""
    return _clear_pad_rows(varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale), cu_seqlens)


def _clear_pad_rows(out: Tensor, cu_seqlens: Tensor) -> Tensor:
    row = torch.arange(out.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return out.masked_fill_((row >= cu_seqlens[-1])[:, None, None], 0)


CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class _Kept(NamedTuple):
    expected: Any  # what `_seen` gives of every later result
    is_argument: bool = False  # whether it stays where it is
    buffer: Tensor | None = None  # where it is copied to


class RecordedBreak:
    """Repeats a call at every replay over the same arguments.

    Its function may return tensors, None, numbers and strings, in tuples, lists and dicts:

        a new tensor                  is copied into a buffer at a fixed address
        memory of an argument         stays that: the function wrote it in place, or returned a view
        None, a number, a string      is part of the recording; another value at a replay is an error
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        pool: GraphPool,
        buffers: OwnedBuffers,
    ) -> None:
        self.name = name_of(function)
        self._function = function
        self._args, self._kwargs = tree_map_only(torch.Tensor, pool.hold, (tuple(args), dict(kwargs)))
        self._arguments = {
            storage_address(leaf)
            for leaf in tree_leaves((self._args, self._kwargs))
            if isinstance(leaf, torch.Tensor) and unstrided([leaf]) is None
        }
        self._buffers = buffers
        self._kept: list[_Kept] = []

    def first_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the function; returns its results at fixed addresses, or raises CaptureError."""
        leaves, self._structure = tree_flatten(self._function(*args, **kwargs))
        fixed: dict[int, tuple[Any, _Kept]] = {}
        for leaf in leaves:
            if id(leaf) not in fixed:
                fixed[id(leaf)] = self._fix(leaf)
        self._kept = [fixed[id(leaf)][1] for leaf in leaves]
        return tree_unflatten([fixed[id(leaf)][0] for leaf in leaves], self._structure)

    def __call__(self) -> None:
        """Repeats the call; ReplayError unless its results are as they were at the capture."""
        leaves, structure = tree_flatten(self._function(*self._args, **self._kwargs))
        if structure != self._structure:
            raise ReplayError(
                f"{self.name}: returned {structure}; the capture was recorded with {self._structure}"
            )
        for kept, leaf in zip(self._kept, leaves, strict=True):
            got, expected = _seen(leaf, kept.is_argument), kept.expected
            # A NaN differs from itself, and is what it was.
            if got != expected and not (got != got and expected != expected):
                raise ReplayError(
                    f"{self.name}: returned {got!r}; the capture was recorded with {expected!r}"
                )
            if kept.buffer is not None:
                kept.buffer.copy_(leaf)

    def _fix(self, result: Any) -> tuple[Any, _Kept]:
        if isinstance(result, torch.Tensor):
            if (kind := unstrided([result])) is not None:
                raise CaptureError(f"{self.name}: returned a {kind} tensor; a break may return strided ones")
            address = storage_address(result)
            if address and address in self._arguments:
                return result, _Kept(_seen(result, True), is_argument=True)
            buffer, handed_out = self._buffers.acquire(result)
            buffer.copy_(result)
            return handed_out, _Kept(_seen(buffer, False), buffer=buffer)
        if isinstance(result, CONSTANTS):
            return result, _Kept(result)
        raise CaptureError(
            f"{self.name}: returned a {type(result).__name__}; a break may return tensors, None, numbers and "
            "strings, in tuples, lists and dicts"
        )


def name_of(function: Any) -> str:
    """Returns the name of a function or op in messages."""
    if isinstance(function, OpOverload):
        return str(function.name())
    return getattr(function, "__qualname__", None) or type(function).__name__


def _seen(result: Any, is_argument: bool) -> Any:
    """A constant itself, or what stays the same of a tensor, with its place if that does."""
    if not isinstance(result, torch.Tensor):
        return result
    if (kind := unstrided([result])) is not None:
        return kind
    seen = tuple(result.shape), result.dtype, result.device
    return (hex(result.data_ptr()), *seen, result.stride()) if is_argument else seen
