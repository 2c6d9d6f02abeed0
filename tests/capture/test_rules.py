"""The capture rules, in order."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.capture.breakable import SegmentedCapture
from fxsplit_encoder.capture.buffers import StaticBuffer
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest, ProgramBody
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.ladder import BudgetLadder
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.compile.program import Ref
from fxsplit_encoder.errors import InputError, ReplayError, WeightsMovedError
from fxsplit_encoder.kernels.attention import builtin, varlen_attention
from fxsplit_encoder.manager import path as path_module

from ..backend.towers import Attention
from ..dispatched import Dispatched
from ..small_tower import FEATURES, SmallAdapter, SmallTower
from .bodies import FakeCuda, FakeStream, body_calling, body_of, piece, request_of

Manager = fx.EncoderCudaGraphManager

IMAGES = [[(1, 8, 8)], [(1, 4, 6), (1, 2, 2)], [(1, 12, 10)], [(1, 2, 4)]]
TOLERANCE = 1e-5


def assert_as_its_tower(output: Tensor, manager: Manager, inputs: dict[str, Any]) -> None:
    """With the parameters that are there now."""
    torch.testing.assert_close(output, manager.tower.encoder_eager_forward(inputs), rtol=0, atol=TOLERANCE)


def snapshot(captured: CapturedForward) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in captured.inputs.tensors.items()}


def replay(manager: Manager, budget: int, inputs: dict[str, Any]) -> list[Tensor]:
    """Replays one budget, whatever the planner would choose; one tensor for all items."""
    path = manager.paths["default"]
    values = path.values(inputs)
    captured = path.best_capture(path.ladder, budget, values)
    captured.load(values, path.rows({}, values))
    rows = sum(t * h * w for key in ("image_grid_thw", "video_grid_thw") for t, h, w in inputs.get(key, []))
    return [captured.replay(debug=True)[0][: rows // 4].clone()]


# --- 1: pad rows are finite at every layer


class LeakyAttention:
    """What fast kernels do: they write no row outside of the segments, and multiply value rows behind the
    last segment by a weight of zero, which leaves a NaN a NaN.
    """

    def __init__(self) -> None:
        self.finite: list[bool] = []
        self.rows: set[int] = set()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
        self.finite.append(all(bool(t.isfinite().all()) for t in (query, key, value)))
        self.rows.add(query.shape[0])
        row = torch.arange(query.shape[0])
        segment = torch.searchsorted(lengths[1:].contiguous(), row, right=True)
        logits = torch.einsum("qhd,khd->hqk", query, key) * scale
        weights = logits.masked_fill(segment[:, None] != segment[None, :], float("-inf")).softmax(-1)
        out = torch.full_like(query, float("nan"))
        real = int(lengths[-1])
        out[:real] = torch.einsum("hqk,khd->qhd", weights, value)[:real]
        return out


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> LeakyAttention:
    kernel = LeakyAttention()
    monkeypatch.setattr(builtin, "attend_by_segment", kernel)
    return kernel


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_rule_1_vllm_57136_sglang_27343_pad_rows_are_finite_at_every_layer(
    mode: str, leaky: LeakyAttention, make_captured: Any, make_batch: Any, assert_as_eager: Any
) -> None:
    manager = make_captured(mode=mode)
    for grids in IMAGES:
        inputs = make_batch(grids)
        leaky.finite.clear()
        assert_as_eager(manager, inputs)
        assert len(leaky.finite) == 4
        assert all(leaky.finite)
        for captured in manager.paths["default"].captured.values():
            assert captured.outputs[0].isfinite().all()
    assert manager.stats().padding_fraction > 0


class Untraceable(SmallAdapter):
    """Its forward Dynamo refuses, so that it is captured as it is, without masks."""

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        torch._dynamo.graph_break()
        return super().encoder_cudagraph_forward(inputs, path)


def test_rule_1_without_a_program_attention_clears_the_pad_rows(
    leaky: LeakyAttention, make_batch: Any
) -> None:
    config = fx.EncoderConfig(mode="full", token_budgets=(4, 16, 32), max_items_per_batch=4, debug=True)
    manager = Manager(Untraceable(), config)
    manager.capture()
    assert "captured without compiling" in manager.reports[0]
    inputs = make_batch([(1, 8, 8), (1, 2, 4)], features=FEATURES)
    expected = list(SmallTower()(inputs["pixel_values"], inputs["image_grid_thw"]).split([16, 2]))
    torch.testing.assert_close(manager.execute(inputs), expected, rtol=0, atol=TOLERANCE)
    assert manager.stats().hits == 2
    assert all(leaky.finite)
    assert all(c.outputs[0].isfinite().all() for c in manager.paths["default"].captured.values())


def test_rule_1_between_graphs_attention_clears_the_pad_rows_that_the_host_does_not_know(
    leaky: LeakyAttention,
) -> None:
    q, lengths = torch.randn(8, 2, 4), torch.tensor([0, 8, 8], dtype=torch.int32)
    buffers = [StaticBuffer("q", q), StaticBuffer("cu_seqlens", lengths)]
    request = request_of(lambda: [varlen_attention(q, q, q, lengths, 8, 0.5) + 1], 8, buffers)
    captured = CapturedForward(request, "breakable", GraphPool(q.device))
    captured.record()
    assert captured.segment_inputs == ("cu_seqlens",)
    lengths.copy_(torch.tensor([0, 2, 5]))  # behind the back of `load`, as a value on a device is
    (out,) = captured.replay(debug=True)
    assert torch.equal(out[5:], torch.ones(3, 2, 4))
    torch.testing.assert_close(out[:5], varlen_attention(q, q, q, lengths, 8, 0.5)[:5] + 1)


# --- 2: cumulative lengths rise, and the bound holds


def joined(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.cat(value)


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_rule_2_found_c_sglang_16902_sglang_37043_trtllm_14829_trtllm_17030_any_composition_on_one_capture(
    mode: str, managers: Any, make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
    """`replay` checks, as every replay with `debug` does, that lengths rise within their bound."""
    batches = [
        make_batch([], [(8, 4, 4)]),
        make_batch([(1, 4, 6)]),
        make_batch([(1, 8, 16)]),
        make_batch([(1, 2, 2)] * 3, [(5, 2, 4)]),
        make_batch([(1, 2, 2)]),
    ]
    for inputs in batches:
        (output,) = replay(managers[mode], 32, inputs)
        torch.testing.assert_close(
            output, torch.cat(encode(tiny_towers.reference, inputs)), rtol=0, atol=TOLERANCE
        )


# --- 3: every extent is checked before any copy


def assert_unchanged(captured: CapturedForward, before: dict[str, Tensor]) -> None:
    for name, tensor in captured.inputs.tensors.items():
        assert torch.equal(tensor, before[name]), name


OVERSIZE = {
    "pixel_values": lambda value: torch.cat([value] * 5),
    "position_ids": lambda value: torch.cat([value] * 5),
    "interp_weights": lambda value: value.repeat(1, 2),
    "interp_indices": lambda value: value[0],
    "cu_seqlens": lambda value: torch.arange(25, dtype=torch.int32),
}


@pytest.mark.parametrize("name", OVERSIZE)
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_rule_3_what_does_not_fit_leaves_every_buffer_untouched(
    mode: str, name: str, managers: Any, make_batch: Any
) -> None:
    path = managers[mode].paths["default"]
    inputs = make_batch([(1, 6, 4)])
    captured = path.captured[16]
    values = path.values(inputs)
    captured.load(values, path.rows({}, values))
    before, rows = snapshot(captured), captured.num_rows.tensor.item()
    values = {n: joined(v) for n, v in path.values(make_batch([(1, 4, 4)], seed=1)).items()}
    values[name] = OVERSIZE[name](values[name])
    with pytest.raises(ReplayError, match=name):
        captured.load(values, path.rows({}, values))
    assert_unchanged(captured, before)
    assert captured.num_rows.tensor.item() == rows
    assert captured.inputs.buffers["pixel_values"].dirty_rows == 24


def test_rule_3_omni_7650_the_manager_falls_back_whole_and_counts_it(
    make_manager: Any, make_batch: Any, assert_as_eager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Did the planner believe that any number of segments fits, the capture would still refuse.
    costs: Any = path_module.EncoderPath.costs
    many = property(lambda path: replace(costs.fget(path), max_segments={}))
    monkeypatch.setattr(path_module.EncoderPath, "costs", many)
    manager = make_manager(mode="full")
    manager.limits = fx.planning.limits.Limits(manager.limits.path_budgets, 4, 99)
    manager.capture()
    manager.execute(make_batch([(1, 6, 4)]))
    before = snapshot(manager.paths["default"].captured[16])
    inputs = make_batch([(1, 2, 2)] * 2, [(14, 2, 2)])
    assert_as_eager(manager, inputs)
    assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 3}
    assert_unchanged(manager.paths["default"].captured[16], before)


# --- 4: a missing value is an error


def test_rule_4_vllm_43403_a_missing_value_is_an_error_and_none_keeps(managers: Any, make_batch: Any) -> None:
    manager = managers["full"]
    path = manager.paths["default"]
    values = path.values(make_batch([(1, 4, 4)]))
    captured = path.captured[16]
    before = snapshot(captured)
    with pytest.raises(ReplayError, match="interp_weights: the replay needs this buffer and got no value"):
        captured.load({k: v for k, v in values.items() if k != "interp_weights"}, None)
    assert_unchanged(captured, before)

    captured.load(values, path.rows({}, values))
    first = captured.replay()[0][:4].clone()
    captured.load({**values, "interp_weights": None}, path.rows({}, values))
    assert torch.equal(captured.replay()[0][:4], first)
    captured.load(dict.fromkeys(values), None)
    assert torch.equal(captured.replay()[0][:4], first)


# --- 5: only dirty rows are cleared


def test_rule_5_vllm_56922_only_rows_that_the_last_replay_dirtied_are_cleared() -> None:
    buffer = StaticBuffer("x", torch.ones(100, 3))
    static = StaticInputs([buffer])
    cleared = []
    for number, rows in enumerate((10, 4, 4, 7, 0, 100, 99), start=1):
        with Dispatched() as writes:
            static.load({"x": torch.full((rows, 3), float(number))})
        cleared.append(writes.entries("aten.zero_") // 3)
        assert writes.entries("aten.copy_") == rows * 3
        assert buffer.tensor[:rows].eq(number).all()
        assert buffer.tensor[rows:].eq(0).all()
    assert cleared == [90, 6, 0, 0, 7, 0, 1]


def test_rule_5_the_pixels_of_a_batch_are_copied_once_and_metadata_not_again(
    managers: Any, make_batch: Any
) -> None:
    manager = managers["full"]
    path = manager.paths["default"]
    first, second, other = make_batch([(1, 16, 16)]), make_batch([(1, 16, 16)]), make_batch([(1, 8, 32)])
    lengths = len(path.captured[64].inputs.tensors["cu_seqlens"])
    replay(manager, 64, other)
    for inputs, has_new_metadata in ((first, True), (second, False), (other, True), (second, True)):
        with Dispatched() as writes:
            values = path.values(inputs)
            path.captured[64].load(values, path.rows({}, values))
        assert writes.entries("aten.zero_") == 0
        copied = {name: joined(value).numel() for name, value in values.items()} | {"cu_seqlens": lengths}
        assert writes.entries("aten.copy_") == (
            sum(copied.values()) if has_new_metadata else copied["pixel_values"]
        )


@settings(max_examples=15)
@given(loads=st.lists(st.tuples(st.sampled_from([16, 64]), st.integers(0, 2)), max_size=8))
def test_rule_5_what_is_not_copied_again_is_there(
    loads: list[tuple[int, int]], managers: Any, make_batch: Any
) -> None:
    """Captures share their inputs' memory: another one's batch may have been there in between."""
    path = managers["full"].paths["default"]
    batches = [make_batch([(1, 4, 4)]), make_batch([(1, 2, 8)]), make_batch([(1, 4, 4), (1, 2, 4)])]
    for budget, number in loads:
        captured, values = path.captured[budget], path.values(batches[number])
        captured.load(values, path.rows({}, values))
        for name, tensor in captured.inputs.tensors.items():
            given = joined(values[name])
            assert torch.equal(tensor[: len(given)], given.to(tensor.dtype)), name
            assert tensor[len(given) :].eq(given[-1] if name == "cu_seqlens" else 0).all(), name


def test_rule_5_a_tensor_that_may_change_is_read_again(managers: Any, make_batch: Any) -> None:
    path = managers["full"].paths["default"]
    values = {name: joined(value).clone() for name, value in path.values(make_batch([(1, 4, 4)])).items()}
    tensors = path.captured[64].inputs.tensors
    name = next(name for name in values if name not in ("pixel_values", "cu_seqlens"))
    for _ in range(2):
        values[name].numpy()[...] += 1  # leaves no trace that torch could see
        path.captured[64].load(values, path.rows({}, values))
        assert torch.equal(tensors[name][:16], values[name])


# --- 6: what a capture baked in stays where it is


@pytest.fixture
def captured_pair(make_captured: Any) -> Iterator[Any]:
    """(manager, a module of its tower); the module's parameters are put back at the end."""
    manager = make_captured(mode="full", token_budgets=(4, 16))
    module = manager.tower.tower.blocks[2].mlp.linear_fc1
    kept, data = module.weight, module.weight.data
    yield manager, module
    module.weight = kept
    module.weight.data = data


def move(module: Any) -> None:
    module.weight.data = module.weight.data.clone()


def substitute(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.data * 2, requires_grad=False)


def remove(module: Any) -> None:
    del module.weight
    module.register_parameter("weight", None)


@pytest.mark.parametrize("change", [move, substitute, remove])
def test_rule_6_a_parameter_elsewhere_is_an_error_that_names_it(
    change: Callable[[Any], None], captured_pair: Any, make_batch: Any
) -> None:
    manager, module = captured_pair
    captured = manager.paths["default"].captured[4]
    captured.replay()
    change(module)
    with pytest.raises(
        WeightsMovedError,
        match=r"^capture rule 6: blocks\.2\.mlp\.linear_fc1\.weight: moved .*\(1 of ",
    ):
        captured.replay()


@pytest.mark.parametrize("change", [move, substitute])
def test_rule_6_sglang_29216_the_manager_captures_again_over_parameters_elsewhere(
    change: Callable[[Any], None], captured_pair: Any, make_batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager, module = captured_pair
    inputs = make_batch([(1, 4, 4)])
    manager.execute(inputs)
    before = manager.paths["default"].captured
    held = sorted(before)
    change(module)
    for _ in range(2):
        assert_as_its_tower(manager.execute(inputs)[0], manager, inputs)
    assert caplog.text.count("capturing again: capture rule 6") == 1
    assert sorted(manager.paths["default"].captured) == held
    assert (manager.stats().hits, manager.stats().misses) == (3, {})


def test_rule_6_parameters_that_the_program_was_not_compiled_for_are_an_error(
    captured_pair: Any, make_batch: Any
) -> None:
    manager, module = captured_pair
    remove(module)
    with pytest.raises(InputError, match=r"got None in the place of one\. .*Call clear"):
        manager.execute(make_batch([(1, 4, 4)]))


def test_rule_6_what_a_replay_reads_is_held_until_clear(captured_pair: Any, make_batch: Any) -> None:
    manager, module = captured_pair
    address, expected = module.weight.data_ptr(), module.weight.detach().clone()
    memory = manager.paths["default"].parameters.memory()
    (held,) = [weakref.ref(tensor) for tensor in memory if tensor.data_ptr() == address]
    del memory
    move(module)
    with pytest.raises(WeightsMovedError):
        manager.paths["default"].captured[4].replay()
    assert torch.equal(held(), expected)
    manager.clear()
    assert held() is None
    substitute(module)
    manager.capture()
    inputs = make_batch([(1, 4, 4)])
    assert_as_its_tower(manager.execute(inputs)[0], manager, inputs)
    assert manager.stats().hits == 1


@pytest.mark.parametrize(
    ("debug", "expected"), [(False, ["launch", "look"]), (True, ["look", "launch", "look"])]
)
def test_rule_6_the_look_at_parameters_does_not_keep_the_device_waiting(
    captured_pair: Any, monkeypatch: pytest.MonkeyPatch, debug: bool, expected: list[str]
) -> None:
    captured = captured_pair[0].paths["default"].captured[4]
    order: list[str] = []
    monkeypatch.setattr(SegmentedCapture, "replay", lambda self: order.append("launch"))
    monkeypatch.setattr(StaticParameters, "check_addresses", lambda self: order.append("look"))
    captured.replay(debug=debug)
    assert order == expected


def test_rule_6_a_forward_that_is_captured_as_it_is_watches_its_parameters(make_batch: Any) -> None:
    manager: Any = Manager(
        Untraceable(), fx.EncoderConfig(mode="full", token_budgets=(4,), max_items_per_batch=1)
    )
    manager.capture()
    substitute(manager.tower.tower.merger.linear)
    with pytest.raises(WeightsMovedError, match=r"merger\.linear\.weight: moved"):
        manager.paths["default"].captured[4].replay()
    inputs = make_batch([(1, 2, 2)], features=FEATURES)
    assert_as_its_tower(manager.execute(inputs)[0], manager, inputs)
    assert manager.stats().hits == 1


# --- 7: the manager owns cloning


@pytest.mark.parametrize("mode", ["full", "piecewise", "none"])
def test_rule_7_results_survive_later_replays(mode: str, managers: Any, make_batch: Any) -> None:
    manager = managers[mode]
    inputs = make_batch([(1, 4, 4), (1, 8, 8), (1, 4, 4)])
    items = manager.execute(inputs)
    copies = [item.clone() for item in items]
    for seed in range(1, 4):
        manager.execute(make_batch([(1, 4, 4), (1, 8, 8), (1, 4, 4)], seed=seed))
    assert all(torch.equal(item, kept) for item, kept in zip(items, copies, strict=True))
    storages = [item.untyped_storage().data_ptr() for item in items]
    outputs = [c.outputs[0] for c in manager.paths["default"].captured.values()]
    # One memory an item: what caches one of them must not keep the others alive.
    assert len({*storages, *(o.untyped_storage().data_ptr() for o in outputs)}) == 3 + len(outputs)
    assert all(item.untyped_storage().nbytes() == item.nbytes for item in items)
    for item in items:
        item.fill_(float("nan"))
    again = manager.execute(inputs)
    assert all(torch.equal(item, kept) for item, kept in zip(again, copies, strict=True))


# --- 8: nothing compiles or allocates lazily inside a capture. On a device: tests/gpu/test_lazy_kernels.py.


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class LazyLayers:
    """Three layers whose kernels are compiled at their first call, which no capture survives."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.compiled: set[int] = set()

    def body(self) -> ProgramBody:
        x = torch.zeros(2)
        steps = [
            piece(self.run_layer, [layer, Ref(layer - 1) if layer else x], (layer,)) for layer in range(3)
        ]
        return body_of(steps, [2])

    def run_layer(self, layer: int, x: Tensor) -> tuple[Tensor]:
        if layer not in self.compiled:
            if self.cuda.capturing:
                raise RuntimeError(f"layer {layer} compiles inside the capture")
            self.compiled.add(layer)
        self.cuda.events.append(f"layer {layer}")
        return (x + 1,)


def test_rule_8_sglang_17871_sglang_19490_every_layer_runs_before_the_capture(cuda: FakeCuda) -> None:
    CapturedForward(request_of(LazyLayers(cuda).body()), "full", cuda.pool()).record()
    depth = ["layer 0", "layer 1", "layer 2"]
    assert cuda.events == [*depth, *depth, "synchronize", "begin", *depth, "end"]


# --- 9: a budget that cannot be captured is dropped with a reason; the others serve


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("tried to allocate 1 GiB"), "out of memory .* tried to allocate"),
        (RuntimeError("operation not permitted"), "operation not permitted"),
        (ValueError("bad launch"), "ValueError: bad launch"),
    ],
)
def test_rule_9_vllm_52509_vllm_57475_a_failed_budget_is_dropped_and_the_others_serve(
    error: Exception,
    reason: str,
    make_manager: Any,
    make_batch: Any,
    assert_as_eager: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager(mode="full")
    path = manager.paths["default"]
    make_request = path.ladder.request

    def failing_request(budget: int) -> CaptureRequest:
        request = make_request(budget)
        if budget not in (16, 64):
            return request

        def fail() -> Any:
            raise error

        return replace(request, body=body_calling(fail))

    monkeypatch.setattr(path.ladder, "request", failing_request)
    manager.capture()
    assert sorted(manager.budget_graphs["default"]) == [4, 32]
    assert len(manager.reports) == 2
    for budget, report in zip((64, 16), manager.reports, strict=True):
        assert report.startswith(f"path default: budget {budget} is dropped: ")
    assert re.search(reason, manager.reports[0])
    inputs = make_batch([(1, 8, 6), (1, 16, 16)])
    assert_as_eager(manager, inputs)
    stats = manager.stats()
    assert stats.hits == 1
    assert stats.misses == {fx.MissReason.NOT_CAPTURED: 1}
    assert stats.budgets["default", 32, ()].replays == 1


def test_rule_9_static_inputs_that_do_not_fit_drop_the_budget() -> None:
    def request(budget: int) -> CaptureRequest:
        raise torch.OutOfMemoryError("no room for the inputs")

    ladder = BudgetLadder(request, "full", GraphPool(torch.device("cpu")))
    assert ladder.capture(8) is None
    assert ladder.dropped == {8: "no room for the inputs"}


def test_rule_9_a_failed_capture_for_one_segment_keeps_the_general_one(cuda: FakeCuda) -> None:

    def fail() -> Any:
        raise torch.OutOfMemoryError("no more")

    def request(budget: int) -> CaptureRequest:
        layers = LazyLayers(cuda).body()
        return request_of(layers, single_segment=lambda: request_of(body_calling(fail)))

    ladder = BudgetLadder(request, "full", cuda.pool())
    captured = ladder.capture(4)
    assert captured is not None
    assert not ladder.dropped
    assert captured.for_one_segment is None


# --- 10: one pool, largest first, retired as a whole


@pytest.fixture
def pool_events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    events: list[Any] = []
    record, retire = CapturedForward.record, GraphPool.retire

    def spy_record(self: CapturedForward, warmups: int) -> None:
        events.append((id(self.pool), self.rows))
        record(self, warmups)

    def spy_retire(self: GraphPool) -> None:
        events.append((id(self), "retire"))
        retire(self)

    monkeypatch.setattr(CapturedForward, "record", spy_record)
    monkeypatch.setattr(GraphPool, "retire", spy_retire)
    return events


def test_rule_10_largest_first_in_one_pool_that_is_retired_whole(
    make_manager: Any, make_batch: Any, pool_events: list[Any]
) -> None:
    manager = make_manager(mode="full")
    pool = id(manager.pool)
    manager.capture()
    assert pool_events == [(pool, rows) for rows in (256, 128, 64, 16)]
    captures = list(manager.paths["default"].captured.values())
    inputs = make_batch([(1, 4, 4)])
    first = manager.execute(inputs)
    pool_events.clear()

    manager.clear()
    assert pool_events == [(pool, "retire")]
    assert not manager.is_captured()
    assert manager.pool.used_bytes == 0
    assert not any(captured.outputs or captured.capture.segments for captured in captures)
    assert manager.stats().graph_bytes == 0
    manager.execute(inputs)
    assert manager.stats().misses == {fx.MissReason.NOT_CAPTURED: 1}

    manager.capture()
    assert [rows for _, rows in pool_events[1:]] == [256, 128, 64, 16]
    assert torch.equal(manager.execute(inputs)[0], first[0])
    assert manager.stats().hits == 2


def test_rule_10_every_path_shares_the_order(pool_events: list[Any], make_manager: Any) -> None:
    manager = make_manager(mode="full")
    twin = path_module.EncoderPath.__new__(path_module.EncoderPath)
    twin.__dict__.update(manager.paths["default"].__dict__)
    twin.name, twin.budgets = "other", (8, 40)
    twin.ladder = BudgetLadder(manager.paths["default"].ladder.request, "full", manager.pool)
    manager.paths_by_key["other", ()] = twin
    manager.capture()
    assert [rows // 4 for _, rows in pool_events] == [64, 40, 32, 16, 8, 4]
    assert len({pool for pool, _ in pool_events}) == 1


def test_rule_10_warming_up_the_backend_begins_with_the_largest(
    fresh_dynamo: None, pool_events: list[Any]
) -> None:
    compiled = torch.compile(
        Attention().requires_grad_(False),
        backend="encoder_cg",
        dynamic=True,
        options={"token_budgets": [2, 4, 16]},
    )
    assert fx.warmup(compiled, torch.randn(3, 5, 8)) == 3
    assert [rows for _, rows in pool_events if rows != "retire"] == [16, 4, 2]


def test_replays_on_two_streams_are_ordered_even_after_a_failure(cuda: FakeCuda) -> None:
    pool, events = cuda.pool(), cuda.events
    with pool.replaying():
        events.append("first")
    with pytest.raises(KeyError), pool.replaying():
        raise KeyError
    with cuda.entered(FakeStream(cuda, "other")), pool.replaying():
        events.append("second")
    assert events == ["first", "record stream", "record stream", "other waits", "second", "record other"]
