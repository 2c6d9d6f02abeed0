from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import PackedModel, rows_of
from variants import MODES, VARIANTS, Compile, ExactGraph, Variant
from worker import relative_error
from workloads import WORKLOADS, Request

import fxsplit_encoder as fx

CONFIG = {"token_budgets": (8, 32), "max_items_per_batch": 4, "max_frames_per_batch": 0}
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
def test_ours_in_a_mode(make_model: MakeModel) -> None:
    assert {f"ours-{mode}" for mode in MODES} < VARIANTS.keys()
    assert [fx.EncoderConfig(mode=mode).mode for mode in MODES] == list(MODES)
    variant: Any = check("ours-piecewise", make_model())
    assert {"compile", "capture"} <= variant.seconds.keys()
    assert variant.manager.config.mode == "piecewise"


@pytest.mark.slow
def test_padding_is_told(make_model: MakeModel) -> None:
    model = make_model()
    variant: Any = check("ours-full", model)
    batch = model.batch(REQUESTS[1])  # 9 tokens
    assert variant.padding(batch) == pytest.approx(1 - 9 / 32)
    assert variant.note(batch) == "32 full"


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_backend(make_model: MakeModel) -> None:
    assert "compile and capture" in check("ours-backend", make_model()).seconds


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
        def replay(self) -> None: ...

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for name, value in {"Stream": stream, "current_stream": stream, "graph_pool_handle": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    variant: Any = check("graph-exact", make_model())
    assert len(variant._graphs.captured) == len(REQUESTS)
    for captured in variant._graphs.captured.values():
        assert set(captured.sources) == {"pixel_values"}
        assert {"pixel_values", "position_ids", "cu_seqlens"} <= set(captured.static)


def test_what_cannot_run_says_why(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ExactGraph.unavailable("packed", "cpu") == "needs CUDA graphs"
    assert ExactGraph.unavailable("packed", "cuda") is None
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert Compile.unavailable("packed", "cpu") == "needs a C++ compiler"
    assert Compile.unavailable("packed", "cuda") is None
    static = VARIANTS["compile-reduce-overhead"](make_model(), {})
    assert "12 requests" in str(static.why_not(WORKLOADS["packed"]["photos"]))
    assert static.why_not(WORKLOADS["packed"]["mixed8"]) is None
