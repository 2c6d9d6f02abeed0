"""Captures beside code that has torch free the workspaces of cuBLAS; `test_workspaces` runs it apart."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder._torch.streams import capture_streams

pytestmark = pytest.mark.gpu

_BYTES = 64 << 20


def test_streams_are_made_before_any_other_use_of_cuda_and_in_every_thread() -> None:
    streams = capture_streams(torch.device("cuda", 0))
    made = [streams.take()]
    thread = threading.Thread(target=lambda: made.append(streams.take()))
    thread.start()
    thread.join()
    assert len({each.cuda_stream for each in made}) == 2


def test_a_stream_has_one_user_and_comes_back_with_its_workspace() -> None:
    streams = capture_streams(torch.device("cuda", torch.cuda.current_device()))
    first, second = streams.take(), streams.take(priority=-1)
    of_torch = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert len({first.cuda_stream, second.cuda_stream} - of_torch) == 2
    assert (first.priority, second.priority) == (0, -1)
    pointer = first.cuda_stream
    del first
    assert streams.take().cuda_stream == pointer


class Mlp(nn.Module):
    """Products for which cuBLAS splits sums, and so uses a workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1152, 4304), nn.Linear(4304, 1152)

    def forward(self, x: Any) -> Any:
        return self.down(nn.functional.gelu(self.up(x)))


def use_all_streams_of_torch() -> None:
    """Gives each of the 32 streams that torch hands out a workspace of ordinary memory."""
    x = torch.ones(8, 8, device="cuda")
    for _ in range(32):
        with torch.cuda.stream(torch.cuda.Stream()):
            x @ x


@torch.no_grad()
@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
def test_nobody_else_gets_memory_that_a_graph_writes_to(piece_compiler: str, fresh_dynamo: None) -> None:
    use_all_streams_of_torch()
    torch.manual_seed(0)
    module = Mlp().cuda().bfloat16().eval()
    options = {"mode": "full", "exact_min_hits": 1, "piece_compiler": piece_compiler}
    compiled = torch.compile(copy.deepcopy(module), backend="encoder_cg", dynamic=False, options=options)
    x = torch.randn(64, 1152, device="cuda").bfloat16()
    expected = compiled(x).clone()
    for _ in range(3):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        others = [torch.full((_BYTES,), 7, dtype=torch.uint8, device="cuda") for _ in range(32)]
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
        assert all(bool(other.eq(7).all()) for other in others)
        del others
    assert fx.stats(compiled).hits >= 8


def test_a_sibling_is_one_for_each_purpose_and_as_urgent_as_its_stream() -> None:
    streams = capture_streams(torch.device("cuda", torch.cuda.current_device()))
    main, other = streams.take(priority=-1), streams.take()
    sibling = streams.sibling(main, "attention")
    assert streams.sibling(main, "attention") == sibling != streams.sibling(main, "steps")
    assert sibling.priority == -1 and sibling not in (main, other, streams.sibling(other, "attention"))


@torch.no_grad()
def test_a_tower_is_replayed_beside_reduce_overhead(towers: Any, fresh_dynamo: None) -> None:
    from fxsplit_encoder.models.random import random_inputs

    manager = fx.EncoderCudaGraphManager(towers[2], fx.EncoderConfig(token_budgets=(64, 256), mode="full"))
    manager.capture()
    inputs = random_inputs(towers[2], [256])
    expected = [each.clone() for each in manager.execute(inputs)]
    other = torch.compile(Mlp().cuda().bfloat16().eval(), mode="reduce-overhead", dynamic=False)
    for rows in (64, 32, 64, 128):
        x = torch.randn(rows, 1152, device="cuda").bfloat16()
        for _ in range(4):
            other(x)
            got = manager.execute(inputs)
            assert all(map(torch.equal, got, expected))
    manager.clear()
