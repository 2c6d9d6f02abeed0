"""What breakable captures promise on every device: test bodies that take one, for the CPU and for CUDA."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.capture.breakable import (
    BreakableCUDAGraphCapture,
    active_capture,
    eager_break_during_capture,
)
from fxsplit_encoder.capture.buffers import OwnedBuffers
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import CaptureError, ReplayError
from fxsplit_encoder.kernels.attention import varlen_attention


def ones(device: str, count: int = 4) -> Tensor:
    return torch.ones(count, device=device)


def pool_on(device: str) -> GraphPool:
    return GraphPool(torch.device(device))


@eager_break_during_capture
def scaled_by_its_sum(x: Tensor) -> Tensor:
    """Reads a value on the host, which no graph may."""
    return x * x.sum().item()


def segments_run_in_order_with_what_the_inputs_hold_now(device: str) -> None:
    x, seen = ones(device), []

    @eager_break_during_capture
    def look(value: Tensor) -> None:
        seen.append(value.tolist())

    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        y = x + 1
        look(y)
        z = scaled_by_its_sum(y * 2)
        last = z - 1
    assert (capture.num_graphs, capture.num_eager_breaks, len(capture.segments)) == (3, 2, 5)
    addresses = [t.data_ptr() for t in (z, last)]
    for value in (3.0, 0.0):
        x.fill_(value)
        capture.replay()
        w = 2 * (value + 1)
        assert seen[-1] == [value + 1] * 4
        assert last.tolist() == [w * 4 * w - 1] * 4
    assert [t.data_ptr() for t in (z, last)] == addresses
    assert len(seen) == 3


def a_break_inside_a_break_is_a_part_of_it(device: str) -> None:
    x = ones(device)

    @eager_break_during_capture
    def outer(value: Tensor) -> Tensor:
        return scaled_by_its_sum(value + 1) + scaled_by_its_sum(value)

    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        y = outer(x * 1)
    assert (capture.num_graphs, capture.num_eager_breaks) == (2, 1)
    x.fill_(2)
    capture.replay()
    assert y.tolist() == [(3 * 12.0) + (2 * 8.0)] * 4


def breaks_return_tuples_none_numbers_and_dicts(device: str) -> None:
    x = ones(device)

    @eager_break_during_capture
    def many(value: Tensor) -> Any:
        twice = value * 2
        return (twice, None), {"again": twice, "count": 3, "nan": float("nan")}, [value.sum().view(1)]

    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        (first, nothing), named, (total,) = many(x * 1)
        y = first + named["again"] + total
    assert nothing is None
    assert named["count"] == 3
    assert named["again"] is first
    x.fill_(2)
    capture.replay()
    assert y.tolist() == [4 + 4 + 8.0] * 4


def results_in_place_stay_where_they_are(device: str) -> None:
    x = ones(device)

    @eager_break_during_capture
    def in_place(value: Tensor) -> tuple[Tensor, Tensor]:
        value.mul_(value.sum().item())
        return value, value[1:]

    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        h = x + 1
        same, view = in_place(h)
        y = h + 1
        z = view + 1
    assert same is h
    assert view.untyped_storage().data_ptr() == h.untyped_storage().data_ptr()
    for value in (2.0, 3.0):
        x.fill_(value)
        capture.replay()
        w = (value + 1) * 4 * (value + 1)
        assert h.tolist() == [w] * 4
        assert y.tolist() == [w + 1] * 4
        assert z.tolist() == [w + 1] * 3


def what_is_not_a_tensor_must_not_change(device: str) -> None:
    x = ones(device)
    changes: list[tuple[Callable[[Tensor], Any], str]] = [
        (lambda v: int(v[0].item()), "returned 2; the capture was recorded with 1"),
        (lambda v: v[: int(v[0].item())].clone(), r"returned \(\(2,\).* recorded with \(\(1,\)"),
        (lambda v: (v.clone(),) * int(v[0].item()), "recorded with"),
        (lambda v: v.clone() if v[0].item() == 1 else None, "returned None;"),
    ]
    for function, message in changes:
        x.fill_(1)
        with BreakableCUDAGraphCapture(pool_on(device)) as capture:
            eager_break_during_capture(function)(x)
        capture.replay()
        x.fill_(2)
        with pytest.raises(ReplayError, match=message):
            capture.replay()


def what_has_no_fixed_address_is_refused(device: str) -> None:
    class Opaque:
        pass

    @eager_break_during_capture
    def opaque(x: Tensor) -> Opaque:
        return Opaque()

    with (
        pytest.raises(CaptureError, match=r"opaque: returned a Opaque; a break may return tensors"),
        BreakableCUDAGraphCapture(pool_on(device)),
    ):
        opaque(ones(device))


@eager_break_during_capture
def failing(value: Tensor) -> Tensor:
    raise ZeroDivisionError


def fail_in_a_break(x: Tensor) -> None:
    failing(scaled_by_its_sum(x + 1))


def swallow_a_failure(x: Tensor) -> None:
    with contextlib.suppress(ZeroDivisionError):
        failing(x + 1)
    x + 2
    scaled_by_its_sum(x)


def fail_between_breaks(x: Tensor) -> None:
    scaled_by_its_sum(x + 1) + 1
    raise KeyError


def a_failure_leaves_no_half_capture(device: str) -> None:
    for fail, error, message in (
        (fail_in_a_break, ZeroDivisionError, None),
        (swallow_a_failure, CaptureError, "a break failed inside this capture"),
        (fail_between_breaks, KeyError, None),
    ):
        pool, x = pool_on(device), ones(device)
        capture = BreakableCUDAGraphCapture(pool)
        with pytest.raises(error, match=message), capture:
            fail(x)
        assert_nothing_is_left(capture, pool, x)


def assert_nothing_is_left(capture: BreakableCUDAGraphCapture, pool: GraphPool, x: Tensor) -> None:
    """Neither an open capture nor segments; and the stream, the pool and the thread serve the next one."""
    assert capture.segments == []
    assert (capture.num_graphs, capture.num_eager_breaks) == (0, 0)
    assert active_capture() is None
    if x.is_cuda:
        assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(ReplayError, match="nothing to replay"):
        capture.replay()
    assert torch.randn(4, device=x.device).isfinite().all()
    with capture:
        y = scaled_by_its_sum(x + 1) + 1
    x.fill_(2)
    capture.replay()
    assert y.tolist() == [37.0] * 4


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "aten::_local_scalar_dense": lambda x: x.sum().item(),
    "aten::nonzero": lambda x: x.nonzero(),
    "aten::index.Tensor": lambda x: x[x > 0],
    "aten::index_put_": lambda x: x.clone().index_put_((x > 0,), x.clone()),
    "aten::equal": lambda x: torch.equal(x, x),
    "aten::masked_select": lambda x: x.masked_select(x > 0),
    "aten::repeat_interleave.Tensor": lambda x: torch.repeat_interleave(x, x.long()),
}


def what_waits_for_the_device_is_refused_by_name(device: str) -> None:
    for name, call in REFUSED.items():
        pool, x = pool_on(device), ones(device)
        capture = BreakableCUDAGraphCapture(pool)
        with pytest.raises(CaptureError, match=f"{name} cannot be captured: the host needs values"), capture:
            call(x + 1)
        assert_nothing_is_left(capture, pool, x)


def what_only_looks_like_waiting_is_captured(device: str) -> None:
    x, index = ones(device), torch.tensor([2, 0], device=device)
    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        picked = x[index]
        masked = x * 1
        masked[masked > 2] = 0
        repeated = torch.repeat_interleave(x, torch.ones_like(x, dtype=torch.long), output_size=4)
    x.copy_(torch.tensor([1.0, 2, 3, 4]))
    capture.replay()
    assert picked.tolist() == [3.0, 1.0]
    assert masked.tolist() == [1.0, 2.0, 0.0, 0.0]
    assert repeated.tolist() == [1.0, 2.0, 3.0, 4.0]


def one_capture_is_open_in_a_thread(device: str) -> None:
    pool, x = pool_on(device), ones(device)
    with BreakableCUDAGraphCapture(pool) as capture:
        assert active_capture() is capture
        with pytest.raises(CaptureError, match="captures do not nest"), BreakableCUDAGraphCapture(pool):
            pass
        y = x + 1
    x.fill_(2)
    capture.replay()
    assert y.tolist() == [3.0] * 4


def another_thread_is_not_disturbed(device: str) -> None:
    """It calls the plain function meanwhile, and its own capture holds its own ops only."""
    x, results = ones(device), {}
    opened, called = threading.Event(), threading.Event()

    def work() -> None:
        assert opened.wait(60)
        own = ones(device) * 3
        results["plain"] = scaled_by_its_sum(own).tolist()
        results["active"] = active_capture()
        called.set()
        with BreakableCUDAGraphCapture(pool_on(device)) as capture:
            results["y"] = scaled_by_its_sum(other * 2) + 1
        results["capture"] = capture

    other = ones(device)
    thread = threading.Thread(target=work)
    thread.start()
    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        y = x + 1
        opened.set()
        assert called.wait(60)
        z = y * 2
    thread.join()
    assert results["plain"] == [36.0] * 4
    assert results["active"] is None
    assert (capture.num_graphs, capture.num_eager_breaks) == (1, 0)
    assert (results["capture"].num_graphs, results["capture"].num_eager_breaks) == (2, 1)
    x.fill_(2)
    other.fill_(2)
    capture.replay()
    results["capture"].replay()
    assert z.tolist() == [6.0] * 4
    assert results["y"].tolist() == [65.0] * 4


def results_outlive_the_capture(device: str) -> None:
    x = ones(device)
    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        result = scaled_by_its_sum(x + 1)
        view = result[1:]
    capture.replay()
    del capture, result
    gc.collect()
    others = [torch.full((4,), -1.0, device=device) for _ in range(64)]
    assert view.tolist() == [16.0] * 3
    assert len(others) == 64


def a_release_does_not_wait_for_the_garbage_collector(device: str) -> None:
    x = ones(device)
    held: list[weakref.ref[Tensor]] = []

    @eager_break_during_capture
    def made_each_time(value: Tensor) -> tuple[Tensor, Tensor, str]:
        table = value + 1
        held.append(weakref.ref(table))
        return table, value.neg_(), "constant"

    acquire = OwnedBuffers.acquire

    def watched(buffers: OwnedBuffers, *given: Any) -> tuple[Tensor, Tensor]:
        buffer, alias = acquire(buffers, *given)
        held.append(weakref.ref(buffer))
        return buffer, alias

    gc.disable()
    try:
        with (
            mock.patch.object(OwnedBuffers, "acquire", watched),
            BreakableCUDAGraphCapture(pool_on(device)) as capture,
        ):
            results = made_each_time(x * 2)
        capture.replay()
        del results
        capture.release()
        assert len(held) == 3
        assert [reference() for reference in held] == [None] * 3
    finally:
        gc.enable()


def what_only_a_break_holds_stays_valid(device: str) -> None:
    """An argument that was made outside of the capture, and the result of an earlier break."""
    x = ones(device)
    add = eager_break_during_capture(torch.add)
    with BreakableCUDAGraphCapture(pool_on(device)) as capture:
        table = eager_break_during_capture(torch.full)((4,), 7.0, device=device)
        y = add(x * 1, table)
        del table
    outside = torch.full((4,), 9.0, device=device)
    with BreakableCUDAGraphCapture(pool_on(device)) as second:
        z = add(x * 1, outside)
    del outside
    gc.collect()
    others = [torch.full((4,), -1.0, device=device) for _ in range(64)]
    x.fill_(2)
    capture.replay()
    second.replay()
    assert y.tolist() == [9.0] * 4
    assert z.tolist() == [11.0] * 4
    assert len(others) == 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, packed: bool) -> None:
        super().__init__()
        self.heads = heads
        self.packed = packed
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(x.shape[0], 3, self.heads, -1).unbind(1)
        if self.packed:
            attended = varlen_attention(q, k, v, cu_seqlens, x.shape[0], q.shape[-1] ** -0.5)
        else:
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
            attended = nn.functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
        return x + self.out(nn.functional.gelu(attended.reshape(x.shape)))


class Tower(nn.Module):
    """An eager tower that nobody prepared for anything."""

    def __init__(self, depth: int = 3, width: int = 32, heads: int = 2, *, packed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, packed=packed) for _ in range(depth))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return x


def make_tower(device: str, **settings: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(**settings).to(device).requires_grad_(False).train(False)


def an_untouched_tower_breaks_at_attention(device: str) -> None:
    for packed in (True, False):
        tower = make_tower(device, packed=packed)
        x = torch.randn(12, 32, device=device)
        cu_seqlens = torch.tensor([0, 12, 12, 12], dtype=torch.int32, device=device)
        tower(x, cu_seqlens)
        with BreakableCUDAGraphCapture(pool_on(device)) as capture:
            y = tower(x, cu_seqlens)
        assert (capture.num_graphs, capture.num_eager_breaks) == (4, 3)
        for boundaries in ([0, 5, 12, 12], [0, 1, 4, 12], [0, 12, 12, 12]):
            x.normal_()
            cu_seqlens.copy_(torch.tensor(boundaries))
            capture.replay()
            torch.testing.assert_close(y, tower(x, cu_seqlens), rtol=0, atol=1e-5)


def in_mode_full_breaks_are_plain_functions(device: str) -> None:
    """Those of a user, and attention in a tower."""
    tower, negate = make_tower(device), eager_break_during_capture(torch.neg)
    x = torch.randn(12, 32, device=device)
    cu_seqlens = torch.tensor([0, 12, 12], dtype=torch.int32, device=device)
    tower(x, cu_seqlens)
    with BreakableCUDAGraphCapture(pool_on(device), breaks=False) as capture:
        y = negate(tower(x, cu_seqlens)) * 2
    assert (capture.num_graphs, capture.num_eager_breaks) == (1, 0)
    x.normal_()
    cu_seqlens.copy_(torch.tensor([0, 4, 12]))
    capture.replay()
    torch.testing.assert_close(y, tower(x, cu_seqlens) * -2, rtol=0, atol=1e-5)


def a_capture_under_inference_mode_replays_anywhere(device: str) -> None:
    with torch.inference_mode():
        x = ones(device)
        with BreakableCUDAGraphCapture(pool_on(device)) as capture:
            y = scaled_by_its_sum(x + 1) + 1
        x.fill_(2)
        capture.replay()
        assert y.tolist() == [37.0] * 4
    capture.replay()
    assert y.tolist() == [37.0] * 4


CHECKS = [
    segments_run_in_order_with_what_the_inputs_hold_now,
    in_mode_full_breaks_are_plain_functions,
    a_break_inside_a_break_is_a_part_of_it,
    breaks_return_tuples_none_numbers_and_dicts,
    results_in_place_stay_where_they_are,
    what_is_not_a_tensor_must_not_change,
    what_has_no_fixed_address_is_refused,
    a_failure_leaves_no_half_capture,
    what_waits_for_the_device_is_refused_by_name,
    what_only_looks_like_waiting_is_captured,
    one_capture_is_open_in_a_thread,
    another_thread_is_not_disturbed,
    results_outlive_the_capture,
    a_release_does_not_wait_for_the_garbage_collector,
    what_only_a_break_holds_stays_valid,
    an_untouched_tower_breaks_at_attention,
    a_capture_under_inference_mode_replays_anywhere,
]
