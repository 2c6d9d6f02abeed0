"""A trace of equal blocks must be the plain trace: the same pieces, proof, symbols and results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.compile import trace
from fxsplit_encoder.compile.blocks import equal_blocks_as_ops
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.errors import CompileError

from ...small_tower import SmallAdapter
from ..packed_forwards import SPLITTING_OPS, WIDTH, packed_inputs, trace_with
from . import block_towers

MESSAGE = "one by one"
Operations = list[list[str]]


def trace_it(
    forward: Callable[..., Tensor], inputs: dict[str, Tensor], module: nn.Module | None
) -> tuple[BoundProgram, Operations]:
    """The program, and the operations of each distinct piece."""
    operations: Operations = []

    def compile_piece(graph: Any, values: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        operations.append([str(n.target) for n in nodes if isinstance(n.meta["val"], Tensor)])
        return graph.forward

    options = CompileOptions(SPLITTING_OPS, compile_piece)
    return trace_with(forward, inputs, options, module), operations


def assert_same_program(one: BoundProgram, other: BoundProgram) -> None:
    a, b = one.program, other.program
    assert [(s.kind, s.distinct) for s in a.steps] == [(s.kind, s.distinct) for s in b.steps]
    assert a.padding == b.padding
    assert (a.region_start, len(a.region_symbols)) == (b.region_start, len(b.region_symbols))
    assert one.region.inputs.keys() == other.region.inputs.keys()
    for name, entry in one.region.inputs.items():
        same = other.region.inputs[name]
        assert (entry.is_segments, entry.token_dim) == (same.is_segments, same.token_dim)
    addresses = [sorted(p.fixed[i].data_ptr() for i in p.program.static_inputs) for p in (one, other)]
    assert addresses[0] == addresses[1]
    assert a.token_symbol is not None and b.token_symbol is not None
    for tokens in range(70):
        assert a.accepts({a.token_symbol: tokens}) == b.accepts({b.token_symbol: tokens}), tokens


def test_a_packed_tower_becomes_the_program_of_a_plain_trace(inlined: list[int], fresh_dynamo: None) -> None:
    tower = SmallAdapter()
    cpu = torch.device("cpu")
    example = tower.prepare_encoder_cudagraph_capture_inputs(16, 2, 0, cpu, torch.float32).values
    forward = tower.encoder_cudagraph_forward
    plain, plain_operations = trace_it(forward, example, None)
    copied, operations = trace_it(forward, example, tower)
    assert inlined == [0, 3 * 10]
    assert operations == plain_operations
    assert_same_program(copied, plain)
    assert copied.program.padding.proved
    for grids in ([[1, 8, 8], [1, 4, 6]], [[2, 4, 4]]):
        rows = sum(t * h * w for t, h, w in grids)
        batch = {
            "pixel_values": torch.randn(rows, tower.patch_features),
            "image_grid_thw": torch.tensor(grids),
        }
        values = tower.prepare_encoder_cudagraph_replay_buffers(batch, 0, 0).values
        assert torch.equal(copied(values), plain(values))
        torch.testing.assert_close(copied(values), forward(values), rtol=1e-5, atol=1e-4)


def test_a_tower_of_tiles_becomes_the_program_of_a_plain_trace(inlined: list[int]) -> None:
    tower = block_towers.Dense()
    example = {"x": torch.randn(6, 5, WIDTH)}
    plain, _ = trace_it(tower, example, None)
    copied, _ = trace_it(tower, example, tower)
    assert inlined == [0, 3 * 2 + 3 * 2]
    assert_same_program(copied, plain)
    x = torch.randn(9, 5, WIDTH)
    assert torch.equal(copied({"x": x}), plain({"x": x}))
    torch.testing.assert_close(copied({"x": x}), tower({"x": x}))


def inputs_of(tokens: int = 12) -> dict[str, Tensor]:
    return {name: packed_inputs(tokens)[name] for name in ("x", "cu")}


def traced_tower(tower: nn.Module) -> BoundProgram:
    return trace_it(tower, inputs_of(), tower)[0]


def assert_equals_eager(bound: BoundProgram, tower: Any) -> None:
    for tokens in (12, 29):
        inputs = inputs_of(tokens)
        expected = tower({name: t.clone() for name, t in inputs.items()})
        torch.testing.assert_close(bound(inputs), expected)


def test_blocks_called_with_other_arguments_are_traced_apart(inlined: list[int]) -> None:
    tower = block_towers.Tower()
    scales = (torch.tensor([2.0]), 3, None)

    class TwoKinds(nn.Module):
        blocks = tower.blocks

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            x = self.blocks[0](inputs["x"], inputs["cu"])
            x = self.blocks[1](x, inputs["cu"], (inputs["scale"], 2.5), unused=scales[2])
            return self.blocks[2](x, inputs["cu"], tables=[inputs["scale"], scales[1]], flag=True)

    module = TwoKinds()
    inputs = {**inputs_of(), "scale": torch.randn(12, WIDTH)}
    bound, _ = trace_it(module, inputs, tower)
    assert inlined == [9]
    torch.testing.assert_close(bound(inputs), module(inputs))


def test_a_block_that_runs_twice_has_its_weights_once(inlined: list[int]) -> None:
    tower = block_towers.Tower(depth=2)
    tower.blocks = nn.ModuleList([*tower.blocks, tower.blocks[0]])
    bound = traced_tower(tower)
    assert inlined == [2 * 3]
    assert_equals_eager(bound, tower)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: block_towers.Tower(block_towers.ReturnsTuple), "returns a tuple"),
        (lambda: block_towers.Tower(block_towers.ReturnsView), "or a view of it"),
        (lambda: block_towers.Tower(block_towers.WritesToArgument), "writes to its arguments"),
        (lambda: block_towers.Tower(block_towers.KeepsState), "changes its own attributes"),
        (lambda: block_towers.Tower(block_towers.MakesConstant), "makes a constant tensor"),
        (lambda: block_towers.Tower(block_towers.TakesObject, made_by=block_towers.Factor()), "CompileError"),
        (lambda: block_towers.UnderAutocast(), "CompileError"),
    ],
    ids=["tuple", "view", "write", "state", "constant", "object", "autocast"],
)
def test_what_no_op_can_stand_for_is_traced_plainly(
    make: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    tower = make()
    with caplog.at_level(logging.INFO, trace.__name__):
        try:
            bound = traced_tower(tower)
        except CompileError as error:  # a plain trace may refuse it too
            bound, refusal = None, str(error)
    assert MESSAGE in caplog.text and reason in caplog.text
    assert not any("forward" in vars(block) for block in tower.blocks)
    if bound is None:
        with pytest.raises(CompileError) as plain:
            trace_it(tower, inputs_of(), None)
        assert str(plain.value) == refusal
        return
    assert not any(
        isinstance(v, torch._subclasses.FakeTensor) for b in tower.blocks for v in vars(b).values()
    )
    if not isinstance(tower, block_towers.UnderAutocast):
        assert_equals_eager(bound, tower)


def test_blocks_run_as_they_are_while_others_trace_them() -> None:
    tower = block_towers.Tower()
    inputs = inputs_of()
    expected = tower(inputs)
    with equal_blocks_as_ops(tower) as num_blocks:
        assert num_blocks == 3
        assert torch.equal(tower(inputs), expected)
    assert not any("forward" in vars(block) for block in tower.blocks)
