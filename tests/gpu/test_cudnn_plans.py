"""cuDNN's plans that are read back compute what those compute that were built, in captures too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.kernels import store
from fxsplit_encoder.kernels.attention import cudnn_varlen
from fxsplit_encoder.kernels.attention.cudnn_varlen import CudnnVarlen

pytestmark = pytest.mark.gpu

LENGTHS = (196, 0, 784, 100)


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if reason := CudnnVarlen().unavailable_reason(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)
    monkeypatch.setattr(store, "cache_directory", lambda: tmp_path)
    forget_all(monkeypatch)


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process, which has the same files."""
    monkeypatch.setattr(cudnn_varlen, "_thread", cudnn_varlen.ThreadPlans([]))
    monkeypatch.setattr(cudnn_varlen, "PLAN_FILES", cudnn_varlen.PlanFiles())


def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every plan that is built."""
    plans: list[str] = []
    build = cudnn_varlen.build_plan

    def count(*arguments: object) -> object:
        plans.append("built")
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cudnn_varlen, "build_plan", count)
    return plans


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@torch.no_grad()
def test_a_plan_that_is_read_is_the_plan_that_was_built(
    head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = built(monkeypatch)
    generator = torch.Generator("cuda").manual_seed(head_dim)
    total = sum(LENGTHS) + 5
    shape = (total, 3, 16, head_dim)
    values = torch.randn(shape, device="cuda", dtype=dtype, generator=generator).unbind(1)
    boundaries = torch.tensor((0, *LENGTHS), device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def attend() -> Tensor:
        out = torch.full_like(values[0], 7.0, memory_format=torch.contiguous_format)
        return CudnnVarlen()(*values, boundaries, 784, head_dim**-0.5, out)

    expected = attend()
    assert len(plans) == 1
    forget_all(monkeypatch)
    assert torch.equal(attend(), expected)
    assert len(plans) == 1
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        out = attend()
    for lengths in (LENGTHS, (500, 1, 300, 200)):
        steps = torch.tensor((0, *lengths), device="cuda", dtype=torch.int32)
        boundaries.copy_(steps.cumsum(0, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, attend())
