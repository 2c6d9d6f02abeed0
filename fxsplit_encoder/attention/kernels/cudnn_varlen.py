"""cuDNN over a packed sequence, through its Python front end.

The front end describes a sequence as (segments, heads, longest, head_dim) whose segments begin at ragged
offsets, counted in elements, and have lengths of their own. Both are tensors on the device, so a captured
call may see other segments at every replay.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels.base import HalfPrecisionKernel
from fxsplit_encoder.attention.kernels.cudnn_files import note_capture
from fxsplit_encoder.attention.kernels.cudnn_plan import Operand, Plan, make_plan
from fxsplit_encoder.errors import CaptureError


class _Thread(threading.local):
    """Threads must not share handles, and captured graphs need their plans for as long as they live."""

    def __init__(self) -> None:
        self.handles: dict[torch.device, Any] = {}
        self.plans: dict[tuple[Any, ...], Plan] = {}


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
        operands = (Operand.QUERY, Operand.KEY, Operand.VALUE, Operand.OUT)
        bound: dict[int, Tensor] = dict(zip(operands, tensors, strict=True))
        bound[Operand.QUERY_LENGTHS] = bound[Operand.KEY_LENGTHS] = lengths.view(-1, 1, 1, 1)
        for number, row in enumerate(offsets.unbind(0), Operand.FIRST_OFFSET):
            bound[number] = row.view(-1, 1, 1, 1)
        plan.set_stream(handle=plan.handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
        plan.graph.execute(bound, workspace, handle=plan.handle)
        return out


def _plan(tensors: Sequence[Tensor], segments: int, longest: int, scale: float) -> Plan:
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
    is_captured = torch.cuda.is_current_stream_capturing()
    if plan is None:
        if is_captured:
            raise CaptureError("cudnn_varlen: this shape was not planned before the capture began")
        plan = _thread.plans[key] = make_plan(_handle(query.device), tensors, segments, longest, scale)
    if is_captured:
        note_capture(plan.name)
    return plan


def _handle(device: torch.device) -> Any:
    """This thread's, of a device."""
    if device not in _thread.handles:
        cudnn: Any = importlib.import_module("cudnn")
        with torch.cuda.device(device):
            _thread.handles[device] = cudnn.create_handle()
    return _thread.handles[device]
