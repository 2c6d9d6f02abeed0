from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.capture.breakable import (
    BreakableCUDAGraphCapture,
    eager_break_during_capture,
    refuse_synchronization,
)
from fxsplit_encoder.capture.buffers import OwnedBuffers
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError

from . import breakable_checks as shared
from .bodies import request_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", shared.CHECKS, ids=lambda check: check.__name__)
def test_on_the_cpu(check: Callable[[str], None]) -> None:
    check("cpu")


# --- torch.compile


def doubled_total(x: Tensor) -> Tensor:
    return shared.ones("cpu") * x.sum() * 2


breaking_total = eager_break_during_capture(doubled_total)


def calls_a_break(x: Tensor) -> Tensor:
    return breaking_total(x + 1) - 1


def test_dynamo_looks_through_it(fresh_dynamo: None) -> None:
    compiled = torch.compile(calls_a_break, fullgraph=True, backend="eager")
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x), calls_a_break(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- ops that are recorded in place of a graph


def test_a_recorded_capture_knows_shapes_of_the_time_and_contents_of_now() -> None:
    x = torch.arange(6.0)
    with BreakableCUDAGraphCapture(GraphPool(CPU)) as capture:
        h = x * 1
        h.unsqueeze_(0)
        a = h.t() + 1
        h.squeeze_(0)
        b = h.view(2, 3).t().reshape(6)
        b.add_(h)
        c = torch.cat([a.flatten(), b])[::2]
        d = c.clone()
        d[0] = 5
        with torch.autograd.profiler.record_function("marker"):
            e = torch.stack(list(d.chunk(2)))
    for seed in range(3):
        x.copy_(torch.randn(6, generator=torch.Generator().manual_seed(seed)))
        capture.replay()
        wanted = torch.cat([x + 1, x.view(2, 3).t().reshape(6) + x])[::2].clone()
        assert torch.equal(c, wanted)
        wanted[0] = 5
        assert torch.equal(e, wanted.view(2, 3))
        assert h.shape == (6,)


def test_random_ops_draw_anew() -> None:
    x = torch.zeros(100)
    with BreakableCUDAGraphCapture(GraphPool(CPU)) as capture:
        y = nn.functional.dropout(x + 1)
    capture.replay()
    first = y.clone()
    capture.replay()
    assert not torch.equal(first, y)


# --- buffers of breaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn])
def test_a_buffer_is_lent_again_once_nobody_holds_the_result(dtype: torch.dtype) -> None:
    buffers, like = OwnedBuffers(), torch.empty(3, 4, dtype=dtype).t()
    buffer, result = buffers.acquire(like)
    assert (result.shape, result.dtype, result.stride()) == ((4, 3), dtype, (1, 4))
    assert result.data_ptr() == buffer.data_ptr()
    assert not buffer.to(torch.float32).any()
    view = result[1:]
    del result
    other, second = buffers.acquire(like)
    assert other.data_ptr() != buffer.data_ptr()
    del view
    again, third = buffers.acquire(like)
    assert again.data_ptr() == buffer.data_ptr()
    elsewhere, _ = buffers.acquire(like.contiguous())
    assert elsewhere.data_ptr() not in (buffer.data_ptr(), other.data_ptr())
    assert second.data_ptr() != third.data_ptr()
    del second  # any of several may be the free one
    assert buffers.acquire(like)[0].data_ptr() == other.data_ptr()


# --- where a capture failed


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), inner])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class RunsOutOfMemory(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        raise torch.OutOfMemoryError(f"no room for {y.shape[0]} more")


def record(module: Any, x: Tensor) -> CapturedForward:
    captured = CapturedForward(request_of(lambda: [module(x)]), "breakable", GraphPool(CPU))
    captured.record()
    return captured


def test_the_reason_names_the_op_and_the_module() -> None:
    message = (
        r"^capturing 4 rows failed at aten::_local_scalar_dense in Reads \(blocks\.1\): "
        r"aten::_local_scalar_dense cannot be captured: the host needs values that the device computes$"
    )
    with pytest.raises(CaptureError, match=message):
        record(Holds(Reads()), torch.ones(2, 4))
    with pytest.raises(CaptureError, match=r"failed at aten::_local_scalar_dense in Reads: "):
        record(Reads(), torch.ones(2, 4))
    with pytest.raises(CaptureError, match=r"failed at aten::_local_scalar_dense: "):
        record(lambda x: x.item(), torch.ones(1))
    with pytest.raises(CaptureError, match=r"failed at aten::mul\.Tensor: KeyError: 'x'"):
        record(lambda x: {}["x"] if (x * 2).dim() else x, torch.ones(1))


def test_what_a_failed_capture_has_allocated_is_dropped_with_it() -> None:
    with pytest.raises(CaptureMemoryError, match=r"capturing 4 rows at aten::add\.Tensor in RunsOut") as info:
        record(RunsOutOfMemory(), torch.ones(2, 4))
    assert info.value.__cause__ is not None
    frames = info.value.__cause__.__traceback__
    while frames is not None:
        assert frames.tb_frame.f_code.co_name != "forward" or not frames.tb_frame.f_locals
        frames = frames.tb_next


# --- what is refused by the device of a tensor ("meta" stands for it)

META = torch.device("meta")
INDEX_PUT = torch.ops.aten.index_put_.default


def through_a_mask(value: torch.Tensor) -> tuple[object, ...]:
    x = torch.empty(4, device=META)
    return x, [torch.empty(4, device=META, dtype=torch.bool)], value


def test_a_number_of_the_host_is_written_through_a_mask() -> None:
    refuse_synchronization(INDEX_PUT, through_a_mask(torch.tensor(0.0)), {}, META)


@pytest.mark.parametrize("size", [1, 2])
def test_values_of_the_device_need_the_positions_of_the_mask(size: int) -> None:
    with pytest.raises(CaptureError, match="aten::index_put_ cannot be captured: the host needs values"):
        refuse_synchronization(INDEX_PUT, through_a_mask(torch.empty(size, device=META)), {}, META)
