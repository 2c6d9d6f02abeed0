"""Breakable captures with real graphs: what holds on every device; memory, streams and failures of CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.capture.wrapper import BreakableCUDAGraphWrapper
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError
from fxsplit_encoder.kernels.attention.hugging_face import use_varlen_attention

from ..capture import breakable_checks, wrapper_checks
from ..capture.bodies import request_of
from .support import settled

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture
def pool() -> Iterator[GraphPool]:
    made = GraphPool(torch.device("cuda"))
    yield made
    gc.collect()
    made.retire()


@pytest.mark.parametrize("check", breakable_checks.CHECKS, ids=lambda check: check.__name__)
def test_what_holds_on_every_device(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.parametrize("check", wrapper_checks.CHECKS, ids=lambda check: check.__name__)
def test_what_holds_for_wrappers_on_every_device(check: Callable[[str], None]) -> None:
    check("cuda")


# --- memory


@eager_break_during_capture
def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * (k + v).sum(-1, keepdim=True)


def chain(x: Tensor, layers: int) -> Tensor:
    for _ in range(layers):
        q, k, v = x * 0.5, x * 0.25, x * 0.125
        x = x + torch.tanh(eager_attention(q, k, v))
        del q, k, v
    return x


def reserved_beside(pool: GraphPool) -> int:
    """Bytes that are reserved when the pool's stream has the workspaces of cuBLAS, which stay with it."""
    with pool.warming():
        pass
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def captured_bytes(layers: int) -> int:
    pool, x = GraphPool(torch.device("cuda")), torch.randn(4096, 1024, device="cuda")
    chain(x, 1)
    before = reserved_beside(pool)
    with torch.no_grad(), BreakableCUDAGraphCapture(pool) as capture:
        y = chain(x, layers)
    assert capture.num_eager_breaks == layers
    added = torch.cuda.memory_reserved() - before
    x.normal_()
    capture.replay()
    torch.testing.assert_close(y, chain(x, layers))
    return added


def test_memory_does_not_grow_with_the_number_of_breaks() -> None:
    few, many = captured_bytes(3), captured_bytes(27)
    assert few > 0
    assert many < 1.25 * few


def test_arguments_are_borrowed_from_the_pool_and_held_elsewhere(pool: GraphPool) -> None:
    x = torch.ones(1000, device="cuda")
    seen: dict[str, bool] = {}

    @eager_break_during_capture
    def look(inside: Tensor, outside: Tensor, result: Tensor) -> Tensor:
        seen.update(inside=pool.owns(inside), outside=pool.owns(outside), result=pool.owns(result))
        return inside + outside + result

    with BreakableCUDAGraphCapture(pool) as capture:
        first = eager_break_during_capture(torch.neg)(x)
        y = look(x * 2, x, first)
    assert seen == {"inside": True, "outside": False, "result": False}
    x.fill_(3)
    capture.replay()
    assert y.unique().tolist() == [6.0]


def test_out_of_memory_gives_everything_back(pool: GraphPool) -> None:
    x = torch.ones(MIB, device="cuda")
    before = reserved_beside(pool)

    class Greedy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            held = [x + number for number in range(64)]
            if torch.cuda.is_current_stream_capturing():
                torch.empty(2**50, dtype=torch.uint8, device="cuda")
            return torch.stack(held).sum(0)

    module = Greedy()
    failing = CapturedForward(request_of(lambda: [module(x)], MIB), "breakable", pool)
    with pytest.raises(CaptureMemoryError, match="in Greedy") as info:
        failing.record()
    assert not torch.cuda.is_current_stream_capturing()
    pool.retire()
    assert info.value.__cause__ is not None  # kept, and holds nothing
    assert torch.cuda.memory_reserved() - before < 32 * MIB
    with BreakableCUDAGraphCapture(pool) as capture:
        y = x + 1
    capture.replay()
    assert y[0].item() == 2


@torch.no_grad()
def test_ten_thousand_replays_over_fifty_shapes_keep_memory_flat() -> None:
    tower = breakable_checks.make_tower("cuda", depth=2)
    wrapper = BreakableCUDAGraphWrapper(tower, max_captures=50)
    batches = [
        (torch.randn(rows, 32, device="cuda"), torch.tensor([0, rows], dtype=torch.int32, device="cuda"))
        for rows in range(8, 58)
    ]
    for _ in range(2):
        for batch in batches:
            wrapper(*batch)
    before = settled()
    for number in range(10_000):
        wrapper(*batches[number % 50])
    assert settled() == before
    assert (wrapper.captures, wrapper.misses) == (50, {})


@torch.no_grad()
def test_evicting_and_capturing_again_keeps_memory_bounded() -> None:
    tower = breakable_checks.make_tower("cuda", depth=2)
    wrapper = BreakableCUDAGraphWrapper(tower, max_captures=4)
    reserved = []
    for number in range(60):
        rows = 8 + number % 12
        x = torch.randn(rows, 32, device="cuda")
        cu_seqlens = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
        torch.testing.assert_close(wrapper(x, cu_seqlens), tower(x, cu_seqlens), rtol=0, atol=1e-4)
        reserved.append(torch.cuda.memory_reserved())
    assert wrapper.captures == 60
    assert reserved[-1] <= reserved[24] + 4 * MIB


def test_what_dies_inside_a_capture_is_freed_after_it(pool: GraphPool) -> None:
    x = torch.ones(4, device="cuda")
    for shared in (pool, None):  # the graphs alone; with their pool and its memory
        for _ in range(4):
            x.fill_(1)
            with BreakableCUDAGraphCapture(shared) as capture:  # the name lets go of the one before
                y = breakable_checks.scaled_by_its_sum(x + 1) + 1
            x.fill_(2)
            capture.replay()
            assert y.tolist() == [37.0] * 4


def test_a_pool_is_captured_to_again_after_all_its_captures_are_gone(pool: GraphPool) -> None:
    x = torch.ones(4, device="cuda")
    for number in range(3):
        capture = BreakableCUDAGraphCapture(pool)
        with capture:
            y = x + number
        x.fill_(number)
        capture.replay()
        assert y.tolist() == [2.0 * number] * 4
        capture.release()
        if number == 1:
            pool.retire()


def test_a_retired_pool_keeps_no_memory(pool: GraphPool) -> None:
    x = torch.ones(16 * MIB, device="cuda")
    before = reserved_beside(pool)
    with BreakableCUDAGraphCapture(pool) as capture:
        y = breakable_checks.scaled_by_its_sum(x + 1) + 1  # a break that holds what the pool owns
    assert capture.num_eager_breaks == 1
    assert torch.cuda.memory_reserved() - before >= 64 * MIB
    del y
    capture.release()
    pool.retire()
    assert torch.cuda.memory_reserved() - before < 4 * MIB


# --- streams


def test_captured_code_may_fork_and_join_streams(pool: GraphPool) -> None:
    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    with BreakableCUDAGraphCapture(pool) as capture:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = x * 2
        b = x * 3
        current.wait_stream(side)
        y = breakable_checks.scaled_by_its_sum(a + b)
    assert capture.num_eager_breaks == 1
    x.fill_(2)
    capture.replay()
    assert y.unique().tolist() == [10.0 * 10_000]


def test_a_break_may_work_on_a_stream_that_it_joins(pool: GraphPool) -> None:
    x, side = torch.ones(2**22, device="cuda"), torch.cuda.Stream()

    @eager_break_during_capture
    def elsewhere(value: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = value
            for _ in range(50):
                result = result + 1
        current.wait_stream(side)
        result.record_stream(current)
        return result

    with BreakableCUDAGraphCapture(pool) as capture:
        y = elsewhere(x * 2) * 3
    for value in (2.0, 5.0):
        x.fill_(value)
        capture.replay()
        assert y.unique().tolist() == [(2 * value + 50) * 3]


def test_replays_on_another_stream(pool: GraphPool) -> None:
    x = torch.ones(1000, device="cuda")
    with BreakableCUDAGraphCapture(pool) as capture:
        y = breakable_checks.scaled_by_its_sum(x * 2) + 1
    stream = torch.cuda.Stream()
    x.fill_(2)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), pool.replaying():
        capture.replay()
    stream.synchronize()
    assert y.unique().tolist() == [4.0 * 4000 + 1]


def test_a_fork_that_is_open_at_a_break_is_an_error(pool: GraphPool) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    capture = BreakableCUDAGraphCapture(pool)
    with pytest.raises((CaptureError, RuntimeError)), capture:
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y * 2
        breakable_checks.scaled_by_its_sum(y)
        assert z is not None
    breakable_checks.assert_nothing_is_left(capture, pool, x)


# --- failures that only CUDA has


def from_pageable_memory(x: Tensor) -> object:
    return x + torch.ones(x.shape).to(x.device, non_blocking=True)


def a_new_constant(x: Tensor) -> object:
    return x + torch.tensor([1.0], device=x.device)


def synchronise(x: Tensor) -> object:
    torch.cuda.synchronize()
    return x


class Inner(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call(x + 1)
        return x * 2


@pytest.mark.parametrize("call", [from_pageable_memory, a_new_constant, synchronise])
def test_what_cannot_be_captured_is_served_and_leaves_everything_usable(call: Any, pool: GraphPool) -> None:
    wrapper = BreakableCUDAGraphWrapper(nn.Sequential(Inner(call)).eval(), pool=pool)
    x = torch.ones(4, device="cuda")
    with torch.no_grad():
        assert [wrapper(x).tolist() for _ in range(2)] == [[2.0] * 4] * 2
    assert wrapper.hits == 0
    ((reason, count),) = wrapper.misses.items()
    assert count == 2
    assert "in Inner (0)" in reason
    capture = BreakableCUDAGraphCapture(pool)
    with pytest.raises((CaptureError, RuntimeError)), capture:
        call(x + 1)
    breakable_checks.assert_nothing_is_left(capture, pool, x)


# --- towers


@torch.no_grad()
def test_an_unwrapped_hugging_face_tower(towers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = wrapper_checks.captures_made(monkeypatch)
    tower, _, wrapped = towers
    previous = {module: module.config for module in tower.modules() if hasattr(module, "config")}
    use_varlen_attention(tower)
    try:
        wrapper = BreakableCUDAGraphWrapper(tower, debug=True)
        for grids in ([(1, 16, 16)], [(1, 8, 8), (1, 8, 24)], [(1, 8, 24), (1, 8, 8)]):
            rows = sum(t * h * w for t, h, w in grids)
            pixels = torch.randn(rows, wrapped.patch_features, device="cuda", dtype=torch.bfloat16)
            metadata = {name: value.cuda() for name, value in wrapped.host_metadata(grids).items()}
            arguments = {"grid_thw": None, **metadata, "max_seqlen": 256}
            got, expected = wrapper(pixels, **arguments), tower(pixels, **arguments)
            torch.testing.assert_close(got.pooler_output, expected.pooler_output, rtol=0.05, atol=0.05)
        assert not wrapper.misses
        assert wrapper.captures == 2
        assert [capture.num_eager_breaks for capture in made] == [len(tower.blocks)] * 2
    finally:
        for module, config in previous.items():
            module.config = config
