"""Which weights are read ahead of which attention, and what is left to a run without CUDA graphs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxsplit_encoder.compile import CompileOptions
from fxsplit_encoder.compile.passes.prefetch_weights import prefetch

from ..packed_forwards import SPLITTING_OPS, packed_inputs, trace_packed
from .test_output_branch import Layers

# The package has a function of that name.
module_of_pass = importlib.import_module("fxsplit_encoder.compile.passes.prefetch_weights")
BOTH = ("output_branch", "prefetch_weights")


def traced(layers: nn.Module, passes: tuple[str, ...]) -> Any:
    layers.requires_grad_(False)
    return trace_packed(layers, options=CompileOptions(SPLITTING_OPS, "eager", passes=passes))


def prefetched(bound: Any, layers: nn.Module) -> list[list[str]]:
    """The names of the weights that each step reads ahead."""
    names = {id(parameter): name for name, parameter in layers.named_parameters()}
    return [
        [names[id(bound.fixed[ref.slot])] for ref in step.args[0]]
        for step in bound.program.steps
        if step.kind == "prefetch"
    ]


def test_the_weights_of_the_layers_after_attention_are_read_while_it_runs() -> None:
    torch.manual_seed(0)
    layers = Layers((1,))
    bound, plain = traced(layers, ("prefetch_weights",)), traced(layers, ())
    assert bound.program.pass_report == {"prefetch_weights": 3}
    assert prefetched(bound, layers) == [
        ["blocks.0.weight"],
        ["blocks.1.weight", "mergers.0.1.weight"],
        ["blocks.2.weight"],
    ]
    kinds = [step.kind for step in bound.program.steps]
    assert kinds == ["piece", *["prefetch", "split", "piece"] * 3, "split", "piece"]
    assert bound.program.padding.proved
    assert len(bound.program.splits) == len(plain.program.splits) == 4
    assert all(step.beside for step in bound.program.steps if step.kind == "prefetch")
    assert torch.equal(bound(packed_inputs(7)), plain(packed_inputs(7)))


def test_weights_of_layers_aside_are_not_read_ahead() -> None:
    layers = Layers((1,))
    assert prefetched(traced(layers, BOTH), layers)[1] == ["blocks.1.weight"]


def test_no_more_is_read_than_the_cache_should_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers((1,))
    one = layers.blocks[0].weight.numel() * 4
    for limit, expected in ((2 * one, 2), (2 * one - 1, 1), (1, 1)):
        monkeypatch.setattr(module_of_pass, "_MOST_BYTES", limit)
        assert len(prefetched(traced(layers, ("prefetch_weights",)), layers)[1]) == expected


def unavailable(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int], triton: bool) -> str | None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module_of_pass, "find_spec", lambda name: object() if triton else None)
    reason: str | None = module_of_pass._unavailable(torch.device("cuda", 0))
    return reason


def test_a_device_without_the_instruction_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert unavailable(monkeypatch, capability=(9, 0), triton=True) is None
    assert unavailable(monkeypatch, capability=(9, 0), triton=False) == "triton is not installed"
    reason = unavailable(monkeypatch, capability=(8, 0), triton=True)
    assert reason == "it needs compute capability 9.0; cuda:0 has 8.0"
    monkeypatch.setattr(module_of_pass, "_unavailable", lambda device: reason)
    with caplog.at_level(logging.WARNING):
        bound = traced(Layers((1,)), ("prefetch_weights",))
    assert bound.program.pass_report == {"prefetch_weights": 0}
    assert "prefetch_weights changes nothing: it needs compute capability 9.0" in caplog.text


def test_a_processor_has_no_kernel_for_it() -> None:
    with pytest.raises(NotImplementedError):
        prefetch([torch.ones(2)])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the kernel is launched with, where Triton is installed."""
    pytest.importorskip("triton")
    from contextlib import nullcontext

    from fxsplit_encoder.compile.passes import prefetch_kernel

    made: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **kwargs: made.append((*grid, *args))

    monkeypatch.setattr(prefetch_kernel, "prefetch_chunks", Kernel())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


def test_every_byte_of_a_dense_weight_is_asked_for(launches: list[tuple[Any, ...]]) -> None:
    from fxsplit_encoder.compile.passes.prefetch_kernel import prefetch as launch

    memory = torch.zeros(40_000, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    weights = [memory[start : start + size] for size in (4096, 8192, 5000, 16, 7)]
    columns = memory[start : start + 4096].view(64, 64)
    launch([*weights, columns.t(), columns[:, :8], memory[start + 1 : start + 33]])
    address = memory.data_ptr() + start
    assert [(*made[1:],) for made in launches] == [
        (address, 1, 4096),
        (address, 2, 4096),
        (address, 2, 896),  # 4992 of 5000 bytes: an aligned size
        (address, 1, 16),
        (address, 1, 4096),  # a transposed weight lies in one piece too
    ]


def test_the_kernel_compiles_for_hopper() -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fxsplit_encoder.compile.passes.prefetch_kernel import prefetch_chunks

    signature = {
        "address": "i64",
        **dict.fromkeys(("chunks", "last_bytes"), "i32"),
        **dict.fromkeys(("CHUNK", "BLOCK"), "constexpr"),
    }
    source = ASTSource(prefetch_chunks, signature, constexprs={(3,): 4096, (4,): 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "cp.async.bulk.prefetch.L2.global" in compiled.asm["ptx"]
