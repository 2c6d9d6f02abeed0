from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_variants
from models import PackedModel, rows_of
from torch import Tensor
from variants import MODES, VARIANTS, Compile, ExactGraph, Variant
from vllm_classes import vllm_inputs
from vllm_variants import VllmEager, VllmManager
from worker import _measure, relative_error, settle
from workloads import WORKLOADS, Request

import fxsplit_encoder as fx

CONFIG = dict(token_budgets=(8, 32), max_items_per_batch=4, max_frames_per_batch=0, piece_compiler="eager")
REQUESTS = (Request(images=((128, 96), (64, 64))), Request(images=((96, 96),)))
MakeModel = Callable[[], PackedModel]


@torch.no_grad()
def check(name: str, model: PackedModel) -> Variant:
    """Starts a variant and compares both requests with eager."""
    batches = [model.batch(request) for request in REQUESTS]
    expected = [rows_of(model.eager(batch)) for batch in batches]
    variant = VARIANTS[name](model, CONFIG)
    variant.start()
    for batch in batches:
        variant.prepare(batch)
    for batch, rows in zip(batches, expected, strict=True):
        assert relative_error(rows_of(variant.run(batch)), rows) < 1e-5
    return variant


@pytest.mark.slow
def test_ours_in_a_mode_tells_its_padding(make_model: MakeModel) -> None:
    assert {f"ours-{mode}" for mode in MODES} < VARIANTS.keys()
    assert [fx.EncoderConfig(mode=mode).mode for mode in MODES] == list(MODES)
    model = make_model()
    variant: Any = check("ours-piecewise", model)
    assert variant.manager.config.mode == "piecewise"
    batch = model.batch(REQUESTS[1])  # 9 tokens
    assert variant.padding(batch) == pytest.approx(1 - 9 / 32)
    assert variant.note(batch) == "32 piecewise"


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_one_trace_serves_sizes_that_torch_compile_keeps_symbolic(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    monkeypatch.setattr(Compile, "settings", {"backend": backend})
    config = torch._dynamo.config
    limits = {name: getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    with config.patch(limits):  # the variant raises them
        check("compile", make_model())
    assert len(graphs) == 1


def test_a_graph_of_a_layout_keeps_all_that_it_reads(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Graph:
        def replay(self) -> None:
            replayed.append(self)

    replayed: list[Graph] = []
    read: list[weakref.ref[Tensor]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for name, value in {"Stream": stream, "current_stream": stream, "graph_pool_handle": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = make_model()
    forward = model.adapter.encoder_cudagraph_forward

    def noted(values: dict[str, Tensor], **options: Any) -> Tensor:
        read.extend(map(weakref.ref, values.values()))
        return forward(values, **options)

    monkeypatch.setattr(model.adapter, "encoder_cudagraph_forward", noted)
    variant = check("graph-exact", model)
    assert len(set(map(id, replayed))) == len(REQUESTS)
    assert len(read) >= 3 * len(REQUESTS)
    assert all(reference() is not None for reference in read)
    del variant  # which held the graphs


def test_what_cannot_run_says_why(make_model: MakeModel) -> None:
    static = VARIANTS["compile-reduce-overhead"](make_model(), {})
    assert "12 requests" in str(static.why_not(WORKLOADS["packed"]["photos"]))
    assert static.why_not(WORKLOADS["packed"]["mixed8"]) is None


@pytest.mark.parametrize("variant", [ExactGraph, VllmEager, VllmManager])
def test_where_they_cannot_run(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_variants, "vllm_or_none", lambda: None)
    assert variant.unavailable("qwen3-vl-8b", "cpu") == "needs CUDA graphs"
    without = None if variant is ExactGraph else "vLLM is not installed"
    assert variant.unavailable("qwen3-vl-8b", "cuda") == without
    monkeypatch.setattr(vllm_variants, "vllm_or_none", lambda: "0.33.0")
    assert variant.unavailable("qwen3-vl-8b", "cuda") is None
    assert Compile.unavailable("qwen3-vl-8b", "cuda") is None
    packed = WORKLOADS["packed"]
    known = VllmEager(SimpleNamespace(name="qwen3-vl-8b"), {})  # type: ignore[arg-type]
    assert known.why_not(packed["1x448"]) is None
    assert known.why_not(packed["clip16"]) == "videos are left out"
    assert "those of qwen3-vl-8b" in str(VllmEager.unavailable("glm-4.1v-9b", "cuda"))


def test_inputs_have_the_names_that_vllm_gives_them() -> None:
    packed = {"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    assert vllm_inputs("packed", packed) == packed
    tiles = vllm_inputs("tiles", {"pixel_values": torch.ones(3, 3, 4, 4), "num_patches": [1, 2]})
    assert tiles["image_num_patches"].tolist() == [1, 2]
    assert tiles["pixel_values_flat"].shape == (3, 3, 4, 4)


def test_a_variant_with_a_reference_of_its_own_is_compared_with_that() -> None:
    class Tower:
        seconds_to_settle = 0.0

        def __init__(self, error: float) -> None:
            self.error = error

        def prepare(self, batch: Any) -> None: ...

        def reference(self, batch: Any) -> torch.Tensor:
            return torch.ones(4, 2)

        def run(self, batch: Any) -> torch.Tensor:
            return torch.ones(4, 2) + self.error

        def padding(self, batch: Any) -> float:
            return 0.0

        def note(self, batch: Any) -> str:
            return ""

    job: Any = SimpleNamespace(dtype="float32", samples=2, quick=True, seconds=0.0, kernels=False)
    other = torch.full((4, 2), 7.0)
    row = _measure(job, Tower(0.0), [None], other)  # type: ignore[arg-type, list-item]
    assert row["error"] == 0.0 and row["p50"] >= 0
    assert "settled s" not in row
    with pytest.raises(ValueError, match="differs from eager"):
        _measure(job, Tower(0.5), [None], other)  # type: ignore[arg-type, list-item]


def test_what_changes_how_it_runs_is_repeated_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    calls: list[int] = []
    settle([lambda: calls.append(1), lambda: calls.append(2)], 3.0)
    assert calls == [1, 2, 1, 2]  # the clock reads 0 for the end at 3, then 1, 2 and 3
    settle([lambda: calls.append(3)], 0.0)
    assert 3 not in calls
