from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import contenders
import pytest
import torch
from contenders import Compile, CompileMaxAutotune, CompilePartition, EagerFlash, ExactGraph
from our_contenders import CONTENDERS
from subjects import PackedSubject, rows_of
from worker import relative_error
from workloads import WORKLOADS, Request

from fxsplit_encoder.config import MODES

CONFIG = {"token_budgets": (8, 32), "max_items_per_batch": 4, "max_frames_per_batch": 0}
REQUESTS = (Request(images=((128, 96), (64, 64))), Request(images=((96, 96),)))
MakeSubject = Callable[[], PackedSubject]


@torch.no_grad()
def check(name: str, subject: PackedSubject) -> contenders.Contender:
    """Starts a contender and compares both requests with eager."""
    batches = [subject.batch(request) for request in REQUESTS]
    expected = [rows_of(subject.eager(batch)) for batch in batches]
    contender = CONTENDERS[name](subject, CONFIG)
    contender.start()
    for batch in batches:
        contender.prepare(batch)
    for batch, rows in zip(batches, expected, strict=True):
        assert relative_error(rows_of(contender.run(batch)), rows) < 1e-5
    return contender


@pytest.mark.slow
def test_ours_in_each_mode(make_subject: MakeSubject) -> None:
    assert [name for name in CONTENDERS if name.startswith("ours-") and name != "ours-backend"] == [
        f"ours-{mode}" for mode in MODES
    ]
    contender: Any = check("ours-piecewise", make_subject())
    assert {"compile", "capture"} <= contender.seconds.keys()
    assert contender.manager.config.mode == "piecewise"


@pytest.mark.slow
def test_budgets_are_powers_of_two_and_padding_is_told(make_subject: MakeSubject) -> None:
    subject = make_subject()
    contender: Any = check("graph-budgets", subject)
    assert sorted(contender.manager.budget_graphs["default"]) == [8, 16, 32]
    batch = subject.batch(REQUESTS[1])  # 9 tokens
    assert contender.padding(batch) == pytest.approx(1 - 9 / 16)
    assert contender.note(batch) == "16 full"
    assert contender.manager.config.packing == "greedy"


def test_eager_pads_nothing_and_has_nothing_to_note(make_subject: MakeSubject) -> None:
    subject = make_subject()
    contender = check("eager", subject)
    batch = subject.batch(REQUESTS[0])
    assert (contender.padding(batch), contender.note(batch)) == (0.0, "")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_backend(make_subject: MakeSubject) -> None:
    assert "compile and capture" in check("ours-backend", make_subject()).seconds


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_one_trace_serves_sizes_that_torch_compile_keeps_symbolic(
    make_subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    monkeypatch.setattr(Compile, "settings", {"backend": backend})
    config = torch._dynamo.config
    limits = {name: getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    with config.patch(limits):  # the contender raises them
        check("compile", make_subject())
    assert len(graphs) == 1


def test_a_graph_of_a_layout_keeps_all_that_it_reads(
    make_subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
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
    contender: Any = check("graph-exact", make_subject())
    assert len(contender._graphs) == len(REQUESTS)
    for captured in contender._graphs.values():
        assert set(captured.sources) == {"pixel_values"}
        assert {"pixel_values", "position_ids", "cu_seqlens"} <= set(captured.static)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ExactGraph.unavailable("packed", True, "cpu", False) == "needs CUDA graphs"
    assert ExactGraph.unavailable("packed", True, "cuda", False) is None
    assert "flash-attn" in str(EagerFlash.unavailable("packed", True, "cuda", False))
    assert "itself" in str(EagerFlash.unavailable("pages", False, "cuda", False))
    assert "custom ops" in str(CompilePartition.unavailable("tiles", True, "cuda", False))
    assert "--quick" in str(CompileMaxAutotune.unavailable("packed", True, "cuda", True))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert Compile.unavailable("packed", True, "cpu", False) == "needs a C++ compiler"
    assert Compile.unavailable("packed", True, "cuda", False) is None


def test_static_compilation_is_for_requests_of_one_size(make_subject: MakeSubject) -> None:
    static = CONTENDERS["compile-reduce-overhead"](make_subject(), {})
    assert "12 requests" in str(static.why_not(WORKLOADS["packed"]["photos"]))
    assert static.why_not(WORKLOADS["packed"]["mixed8"]) is None
    assert Compile(make_subject(), {}).why_not(WORKLOADS["packed"]["photos"]) is None
