"""`invariant: true`: all bits of an item are those that it gets alone, in any batch, mode and budget; what
cannot keep that is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.planning.plan import PathPlan
from tests.manager.mock_towers import UntraceableModel
from tests.manager.packings import differing, packed_items, packings, tile_items
from tests.small_tower import FEATURES, SmallAdapter
from tests.towers import tiny_towers
from tests.towers.tiny_inputs import Inputs, Item, PackedInputs

MODES = ("full", "piecewise", "exact", "none", "auto")
CASES = [
    pytest.param(("Qwen2_5_VisionTransformerPretrainedModel", torch.bfloat16), id="Qwen2.5-VL in bfloat16"),
    pytest.param(("InternVLModel", torch.float32), id="InternVL"),
]

pytestmark = pytest.mark.usefixtures("one_thread")


class Encoders(NamedTuple):
    inputs: Inputs
    items: list[Item]
    managers: dict[str, Any]
    alone: dict[Item, Tensor]


def make_manager(tower: Any, inputs: Inputs, **settings: Any) -> Any:
    limits = {"token_budgets": inputs.budgets["default"], "max_items_per_batch": 4, "max_frames_per_batch": 8}
    config = fx.EncoderConfig(**{**limits, "invariant": True, "debug": True, "exact_min_hits": 1, **settings})
    return fx.EncoderCudaGraphManager(tower, config, log_interval=0)


@pytest.fixture(scope="module", params=CASES)
def encoders(request: pytest.FixtureRequest) -> Encoders:
    name, dtype = request.param
    inputs = tiny_towers.tiny(name).inputs
    items = tile_items(40) if "InternVL" in name else packed_items(40, videos=bool(inputs.videos))
    tower = fx.wrap(tiny_towers.make(name).to(dtype))
    managers: dict[str, Any] = {}
    for mode in MODES:
        manager = managers[mode] = make_manager(tower, inputs, mode=mode)
        if mode != MODES[0]:  # traced once; all of them share that
            manager.paths["default"].bind(managers[MODES[0]].programs["default"])
        manager.capture()
    alone = {item: managers["none"].execute(inputs.make([item]))[0] for item in items}
    return Encoders(inputs, items, managers, alone)


def test_bits_are_those_of_an_item_alone_in_every_packing_and_mode(encoders: Encoders) -> None:
    for mode, batches in zip(MODES, packings(encoders.items, len(MODES)), strict=True):
        found = differing(encoders.managers[mode], encoders.inputs, batches, encoders.alone)
        assert found == [], (mode, found[:3])
    hits = {mode: manager.stats().hits for mode, manager in encoders.managers.items()}
    assert min(hits[mode] for mode in ("full", "piecewise", "exact", "auto")) >= 40
    assert hits["none"] == 0


def test_results_are_the_towers_but_for_rounding(encoders: Encoders) -> None:
    tower = encoders.managers["full"].tower
    for item in encoders.items[:4]:
        with torch.no_grad():
            expected = tower.encoder_eager_forward(encoders.inputs.make([item]), path="default")
        got, tolerance = encoders.alone[item], 64 * torch.finfo(expected.dtype).eps
        scale = float(expected.abs().max())
        torch.testing.assert_close(got, expected.reshape(got.shape), rtol=0, atol=tolerance * scale)


def test_the_public_check_finds_nothing_and_finds_what_differs(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = encoders.managers["full"]
    batch = sorted(encoders.items[:9], key=lambda item: item.modality)
    inputs = encoders.inputs.make(batch)
    assert manager.check_invariance(inputs, packings=4) == []
    assert manager.check_invariance(encoders.inputs.make([]), packings=4) == []
    collect = BatchRunner.collect

    def differs_in_company(self: Any, batch: Any, outputs: Any, *rest: Any) -> None:
        if len(batch.indices) > 1:
            outputs = {name: output + 1 for name, output in outputs.items()}
        collect(self, batch, outputs, *rest)

    monkeypatch.setattr(BatchRunner, "collect", differs_in_company)
    assert manager.check_invariance(inputs, packings=8) != []


def test_reports_name_the_kernel_that_attends(encoders: Encoders) -> None:
    (line,) = encoders.managers["full"].reports
    assert line.startswith("invariant: attention of ")
    assert line.endswith(": per_segment")


SMALL = PackedInputs(patch_shape=(FEATURES,))


@pytest.fixture(scope="module")
def tiny() -> Any:
    tower = SmallAdapter()
    return make_manager(tower, SMALL, mode="none"), tower


def test_nothing_runs_before_it_is_compiled(tiny: Any) -> None:
    manager = make_manager(tiny[1], SMALL)
    with pytest.raises(InputError, match=r"invariant: .* call compile\(\) or capture\(\) first"):
        manager.execute(SMALL.make(packed_items(1)))


def test_a_plan_for_the_towers_own_forward_runs_the_program(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, tower = tiny
    manager.capture()
    inputs = SMALL.make([Item("image", (1, 4, 6), 7)])
    (expected,) = manager.execute(inputs)
    run, served = BatchRunner.run, list[Any]()

    def eagerly(self: Any, plan: Any, *rest: Any, **options: Any) -> Any:
        planned = PathPlan(6, None, fx.MissReason.EAGER_IS_FASTER, eager=True)
        plan = replace(plan, batches=(plan.batches[0]._replace(paths={"default": planned}),))
        items, batches = run(self, plan, *rest, **options)
        served.extend(batches)
        return items, batches

    monkeypatch.setattr(BatchRunner, "run", eagerly)
    monkeypatch.setattr(tower, "encoder_eager_forward", None)
    (output,) = manager.execute(inputs)
    assert torch.equal(output, expected)
    assert not served[0].paths["default"].eager
    with pytest.raises(InputError, match="the tower's own forward gives other bits"):
        manager.paths["default"].run_eager(inputs)


def test_a_tower_with_other_products_is_refused_by_the_node() -> None:
    tower = fx.wrap(tiny_towers.make("Step3VisionModel"))
    manager = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(invariant=True))
    with pytest.raises(ConfigError, match=r"invariant: convolution_2: .* by the number of rows"):
        manager.capture()


def test_a_tower_that_does_not_compile_is_refused() -> None:
    manager = fx.EncoderCudaGraphManager(UntraceableModel(), fx.EncoderConfig(invariant=True))
    with pytest.raises(ConfigError, match="invariant: path default: the tower's own code would run"):
        manager.capture()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mode": "breakable"}, "mode"),
        ({"paths": {"local": {"mode": "breakable"}}}, "paths.local.mode"),
        ({"compile": False}, "compile"),
        ({"enabled": False}, "enabled"),
        ({"attention": {"windowed": "torch_flash"}}, "attention"),
        ({"piece_compiler": lambda module, inputs: module}, "piece_compiler"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: contradicts invariant: .*allowed: .*; got"):
        fx.EncoderConfig(invariant=True, **settings)
    fx.EncoderConfig(invariant=False, **settings)


def test_a_kernel_that_may_attend_by_several_algorithms_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"contradicts invariant: masked .*allowed: auto, per_segment"):
        make_manager(tiny[1], SMALL, attention="masked")
    pinned = make_manager(tiny[1], SMALL, attention="per_segment")
    assert pinned.kernels.attention.chosen == []


def test_several_threads_are_refused_on_a_cpu(tiny: Any) -> None:
    manager = make_manager(tiny[1], SMALL)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match=r"torch.set_num_threads\(1\); got 2"):
            manager.compile()
    finally:
        torch.set_num_threads(1)
