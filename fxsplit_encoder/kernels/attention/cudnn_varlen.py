"""cuDNN over a packed sequence, through its Python front end.

Segments begin at ragged offsets. Offsets and lengths are device tensors, so they may change between replays.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import cudnn_attention
from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels.attention.attention_kernel import HalfPrecisionKernel, Target
from fxsplit_encoder.kernels.store import KernelStore, describe_environment


class ThreadPlans(threading.local):
    """Handles, which threads must not share, and plans, which captured graphs need for as long as they live:
    what a thread leaves in `ended`, the next one takes over.
    """

    def __init__(self, ended: list[tuple[dict[torch.device, Any], dict[tuple[Any, ...], Plan]]]) -> None:
        try:
            self.handles, self.plans = ended.pop()
        except IndexError:
            self.handles, self.plans = {}, {}
        self._while_thread_lives = threading.Event()
        end = weakref.finalize(self._while_thread_lives, ended.append, (self.handles, self.plans))
        end.atexit = False


_thread = ThreadPlans([])


class CudnnVarlen(HalfPrecisionKernel):
    """`nvidia-cudnn-frontend`. Every shape is planned at its first call, which must not be captured."""

    name = "cudnn_varlen"
    module = "cudnn"
    attribute = "pygraph"
    plans_each_shape = True
    max_head_dim = 128

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if into is None else into
        tensors, segments = (q, k, v, out), cu_seqlens.shape[0] - 1
        plan = _plan(tensors, segments, max_seqlen, scale)
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        # Every row of offsets begins at a multiple of 16 bytes.
        pitch = segments + 2 - segments % 2
        offsets = torch.empty(4, pitch, dtype=torch.int64, device=q.device)[:, : segments + 1]
        torch.mul(plan.row_strides, cu_seqlens, out=offsets)
        workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=q.device)
        operands = (Operand.QUERY, Operand.KEY, Operand.VALUE, Operand.OUT)
        bound: dict[int, Tensor] = dict(zip(operands, tensors, strict=True))
        bound[Operand.QUERY_LENGTHS] = bound[Operand.KEY_LENGTHS] = lengths.view(-1, 1, 1, 1)
        for number, row in enumerate(offsets.unbind(0), Operand.FIRST_OFFSET):
            bound[number] = row.view(-1, 1, 1, 1)
        plan.set_stream(handle=plan.handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
        plan.graph.execute(bound, workspace, handle=plan.handle)
        return out


def _plan(tensors: Sequence[Tensor], segments: int, longest: int, scale: float) -> Plan:
    query, strides = tensors[0], (t.stride() for t in tensors)
    key = (query.device, query.dtype, query.shape[1:], segments, longest, scale, *strides)
    plan = _thread.plans.get(key)
    is_captured = torch.cuda.is_current_stream_capturing()
    if plan is None:
        if is_captured:
            raise CaptureError("cudnn_varlen: this shape was not planned before the capture began")
        plan = _thread.plans[key] = _make_plan(tensors, segments, longest, scale)
    if is_captured:
        PLAN_FILES.note_capture(plan.name, query.device)
    return plan


# --- plans
#
# The front end (1.32) holds the interpreter lock in every call: 0.8 to 1.0 s for the first plan of a width of
# heads, which loads libraries, and 50 to 100 ms for each other (H100). So PyTorch, which does not, loads the
# libraries, and plans that were built once are read, in 5 ms, or 38 for the first.

logger = logging.getLogger(__name__)


class Operand(IntEnum):
    """The tensors of a graph, by the numbers to which they are bound; the first four have ragged offsets."""

    QUERY = 1
    KEY = 2
    VALUE = 3
    OUT = 4
    QUERY_LENGTHS = 5
    KEY_LENGTHS = 6
    FIRST_OFFSET = 7


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one shape for one thread; files are kept by its `name`."""

    name: str
    graph: Any
    handle: Any
    set_stream: Any
    workspace_bytes: int
    row_strides: Tensor
    """(4, 1) int64 on the device: elements from row to row of query, key, value and output."""


def _make_plan(tensors: Sequence[Tensor], segments: int, longest: int, scale: float) -> Plan:
    cudnn: Any = importlib.import_module("cudnn")
    device = tensors[0].device
    if device not in _thread.handles:
        with torch.cuda.device(device):
            _thread.handles[device] = cudnn.create_handle()
    handle = _thread.handles[device]
    name = _name_of(tensors, segments, longest, scale)
    graph = _read(cudnn, handle, name, device)
    if graph is None:
        _load_libraries(device, tensors[0].dtype, tensors[0].shape[-1])
        graph = build_plan(cudnn, handle, tensors, segments, longest, scale)
        try:
            PLAN_FILES.store(device).write(name, bytes(graph.serialize()))
        except _errors_of(cudnn) as error:
            logger.debug("a plan of cuDNN's is not kept: %s: %s", type(error).__name__, error)
    rows = torch.tensor([[t.stride(0)] for t in tensors], dtype=torch.int64, device=device)
    return Plan(name, graph, handle, cudnn.set_stream, graph.get_workspace_size(), rows)


def _errors_of(cudnn: Any) -> tuple[type[Exception], ...]:
    """Errors of a plan that cannot be written or read, or of a front end without such methods."""
    refused = getattr(cudnn, "cudnnGraphNotSupportedError", RuntimeError)
    return (refused, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)


def _name_of(tensors: Sequence[Tensor], segments: int, longest: int, scale: float) -> str:
    query = tensors[0]
    strides = [t.stride() for t in tensors]
    what = (str(query.dtype), tuple(query.shape[1:]), segments, longest, scale.hex(), strides)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


@functools.cache
def _load_libraries(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    values = torch.zeros(1, 1, 64, head_dim, dtype=dtype, device=device)
    with contextlib.suppress(RuntimeError):  # of a build without cuDNN, or heads that it does not take
        cudnn_attention(values, values, values, None, False, 0.0, False, False)


def _read(cudnn: Any, handle: Any, name: str, device: torch.device) -> Any | None:
    content = PLAN_FILES.store(device).read(name)
    if content is None:
        return None
    try:
        graph = cudnn.pygraph(handle=handle)
        graph.deserialize(handle, content)
    except _errors_of(cudnn) as error:
        logger.debug("a plan of cuDNN's is built anew: %s: %s", type(error).__name__, error)
        return None
    return graph


def build_plan(
    cudnn: Any, handle: Any, tensors: Sequence[Tensor], segments: int, longest: int, scale: float
) -> Any:
    """Returns cuDNN's graph of attention over so many segments, with a plan built for it."""
    _, heads, head_dim = tensors[0].shape
    values = cudnn.data_type.BFLOAT16 if tensors[0].dtype == torch.bfloat16 else cudnn.data_type.HALF
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=values,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )

    def column(uid: int, length: int, data_type: Any) -> Any:
        return graph.tensor(dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type, uid=uid)

    def strides(tensor: Tensor) -> list[int]:
        row, head, element = tensor.stride()
        return [longest * row, head, row, element]  # the first is not read: offsets say where segments begin

    dim = [segments, heads, longest, head_dim]
    q, k, v = (
        graph.tensor(dim=dim, stride=strides(tensor), data_type=values, uid=uid)
        for uid, tensor in zip((Operand.QUERY, Operand.KEY, Operand.VALUE), tensors, strict=False)
    )
    int64, first = cudnn.data_type.INT64, Operand.FIRST_OFFSET
    offsets = [column(first + number, segments + 1, int64) for number in range(len(tensors))]
    for tensor, offset in zip((q, k, v), offsets, strict=False):
        tensor.set_ragged_offset(offset)
    query_lengths, key_lengths = (
        column(uid, segments, cudnn.data_type.INT32) for uid in (Operand.QUERY_LENGTHS, Operand.KEY_LENGTHS)
    )
    out, _ = graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=scale,
        generate_stats=False,
        use_padding_mask=True,
        seq_len_q=query_lengths,
        seq_len_kv=key_lengths,
    )
    out.set_uid(int(Operand.OUT)).set_output(True)
    out.set_dim(dim).set_stride(strides(tensors[-1])).set_data_type(values)
    out.set_ragged_offset(offsets[-1])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


# --- plans as files


class PlanFiles:
    """Serialized plans by name, on disk, where other threads, processes and start files find them."""

    def __init__(self) -> None:
        self._stores: dict[torch.device, KernelStore] = {}
        self._captured: defaultdict[torch.device, set[str]] = defaultdict(set)

    def store(self, device: torch.device) -> KernelStore:
        """Returns the store of such a device."""
        if device not in self._stores:
            self._stores[device] = KernelStore("cudnn_plans", describe_environment(device))
        return self._stores[device]

    def note_capture(self, name: str, device: torch.device) -> None:
        """Marks a plan as captured: a start from a file will need it."""
        self._captured[device].add(name)

    def captured(self, device: torch.device) -> dict[str, bytes]:
        """Returns the captured plans of a device that are on disk."""
        found = {name: self.store(device).read(name) for name in sorted(self._captured[device])}
        return {name: content for name, content in found.items() if content is not None}

    def restore(self, plans: Mapping[str, bytes], device: torch.device) -> None:
        """Writes plans for a device; those that cannot be written are made anew."""
        with contextlib.suppress(OSError):
            for name, content in plans.items():
                self.store(device).write(name, content)


PLAN_FILES = PlanFiles()
