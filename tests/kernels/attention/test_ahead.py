"""FlashAttention 4 compiled ahead: when, which variants, and by processes that end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxsplit_encoder._torch.tensors import FakeTensorMode
from fxsplit_encoder.kernels import compile_jobs as processes
from fxsplit_encoder.kernels.attention import (
    KERNELS,
    KernelChooser,
    ahead,
    dense_attention,
    flash_attn,
    varlen_attention,
)
from fxsplit_encoder.kernels.attention.chooser import Measurements, choosing
from fxsplit_encoder.kernels.choice import measuring

from ...waiting import wait_until
from .fakes import CUDA, FakeMeter, cumulative, fused_qkv, shape

PACKED = ["flash_attn_4", "flash_attn_4_64x128", "flash_attn_4_128x128"]
DENSE = ["flash_attn_4_dense", "flash_attn_4_128x128_dense"]
HOPPER = torch.device("cuda", 0)
Begun = dict[int, list[str]]
"""The variants of each head width."""


@pytest.fixture
def possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host on which kernels may be compiled ahead, by a stand-in; where it leaves what was done."""
    monkeypatch.setenv(processes.FLASH_SWITCH, "1")
    monkeypatch.setenv("JOBS_DONE", str(tmp_path))
    monkeypatch.setattr(processes, "capability", lambda device: (9, 0))
    monkeypatch.setattr(processes, "processors", lambda device: 132)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(processes, "package_version", lambda package: "4.0")
    monkeypatch.setattr(processes, "_MODULE", "tests.kernels.attention.ahead_jobs")
    monkeypatch.setattr(processes.state, "asked", set())
    yield tmp_path
    for each in [*processes.state.processes]:
        each.end(0)
    processes.state.processes.clear()


def done(possible: Path) -> list[str]:
    return sorted(path.name for path in possible.iterdir())


def test_every_condition_counts(possible: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.is_possible(HOPPER) and not processes.is_possible(torch.device("cpu"))
    for where, name, value in (
        (processes, "capability", (10, 0)),
        (os, "cpu_count", 2),
        (processes, "package_version", None),
        (processes, "keep_flash_attention", False),
    ):
        with monkeypatch.context() as other:
            other.setattr(where, name, lambda *_, value=value: value)
            assert not processes.is_possible(HOPPER)
            processes.start(["any"], 72, torch.bfloat16, HOPPER)
    assert not processes.is_running()


def test_what_was_begun_is_waited_for_and_not_begun_again(possible: Path) -> None:
    processes.start(["one"], 72, torch.bfloat16, HOPPER)
    processes.start(["one", "two"], 72, torch.bfloat16, HOPPER)
    processes.start(["two"], 72, torch.bfloat16, HOPPER)
    processes.start(["one"], 72, torch.bfloat16, torch.device("cpu"))
    jobs = [each.jobs for each in processes.state.processes]
    assert jobs == [[("one", 72, "bfloat16")], [("two", 72, "bfloat16")]]
    processes.wait()
    assert not processes.is_running() and done(possible) == ["one-72", "two-72"]
    assert (possible / "one-72").read_text() == "132"
    processes.start(["one"], 72, torch.bfloat16, HOPPER)
    assert not processes.is_running()
    processes.start(["one"], 80, torch.bfloat16, HOPPER)
    processes.wait()
    assert done(possible) == ["one-72", "one-80", "two-72"]


def test_processes_that_wait_already_are_used_and_the_others_end(possible: Path) -> None:
    processes.warm_up(2, HOPPER)
    processes.warm_up(2, HOPPER)
    first, second = (each.child for each in processes.state.processes)
    processes.start(["one"], 72, torch.bfloat16, HOPPER)
    processes.dismiss()
    assert [each.child for each in processes.state.processes] == [first]
    assert second.status is not None
    processes.wait()
    assert done(possible) == ["one-72"] and first.status == 0
    processes.warm_up(1, HOPPER)
    processes.dismiss()
    assert not processes.is_running()


def test_processes_that_get_no_more_are_over_once_all_is_compiled(possible: Path) -> None:
    processes.start(["one", "two"], 72, torch.bfloat16, HOPPER)
    processes.warm_up(2, HOPPER)
    processes.begin_no_more()
    (process,) = processes.state.processes  # of the other, without jobs, nothing is left
    wait_until(lambda: process.child.status is not None)
    assert processes.is_running() and done(possible) == ["one-72", "two-72"]
    processes.start(["three"], 72, torch.bfloat16, HOPPER)  # another process: those take no more
    assert len(processes.state.processes) == 2
    processes.wait()
    assert not processes.is_running()
    assert done(possible) == ["one-72", "three-72", "two-72"]


def test_what_fails_or_takes_too_long_is_said_and_compiled_later(
    possible: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes.start(["fails"], 72, torch.bfloat16, HOPPER)
    processes.wait()
    assert "not compiled ahead: [('fails', 72, 'bfloat16')]: RuntimeError: no such tile" in caplog.text
    monkeypatch.setattr(processes, "_LONGEST_WAIT", 0.1)
    processes.start(["sleeps"], 72, torch.bfloat16, HOPPER)
    processes.wait()
    assert not processes.is_running() and "('sleeps', 72, 'bfloat16')" in caplog.text


@pytest.mark.parametrize("kernel", [flash_attn.FlashAttention4(), flash_attn.DenseFlashAttention4()])
def test_a_call_waits_for_what_is_being_compiled(
    kernel: flash_attn.FlashAttention4, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def attend(query: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor]:
        log.append("called")
        return (query,)

    monkeypatch.setattr(type(kernel), "function", property(lambda self: attend))
    monkeypatch.setattr(processes, "is_running", lambda: not log)
    monkeypatch.setattr(processes, "wait", lambda: log.append("waited"))
    assert kernel.is_awaited
    kernel(*fused_qkv(6), cumulative([6]), 6, 1.0)
    assert log == ["waited", "called"]
    assert not kernel.is_awaited


def test_segments_of_one_tile_call_the_variant_of_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[int | None, int]] = []

    def attend(query: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor]:
        bounds.append((given["max_seqlen_q"], given["max_seqlen_k"]))
        return (query,)

    kernel = flash_attn.FlashAttention4()
    monkeypatch.setattr(type(kernel), "function", property(lambda self: attend))
    for is_hopper in (True, False):
        monkeypatch.setattr(flash_attn, "ignores_bounds", lambda device, is_hopper=is_hopper: is_hopper)
        kernel(*fused_qkv(6), cumulative([6]), 6, 1.0)
    assert bounds == [(None, 6), (6, 6)]  # others choose tiles by it


def test_the_bound_is_ignored_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = flash_attn.ignores_bounds.__wrapped__
    assert not decide(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not decide(HOPPER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major in (8, 9, 10):
        monkeypatch.setattr(flash_attn, "capability", lambda device, major=major: (major, 0))
        assert decide(HOPPER) == (major == 9)


# --- which


@pytest.fixture
def begun(possible: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    found: Begun = {}

    def start(names: list[str], width: int, dtype: torch.dtype, device: torch.device) -> None:
        known = found.setdefault(width, [])
        known += [name for name in names if name not in known]

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(processes, "warm_up", lambda number, device: found.update({0: [f"{number} of them"]}))
    return found


def node(target: Any, width: int = 72) -> Any:
    value = torch.empty(4, 16, width, dtype=torch.bfloat16, device="meta")
    return SimpleNamespace(target=target, all_input_nodes=[SimpleNamespace(meta={"val": value})])


def chooser(attention: str = "auto", **options: Any) -> KernelChooser:
    return KernelChooser(attention, Measurements(KERNELS, FakeMeter({})), **options)


def test_variants_follow_from_the_attention_of_a_graph(begun: Begun) -> None:
    other = node(torch.ops.aten.mm.default)
    with choosing(chooser()):
        ahead.compile_ahead([other], HOPPER)
        assert not begun
        ahead.compile_ahead([node(varlen_attention), other, node(varlen_attention)], HOPPER)
        ahead.compile_ahead([node(dense_attention, 64), node(varlen_attention, 80)], HOPPER)
        ahead.warm_up(HOPPER)
    assert begun == {72: PACKED, 64: [*PACKED, *DENSE], 80: PACKED, 0: ["4 of them"]}


def trace_attention(*widths: int, dtype: torch.dtype = torch.bfloat16) -> None:
    with FakeTensorMode():
        for width in widths:
            qkv = torch.empty(4, 3, 16, width, dtype=dtype).unbind(1)
            varlen_attention(*qkv, torch.empty(2, dtype=torch.int32), 4, 1.0)


def test_a_trace_that_meets_attention_begins_what_its_graph_will_ask_for(begun: Begun) -> None:
    stored = {72: 80}
    trace_attention(72)
    with choosing(chooser()), ahead.compiling_as_traced(HOPPER, lambda width: stored.get(width, width)):
        assert not begun
        trace_attention(72, 64, 72)
    trace_attention(96)
    assert begun == {80: PACKED, 72: ["flash_attn_4"], 64: PACKED}


def test_heads_whose_width_varies_are_left_out() -> None:
    varies = node(varlen_attention)
    varies.all_input_nodes[0].meta["val"] = SimpleNamespace(
        dtype=torch.bfloat16, shape=(4, 16, ShapeEnv().create_unbacked_symint())
    )
    assert ahead.heads_of([varies, node(varlen_attention, 80)]) == {(torch.bfloat16, 80): False}


@pytest.mark.parametrize("settled", [chooser("torch_flash"), chooser(invariant=True)])
def test_nothing_is_compiled_where_nothing_is_compared(settled: KernelChooser, begun: Begun) -> None:
    with choosing(settled):
        ahead.warm_up(HOPPER)
        with ahead.compiling_as_traced(HOPPER, lambda width: width):
            trace_attention(72)
        ahead.compile_ahead([node(varlen_attention)], HOPPER)
    assert not begun


def test_heads_whose_times_are_known_are_left_out(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Measurements(KERNELS, FakeMeter({"torch_flash": 1.0, "flash_attn_4": 2.0}))
    monkeypatch.setattr(fakes, "candidates", lambda shape: list(KERNELS[:4]))
    with choosing(KernelChooser(measurements=fakes)), measuring():
        fakes.find(shape(1024))
        ahead.warm_up(CUDA)
        ahead.compile_ahead([node(varlen_attention, 72), node(varlen_attention, 80)], CUDA)
    assert not begun  # this device is none that it works on
    monkeypatch.setattr(processes, "is_possible", lambda device: True)
    with choosing(KernelChooser(measurements=fakes)):
        ahead.warm_up(CUDA)
        ahead.compile_ahead([node(varlen_attention, 72), node(varlen_attention, 80)], CUDA)
        with ahead.compiling_as_traced(CUDA, lambda width: width):
            trace_attention(72, 96)
    assert begun == {80: PACKED, 96: PACKED}
