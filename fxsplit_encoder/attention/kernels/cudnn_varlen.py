"""cuDNN over a packed sequence, through its Python front end.

The front end describes a sequence as (segments, heads, longest, head_dim) whose segments begin at ragged
offsets, counted in elements, and have lengths of their own. Both are tensors on the device, so a captured
call may see other segments at every replay.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels.base import HalfPrecisionKernel
from fxsplit_encoder.errors import CaptureError

# Names of the tensors of a graph, by which they are bound.
_QUERY, _KEY, _VALUE, _OUT, _QUERY_LENGTHS, _KEY_LENGTHS, _FIRST_OFFSET = range(1, 8)


@dataclass(frozen=True, slots=True)
class _Plan:
    graph: Any
    handle: Any
    set_stream: Any
    workspace_bytes: int
    row_strides: Tensor
    """(4, 1) int64 on the device: elements from row to row of query, key, value and output."""


class _Thread(threading.local):
    """Threads must not share handles, and captured graphs need their plans for as long as they live."""

    def __init__(self) -> None:
        self.handles: dict[torch.device, Any] = {}
        self.plans: dict[tuple[Any, ...], _Plan] = {}


_thread = _Thread()


class CudnnVarlen(HalfPrecisionKernel):
    """`nvidia-cudnn-frontend`. Every shape is planned at its first call, which must not be captured."""

    name = "cudnn_varlen"
    module = "cudnn"
    attribute = "pygraph"
    plans_each_shape = True
    max_head_dim = 128

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        target: Tensor | None,
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if target is None else target
        tensors = (query, key, value, out)
        segments = cu_seqlens.shape[0] - 1
        plan = _plan(tensors, segments, max_seqlen, scale)
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        # Every row of offsets begins at a multiple of 16 bytes.
        pitch = segments + 2 - segments % 2
        offsets = torch.empty(4, pitch, dtype=torch.int64, device=query.device)[:, : segments + 1]
        torch.mul(plan.row_strides, cu_seqlens, out=offsets)
        workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=query.device)
        bound = dict(zip((_QUERY, _KEY, _VALUE, _OUT), tensors, strict=True))
        bound[_QUERY_LENGTHS] = bound[_KEY_LENGTHS] = lengths.view(-1, 1, 1, 1)
        for number, row in enumerate(offsets.unbind(0), _FIRST_OFFSET):
            bound[number] = row.view(-1, 1, 1, 1)
        plan.set_stream(handle=plan.handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
        plan.graph.execute(bound, workspace, handle=plan.handle)
        return out


def _plan(tensors: Sequence[Tensor], segments: int, longest: int, scale: float) -> _Plan:
    """This thread's plan for such tensors."""
    query = tensors[0]
    key = (
        query.device,
        query.dtype,
        query.shape[1:],
        segments,
        longest,
        scale,
        *(t.stride() for t in tensors),
    )
    plan = _thread.plans.get(key)
    if plan is None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("cudnn_varlen: this shape was not planned before the capture began")
        plan = _thread.plans[key] = _make_plan(tensors, segments, longest, scale)
    return plan


def _make_plan(tensors: Sequence[Tensor], segments: int, longest: int, scale: float) -> _Plan:
    cudnn: Any = importlib.import_module("cudnn")
    query = tensors[0]
    _, heads, head_dim = query.shape
    if query.device not in _thread.handles:
        with torch.cuda.device(query.device):
            _thread.handles[query.device] = cudnn.create_handle()
    handle = _thread.handles[query.device]
    values = cudnn.data_type.BFLOAT16 if query.dtype == torch.bfloat16 else cudnn.data_type.HALF
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
        for uid, tensor in zip((_QUERY, _KEY, _VALUE), tensors, strict=False)
    )
    offsets = [column(_FIRST_OFFSET + i, segments + 1, cudnn.data_type.INT64) for i in range(len(tensors))]
    for tensor, offset in zip((q, k, v), offsets, strict=False):
        tensor.set_ragged_offset(offset)
    query_lengths, key_lengths = (
        column(uid, segments, cudnn.data_type.INT32) for uid in (_QUERY_LENGTHS, _KEY_LENGTHS)
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
    out.set_uid(_OUT).set_output(True).set_dim(dim).set_stride(strides(tensors[-1])).set_data_type(values)
    out.set_ragged_offset(offsets[-1])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    rows = torch.tensor([[t.stride(0)] for t in tensors], dtype=torch.int64, device=query.device)
    return _Plan(graph, handle, cudnn.set_stream, graph.get_workspace_size(), rows)
