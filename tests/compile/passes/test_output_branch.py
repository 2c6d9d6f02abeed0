"""What only the outputs read becomes a piece that runs beside the blocks after it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.passes.output_branch import output_branch
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.compile.rewriting import mark_cuts
from fxsplit_encoder.kernels.attention import varlen_attention

from ..packed_forwards import SPLITTING_OPS, WIDTH, attend, packed_inputs, trace_packed
from .aten_graphs import Using, aten_graph

Inputs = Mapping[str, Tensor]


class Layers(nn.Module):
    """Blocks with a layer beside some of them, as Qwen3-VL's deepstack mergers."""

    def __init__(self, taps: tuple[int, ...], *, products: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mergers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), *([nn.Linear(WIDTH, WIDTH), nn.GELU()] if products else []))
            for _ in taps
        )
        self.taps = taps

    def forward(self, y: Tensor, inputs: Inputs) -> Tensor:
        deep = []
        for number, block in enumerate(self.blocks):
            y = y + block(y).sigmoid()
            if number in self.taps:
                deep.append(self.mergers[self.taps.index(number)](y))
            y = y + attend(y, inputs["cu"])
        return torch.cat([y.tanh(), *deep], dim=1)


def traced(layers: nn.Module, *passes: str) -> BoundProgram:
    layers.requires_grad_(False)
    return trace_packed(layers, options=CompileOptions(SPLITTING_OPS, "eager", passes=passes))


def shape_of(program: Any) -> list[str]:
    """Each step as a letter: piece, split, beside, joining."""
    return ["b" if step.beside else "j" if step.joins else step.kind[0] for step in program.steps]


def test_layers_aside_run_beside_and_are_joined_where_they_are_read() -> None:
    torch.manual_seed(0)
    layers = Layers((0, 1))
    bound, plain = traced(layers, "output_branch"), traced(layers)
    program = bound.program
    assert program.pass_report == {"output_branch": 2}
    assert program.padding == plain.program.padding
    assert program.padding.proved
    assert "".join(shape_of(program)) == "pspbspbspsj"
    # The layers beside equal blocks share a compilation, and leave equal blocks behind.
    assert len({step.distinct for step in program.pieces if step.beside}) == 1
    for tokens in (2, 5, 12):
        inputs = packed_inputs(tokens)
        assert torch.equal(bound(inputs), plain(inputs))


def num_branches(layers: nn.Module, *cuts: object) -> int:
    """In a graph that will be split at these operators."""
    inputs = packed_inputs(12)
    after_attention = Using(layers, lambda layers, x, cu: layers(attend(x, cu), {"cu": cu}))
    graph = aten_graph(after_attention, inputs["x"], inputs["cu"])
    mark_cuts(graph.module, frozenset(cuts))
    return output_branch(graph.module)


def after_the_last(layers: Any, y: Tensor, inputs: Inputs) -> Tensor:
    return torch.cat([layer(y) for layer in layers.blocks], dim=1)


@pytest.mark.parametrize(
    "layers", [Layers((0, 1), products=False), Using(Layers(()), after_the_last)], ids=["no product", "last"]
)
def test_what_is_little_or_has_nothing_to_run_beside_stays(layers: nn.Module) -> None:
    assert num_branches(layers, varlen_attention) == 0


def test_layers_that_an_op_of_the_configuration_needs_stay() -> None:
    """Cuts are those of the configuration, whatever they compute."""

    def sorted_beside(layer: Any, y: Tensor, inputs: Inputs) -> Tensor:
        tapped = layer(y)
        return torch.cat([attend(y, inputs["cu"]), sort(tapped)[0]], dim=1)

    layers, sort = Using(nn.Linear(WIDTH, WIDTH), sorted_beside), torch.ops.aten.sort.default
    assert num_branches(layers, varlen_attention) == 1
    assert num_branches(layers, varlen_attention, sort) == 0
    assert num_branches(layers) == 0


def test_layers_that_call_other_ranks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two streams nobody knows which calls first."""
    assert num_branches(Layers((0, 1)), varlen_attention) == 2
    pass_module = importlib.import_module("fxsplit_encoder.compile.passes.output_branch")
    monkeypatch.setattr(pass_module, "calls_other_ranks", lambda op: op is torch.ops.aten.gelu.default)
    assert num_branches(Layers((0, 1)), varlen_attention) == 0
