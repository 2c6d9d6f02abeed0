import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from fxsplit_encoder.attention.kernels import ahead
from fxsplit_encoder.compile import BoundProgram, CompileOptions, trace, trace_forward
from fxsplit_encoder.errors import CompileError
from fxsplit_encoder.towers import wrap

DEPTH = 4
OPTIONS = ("fxsplit::varlen_attention", "aten::scaled_dot_product_attention")
GRIDS: list[list[list[int]]] = [
    [[1, 4, 4]],
    [[1, 2, 4]],
    [[1, 8, 8], [1, 4, 6]],
    [[2, 4, 6]],
    [[1, 2, 2], [1, 16, 12], [1, 2, 8]],
    [[4, 2, 2], [1, 8, 2], [3, 6, 4]],
    [[1, 32, 32]],
    [[1, 2, 2]] * 16,
    [[1, 4, 10], [16, 4, 4]],
]


@pytest.fixture(scope="module")
def tower() -> Any:
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=DEPTH,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        out_hidden_size=96,
        deepstack_visual_indexes=[1, 2],
    )
    return Qwen3VLVisionModel(config).eval()


@pytest.fixture(scope="module")
def wrapped(tower: Any) -> Any:
    return wrap(copy.deepcopy(tower))


def trace_tower(wrapped: Any, piece_compiler: Any) -> BoundProgram:
    example = wrapped.prepare_encoder_cudagraph_capture_inputs(
        16, 2, 0, torch.device("cpu"), torch.float32
    ).values
    options = CompileOptions(OPTIONS, piece_compiler)
    return trace_forward(wrapped.encoder_cudagraph_forward, example, {name: [0] for name in example}, options)


@pytest.fixture(scope="module")
def bound(wrapped: Any) -> Iterator[BoundProgram]:
    yield trace_tower(wrapped, "eager")


def encode(wrapped: Any, bound: BoundProgram, pixels: Tensor, grids: list[list[int]]) -> Tensor:
    batch = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    return bound(wrapped.prepare_encoder_cudagraph_replay_buffers(batch, 0, 0).values)


def encode_in_eager(tower: Any, pixels: Tensor, grids: list[list[int]]) -> Tensor:
    with torch.no_grad():
        output = tower(pixels, torch.tensor(grids))
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def pixels_for(grids: list[list[int]]) -> Tensor:
    return torch.randn(sum(t * h * w for t, h, w in grids), 1536)


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_one_trace_serves_every_batch(
    grids: list[list[int]], tower: Any, wrapped: Any, bound: BoundProgram
) -> None:
    pixels = pixels_for(grids)
    got = encode(wrapped, bound, pixels, grids)
    torch.testing.assert_close(got, encode_in_eager(tower, pixels, grids), rtol=0, atol=1e-5)


def test_the_tower_becomes_pieces_of_few_kinds(bound: BoundProgram) -> None:
    program = bound.program
    assert len(program.splits) == DEPTH
    assert len(program.pieces) == DEPTH + 1
    # The first, the last, and those in between with deepstack or without.
    assert program.num_distinct == 4
    assert program.padding.proved, str(program.padding)
    assert program.region_start == 0
    assert program.region_symbols == ()


def test_the_inputs_are_known_by_name(bound: BoundProgram, wrapped: Any) -> None:
    assert bound.region.segment_inputs == ("cu_seqlens",)
    assert {name: entry.token_dim for name, entry in bound.region.inputs.items()} == {
        "pixel_values": 0,
        "position_ids": 0,
        "interp_indices": 0,
        "interp_weights": 0,
        "cu_seqlens": None,
    }
    parameters = {p.data_ptr() for p in (*wrapped.parameters(), *wrapped.buffers())}
    assert all(bound.fixed[i].data_ptr() in parameters for i in bound.program.static_inputs)


def test_the_tokens_of_a_batch_are_its_patches(bound: BoundProgram, wrapped: Any) -> None:
    batch = {"pixel_values": pixels_for([[1, 4, 6]]), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    values = wrapped.prepare_encoder_cudagraph_replay_buffers(batch, 0, 0).values
    assert bound.tokens(values) == 24
    assert bound.symbols(values)[str(bound.program.token_symbol)] == 24


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [(8, True), (64, True), (4096, True), (30, False), (6, False), (1, False), (0, False)],
)
def test_only_token_counts_that_the_trace_holds_for_are_accepted(
    tokens: int, accepted: bool, bound: BoundProgram
) -> None:
    assert bound.program.token_symbol is not None
    assert bound.program.accepts({bound.program.token_symbol: tokens}) is accepted


@pytest.mark.parametrize("independent", [False, True])
def test_sizes_that_the_trace_takes_to_exceed_one_do_unless_rows_are_independent(
    independent: bool, trace: Any
) -> None:
    program = trace((lambda y, i: y) if independent else (lambda y, i: y - y.mean(0))).program
    assert program.padding.proved is independent
    accepted = [program.accepts({program.token_symbol: n}) for n in (0, 1, 2, 3, 1000)]
    assert accepted == [False, independent, True, True, True]


@pytest.mark.slow
def test_pieces_decomposed_for_inductor_give_the_same(tower: Any, wrapped: Any) -> None:
    bound = trace_tower(wrapped, "aot_eager")
    for grids in (GRIDS[2], GRIDS[5]):
        pixels = pixels_for(grids)
        got = encode(wrapped, bound, pixels, grids)
        torch.testing.assert_close(got, encode_in_eager(tower, pixels, grids), rtol=0, atol=1e-5)


def test_progress_is_told_phase_by_phase_and_piece_by_piece(trace: Any) -> None:
    told: list[tuple[int, int]] = []
    options = CompileOptions(OPTIONS, "eager", lambda done, total: told.append((done, total)))
    trace(lambda y, i: y * 2, options=options)
    assert told == [(0, 3), (1, 3), (2, 4), (3, 4), (4, 4)]


def test_inputs_of_equal_content_and_shape_are_told_apart() -> None:
    shared = torch.ones(6, 8)

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        q = (inputs["a"] - 2 * inputs["b"]).view(-1, 2, 4)
        return torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], q.shape[0], 0.5)

    cu = torch.tensor([0, 6], dtype=torch.int32)
    options = CompileOptions(OPTIONS, "eager")
    bound = trace_forward(
        forward, {"a": shared, "b": shared, "cu": cu}, {"a": [0], "b": [0], "cu": [0]}, options
    )
    values = {"a": torch.randn(6, 8), "b": torch.randn(6, 8), "cu": cu}
    torch.testing.assert_close(bound(values), forward(values))


def test_an_empty_example_is_refused() -> None:
    options = CompileOptions(OPTIONS, "eager")
    with pytest.raises(CompileError, match="a: the example is empty"):
        trace_forward(lambda inputs: inputs["a"], {"a": torch.zeros(0, 8)}, {"a": [0]}, options)


def test_a_forward_that_fixes_a_size_is_refused(trace: Any) -> None:
    with pytest.raises(CompileError, match=r"one size of dimension 0 of x only \(12\)"):
        trace(lambda y, i: y.view(12, 8))


def test_an_input_that_the_forward_ignores_is_not_needed(trace: Any, inputs: Any) -> None:
    bound = trace(lambda y, i: y + 1)
    values = inputs(9)
    expected = bound(values)
    del values["index"]
    torch.testing.assert_close(bound(values), expected)


def test_the_examples_keep_their_marks_and_values(trace: Any) -> None:
    example = torch.randn(6, 8)
    before = example.clone()
    cu = torch.tensor([0, 6], dtype=torch.int32)

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        q = inputs["x"].view(-1, 2, 4)
        return torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], q.shape[0], 0.5)

    trace_forward(forward, {"x": example, "cu": cu}, {"x": [0], "cu": [0]}, CompileOptions(OPTIONS, "eager"))
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
        trace_forward(forward, {"x": torch.randn(4, 8)}, {"x": [0]}, CompileOptions(OPTIONS, "eager"))


def test_a_forward_without_attention_is_one_piece() -> None:
    options = CompileOptions(OPTIONS, "eager")
    bound = trace_forward(lambda inputs: F.relu(inputs["x"]), {"x": torch.randn(4, 8)}, {"x": [0]}, options)
    assert [step.kind for step in bound.program.steps] == ["piece"]
    assert bound.program.token_symbol is None
    assert not bound.program.padding.proved
    x = torch.randn(9, 8)
    torch.testing.assert_close(bound({"x": x}), F.relu(x))


@pytest.mark.slow
def test_many_traces_of_one_function_do_not_reach_a_limit(trace: Any, inputs: Any) -> None:
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 1):
        bound = trace(lambda y, i: y)
    assert bound(inputs(9)).shape == (9, 8)


@pytest.mark.parametrize(("piece_compiler", "starts"), [("inductor", 1), ("eager", 0)])
def test_inductors_workers_start_before_the_forward_is_traced(
    piece_compiler: str, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(trace, "start_compile_workers", lambda: started.append("workers"))
    options = CompileOptions(OPTIONS, piece_compiler)

    def untraceable(inputs: dict[str, Tensor]) -> Tensor:
        torch._dynamo.graph_break()
        return inputs["x"]

    with pytest.raises(CompileError):
        trace_forward(untraceable, {"x": torch.ones(4, 2)}, {"x": [0]}, options)
    assert len(started) == starts


@pytest.mark.parametrize("passes", [("wide_heads",), ()])
def test_attention_kernels_are_begun_before_there_is_a_graph(
    passes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []

    def start(names: list[str], width: int, dtype: torch.dtype, device: torch.device) -> list[ahead.Job]:
        jobs = [job for job in ahead.jobs_of(names, width, dtype) if job not in log]
        log.extend(jobs)
        return jobs

    monkeypatch.setattr(ahead, "why_not", lambda device: "")
    monkeypatch.setattr(ahead, "warm_up", lambda number, device: None)
    monkeypatch.setattr(ahead, "start", start)
    monkeypatch.setattr(ahead, "leave", lambda jobs: log.append(sorted(jobs)))
    config = Qwen3VLVisionConfig(
        depth=2, hidden_size=144, intermediate_size=32, num_heads=2, deepstack_visual_indexes=[1]
    )
    tower = wrap(Qwen3VLVisionModel(config).eval())
    example = tower.prepare_encoder_cudagraph_capture_inputs(16, 2, 0, torch.device("cpu"), torch.float32)
    options = CompileOptions(
        OPTIONS, "eager", passes=passes, observe=lambda graph: log.append("graph"), requires_tokens=True
    )
    dynamic = {name: [0] for name in example.values}
    trace_forward(tower.encoder_cudagraph_forward, example.values, dynamic, options, tower)
    packed = ["flash_attn_4", "flash_attn_4_64x128", "flash_attn_4_128x128"]
    jobs = ahead.jobs_of(packed, 80 if passes else 72, torch.float32)
    own = ahead.jobs_of(packed[:1], 72, torch.float32) if passes else []
    assert log == [*jobs, *own, "graph", []]
