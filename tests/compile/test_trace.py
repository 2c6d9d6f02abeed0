from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder._torch import inductor
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.errors import CompileError
from fxsplit_encoder.kernels import compile_jobs

from .packed_forwards import SPLITTING_OPS, attend, packed_inputs, trace_packed, trace_with
from .passes.test_wide_heads import Blocks

DEPTH = 4


@pytest.fixture(scope="module")
def bound(make_manager: Any) -> BoundProgram:
    """The program of the tiny tower, which is traced once for all tests."""
    program: BoundProgram = make_manager().paths["default"].program
    return program


def test_the_tower_becomes_pieces_of_few_kinds(bound: BoundProgram) -> None:
    program = bound.program
    assert len(program.splits) == DEPTH
    assert len(program.pieces) == DEPTH + 1
    # The first, the last, and those in between with deepstack or without.
    assert program.num_distinct == 4
    assert program.padding.proved, str(program.padding)
    assert program.region_start == 0
    assert program.region_symbols == ()


def test_the_inputs_are_known_by_name(bound: BoundProgram, tiny_towers: Any) -> None:
    assert bound.region.segment_inputs == ("cu_seqlens",)
    assert {name: entry.token_dim for name, entry in bound.region.inputs.items()} == dict(
        pixel_values=0, position_ids=0, interp_indices=0, interp_weights=0, cu_seqlens=None
    )
    wrapped = tiny_towers.wrapped
    parameters = {p.data_ptr() for p in (*wrapped.parameters(), *wrapped.buffers())}
    assert all(bound.fixed[i].data_ptr() in parameters for i in bound.program.static_inputs)


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [(8, True), (4096, True), (30, False), (1, False), (0, False)],
)
def test_only_token_counts_that_the_trace_holds_for_are_accepted(
    tokens: int, accepted: bool, bound: BoundProgram
) -> None:
    assert bound.program.token_symbol is not None
    assert bound.program.accepts({bound.program.token_symbol: tokens}) is accepted


@pytest.mark.parametrize("independent", [False, True])
def test_sizes_that_the_trace_takes_to_exceed_one_do_unless_rows_are_independent(independent: bool) -> None:
    program = trace_packed((lambda y, i: y) if independent else (lambda y, i: y - y.mean(0))).program
    assert program.padding.proved is independent
    accepted = [program.accepts({program.token_symbol: n}) for n in (0, 1, 2, 3, 1000)]
    assert accepted == [False, independent, True, True, True]


def test_progress_is_told_phase_by_phase_and_piece_by_piece() -> None:
    told: list[tuple[int, int]] = []
    options = CompileOptions(SPLITTING_OPS, "eager", lambda done, total: told.append((done, total)))
    trace_packed(lambda y, i: y * 2, options=options)
    assert told == [(0, 3), (1, 3), (2, 4), (3, 4), (4, 4)]


def test_inputs_of_equal_content_and_shape_are_told_apart() -> None:
    shared = torch.ones(6, 8)

    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        return attend(inputs["a"] - 2 * inputs["b"], inputs["cu"])

    cu = torch.tensor([0, 6], dtype=torch.int32)
    bound = trace_with(forward, {"a": shared, "b": shared, "cu": cu})
    values = {"a": torch.randn(6, 8), "b": torch.randn(6, 8), "cu": cu}
    torch.testing.assert_close(bound(values), forward(values))


def test_an_empty_example_is_refused() -> None:
    with pytest.raises(CompileError, match="a: the example is empty"):
        trace_with(lambda inputs: inputs["a"], {"a": torch.zeros(0, 8)})


def test_a_forward_that_fixes_a_size_is_refused() -> None:
    with pytest.raises(CompileError, match=r"one size of dimension 0 of x only \(12\)"):
        trace_packed(lambda y, i: y.view(12, 8))


def test_the_examples_keep_their_marks_and_values() -> None:
    example = torch.randn(6, 8)
    before = example.clone()
    cu = torch.tensor([0, 6], dtype=torch.int32)

    trace_with(lambda inputs: attend(inputs["x"], inputs["cu"]), {"x": example, "cu": cu})
    assert not hasattr(example, "_dynamo_weak_dynamic_indices")
    assert torch.equal(example, before)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda inputs: (inputs["x"], inputs["x"] + 1), "tuple"),
        (lambda inputs: inputs["x"].add_(1).relu(), "2 tensors"),
    ],
    ids=["two results", "changes its input"],
)
def test_a_forward_returns_one_tensor_and_changes_nothing(forward: Any, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        trace_with(forward, {"x": torch.randn(4, 8)})


def test_many_traces_of_one_function_do_not_reach_a_limit() -> None:
    limit = 2
    with torch._dynamo.config.patch(recompile_limit=limit):
        for _ in range(limit + 1):
            bound = trace_packed(lambda y, i: y)
    assert bound(packed_inputs(9)).shape == (9, 8)


@pytest.mark.parametrize(("piece_compiler", "starts"), [("inductor", 1), ("eager", 0)])
def test_inductors_workers_start_before_the_forward_is_traced(
    piece_compiler: str, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(inductor, "start_workers", lambda: started.append("workers"))

    def untraceable(inputs: Mapping[str, Tensor]) -> Tensor:
        torch._dynamo.graph_break()
        return inputs["x"]

    with pytest.raises(CompileError):
        trace_with(untraceable, {"x": torch.ones(4, 2)}, CompileOptions(SPLITTING_OPS, piece_compiler))
    assert len(started) == starts


@pytest.mark.parametrize("passes", [("wide_heads",), ()])
def test_attention_kernels_are_begun_before_there_is_a_graph(
    passes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []

    def start(names: list[str], width: int, dtype: torch.dtype, device: torch.device) -> None:
        log.extend(job for name in names if (job := (name, width, dtype)) not in log)

    monkeypatch.setattr(compile_jobs, "is_possible", lambda device: True)
    monkeypatch.setattr(compile_jobs, "warm_up", lambda number, device: None)
    monkeypatch.setattr(compile_jobs, "start", start)
    blocks = Blocks(depth=2).requires_grad_(False)
    examples = {"x": torch.randn(9, 20), "cu": torch.tensor([0, 4, 4, 9], dtype=torch.int32)}
    options = CompileOptions(SPLITTING_OPS, "eager", passes=passes, observe=lambda graph: log.append("graph"))
    trace_with(lambda inputs: blocks(inputs["x"], inputs["cu"]), examples, options, blocks)
    packed = ["flash_attn_4", "flash_attn_4_64x128", "flash_attn_4_128x128"]
    jobs = [(name, 80 if passes else 72, torch.float32) for name in packed]
    own = [(packed[0], 72, torch.float32)] if passes else []
    assert log == [*jobs, *own, "graph"]
