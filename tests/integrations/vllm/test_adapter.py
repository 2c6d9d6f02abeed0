"""The class that vLLM's runners get in place of vLLM's manager."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.integrations.vllm import adapter
from fxsplit_encoder.integrations.vllm.adapter import VllmEncoderManager, note_reloads
from fxsplit_encoder.integrations.vllm.plugin import register
from fxsplit_encoder.manager.path import EncoderPath

from .fake_vllm import FakeVllm

Make = Callable[..., Any]
CPU = torch.device("cpu")
SETTINGS = {
    "encoder_cudagraph_token_budgets": [32, 8, 8],
    "encoder_cudagraph_max_vision_items_per_batch": 4,
    "encoder_cudagraph_max_frames_per_batch": 8,
}
IMAGES = [(1, 4, 4), (1, 4, 8), (1, 2, 6)]


@pytest.fixture
def make(vllm: FakeVllm, tiny_towers: Any) -> Callable[..., Any]:
    """`make(tower, **settings)`: what a runner makes after the plugin was loaded."""
    register()
    kind = vllm.manager

    def make_manager(
        tower: Any = tiny_towers.wrapped, own: Any = None, device: Any = CPU, **settings: Any
    ) -> Any:
        if own is not None:
            kind.settings = own
        config = vllm.config(**{**SETTINGS, **settings})
        return kind(vllm_config=config, device=device, dtype=torch.float32, model=tower)

    return make_manager


def calls(manager: Any) -> list[str]:
    """The methods of vLLM's own manager that were called."""
    return [name for name, _ in manager.calls if name != "__init__"]


def test_it_encodes_as_the_tower_does(make: Make, make_batch: Any, encode: Any, tiny_towers: Any) -> None:
    manager = make()
    assert manager.token_budgets == [8, 32]
    assert manager.get_num_graphs_to_capture() == 2
    assert [manager.supports_modality(name) for name in ("image", "video", "audio")] == [True, True, False]
    assert not manager.is_captured()
    with torch.inference_mode():
        manager.capture(graph_pool="ignored")
        assert manager.is_captured()
        batch = make_batch(IMAGES)
        outputs = manager.execute(batch)
    for got, expected in zip(outputs, encode(tiny_towers.reference, batch), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert manager.get_cumulative_stats() == {
        "graph_hits": 3,
        "graph_misses": 0,
        "hit_rate": 1.0,
        "num_budgets": 2,
        "token_budgets": [8, 32],
        "batches_left": 0,
    }
    manager.clear()
    assert not manager.is_captured()
    assert calls(manager) == []


def test_without_compiling_the_tower_is_captured_as_it_is(make: Make) -> None:
    manager = make()
    manager.capture()
    assert manager.manager.programs == {"default": None}
    assert {each.mode for each in manager.manager.budget_graphs["default"].values()} == {"full"}


def _known(manager: Any) -> Any:
    return manager.manager.paths["default"].expected


def test_what_vllm_captures_twice_is_compiled_and_measured_once(
    make: Make, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures memory by captures that it throws away: the runner of the second generation with the
    manager that serves later, that of the first with another of the same model.
    """
    compiled: list[Any] = []
    trace = EncoderPath.trace
    monkeypatch.setattr(EncoderPath, "trace", lambda *a, **b: compiled.append(0) or trace(*a, **b))
    own = fx.EncoderConfig(piece_compiler="eager")
    manager = make(own=own)
    manager.capture(graph_pool="thrown away")
    first, graphs = manager.manager, manager.budget_graphs["default"]
    assert manager.is_captured()
    assert _known(manager) is None
    for generation in (2, 1):
        manager.clear()
        assert manager.execute(make_batch(IMAGES)) is None
        if generation == 1:
            manager = make(own=own)
        assert manager.manager is first
        manager.capture(graph_pool=None)
        assert _known(manager) is not None
        assert compiled == [0]
        assert manager.budget_graphs["default"].keys() == graphs.keys()
        assert len(manager.execute(make_batch(IMAGES))) == 3
    another = make(own=own)
    assert another.manager is not first  # which serves


def test_other_settings_get_another_manager(make: Make) -> None:
    manager = make()
    manager.capture()
    manager.clear()
    other = make(encoder_cudagraph_token_budgets=[16])
    assert other.manager is not manager.manager
    assert other.token_budgets == [16]


def test_vllms_manager_serves_where_ours_is_not_made(
    make: Make, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    failing = mock.Mock(side_effect=RuntimeError("no driver"))
    monkeypatch.setattr(adapter, "EncoderCudaGraphManager", failing)
    for _ in range(2):  # for the profile, and for good
        manager = make()
        manager.result_of_execute = ["theirs"]
        manager.result_of_is_captured = True
        manager.result_of_get_num_graphs_to_capture = 3
        manager.capture(graph_pool="pool")
        assert manager.execute({"pixel_values": 1}) == ["theirs"]
        assert manager.is_captured()
        assert manager.token_budgets == [1, 2]
        assert calls(manager) == ["capture", "execute", "is_captured"]
        assert manager.calls[1] == ("capture", {"graph_pool": "pool"})
        for method in ("clear", "get_num_graphs_to_capture", "get_cumulative_stats"):
            getattr(manager, method)()
        manager.supports_modality("image")
        assert len(calls(manager)) == 7
    (warning,) = warned
    assert "RuntimeError: no driver" in warning


def test_a_manager_that_could_not_capture_is_not_kept_and_vllms_serves(
    make: Make, monkeypatch: pytest.MonkeyPatch, warned: list[str], tiny_towers: Any
) -> None:
    model = tiny_towers.wrapped
    monkeypatch.setattr(model, "load_weights", lambda weights: set(), raising=False)
    manager = make(model)
    ours = weakref.ref(manager.manager)

    def fail(manager: Any) -> None:
        raise ValueError("odd tower")  # a new one, which nobody keeps with its frames

    monkeypatch.setattr(fx.EncoderCudaGraphManager, "capture", fail)
    manager.capture()
    assert manager.manager is None
    assert calls(manager) == ["capture"]
    gc.collect()
    assert ours() is None
    assert model.load_weights([]) == set()
    (warning,) = warned
    assert "ValueError: odd tower" in warning


def test_new_weights_are_looked_at_by_the_next_batch(
    make: Make, monkeypatch: pytest.MonkeyPatch, tiny_towers: Any
) -> None:
    model = tiny_towers.wrapped
    monkeypatch.setattr(model, "load_weights", lambda weights: set(), raising=False)
    manager = make(model)
    told: list[bool] = []
    monkeypatch.setattr(manager.manager, "check_weights", lambda: told.append(True))
    model.load_weights([])
    assert told


def test_vllms_manager_serves_where_no_budget_could_be_captured(
    make: Make, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    manager = make()
    monkeypatch.setattr(manager.manager, "can_replay", lambda: False)
    manager.capture(graph_pool="pool")
    assert calls(manager) == ["capture"]
    assert "CaptureError" in warned[0]


def test_what_cannot_be_encoded_is_left_to_vllms_eager_forward(
    make: Make, make_batch: Any, warned: list[str]
) -> None:
    manager = make()
    assert manager.execute(make_batch(IMAGES)) is None  # not captured
    manager.capture()
    for _ in range(3):
        assert manager.execute({"pixel_values": "nothing of the kind"}) is None
    assert manager.get_cumulative_stats()["batches_left"] == 4
    (warning,) = warned
    assert "InputError" in warning
    assert len(manager.execute(make_batch(IMAGES))) == 3
    assert calls(manager) == []


UNKNOWN_PATH = fx.EncoderConfig(paths={"crops": fx.PathConfig(mode="full")})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 2}, "ranks share its weights"),
        ({"tower_lora": True}, "LoRA"),
        ({"device": torch.device("meta")}, "type meta"),
        ({"own": UNKNOWN_PATH}, r"paths.crops"),
    ],
)
def test_what_is_left_to_vllm(make: Make, warned: list[str], settings: dict[str, Any], said: str) -> None:
    manager = make(**settings)
    assert manager.manager is None
    (warning,) = warned
    assert said in warning


@pytest.mark.parametrize("others_agree", [True, False])
def test_ranks_that_share_the_images_capture_alike(
    make: Make, monkeypatch: pytest.MonkeyPatch, warned: list[str], others_agree: bool
) -> None:
    votes: list[bool] = []

    def all_agree(ready: bool) -> bool:
        votes.append(ready)
        return ready and others_agree

    made: dict[str, Any] = {}

    class Manager(fx.EncoderCudaGraphManager):
        def __init__(self, tower: Any, config: Any, **kwargs: Any) -> None:
            made.update(kwargs, data_parallel=config.data_parallel)
            super().__init__(tower, config.replace(data_parallel=False), **{**kwargs, "process_group": None})

    monkeypatch.setattr(adapter, "all_agree", all_agree)
    monkeypatch.setattr(adapter, "device_group", lambda: "the group")
    monkeypatch.setattr(adapter, "EncoderCudaGraphManager", Manager)
    manager = make(tensor_parallel_size=2, mm_encoder_tp_mode="data")
    assert (made["data_parallel"], made["process_group"]) == (True, "the group")
    manager.capture()
    assert votes == [True, True] if others_agree else [True]
    assert (manager.manager is not None) == others_agree
    assert len(warned) == (0 if others_agree else 1)


CONFIGURATION = {"vllm_config", "device", "dtype", "model", "config", "use_dp", "log_stats_interval"}


def test_every_attribute_of_vllms_manager_is_answered(make: Make, vllm: FakeVllm, make_batch: Any) -> None:
    """By what serves: none says that nothing was captured while this library's captures serve."""
    (names,) = vllm.recorded["attributes"].values()
    manager = make()
    assert manager.graph_pool is None
    manager.capture()
    manager.execute(make_batch(IMAGES))
    own = {name: vars(VllmEncoderManager).get(name) for name in names}
    served = {name for name, value in own.items() if hasattr(value, "__get__") and not callable(value)}
    assert served == set(names) - CONFIGURATION
    assert (manager.graph_hits, manager.graph_misses, manager.max_batch_size) == (3, 0, 4)
    assert manager.max_frames_per_batch == 8
    assert manager.path_token_budgets == {"default": [8, 32]}
    assert list(manager.budget_graphs["default"]) == [8, 32]
    assert manager.graph_pool is manager.manager.pool.handle
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        manager.nothing_of_the_kind  # noqa: B018
    manager.manager = None
    manager.graph_hits += 7
    assert manager.graph_hits == 7
    with pytest.raises(AttributeError, match="graph_hits"):
        object.__new__(type(manager)).graph_hits  # noqa: B018


def test_classes_that_are_derived_from_vllms_manager_stay_as_they_are(
    make: Make, vllm: FakeVllm, tiny_towers: Any, warned: list[str]
) -> None:
    class Derived(vllm.manager):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, extra: str, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.extra = extra

        def execute(self, mm_kwargs: Any) -> Any:
            return [self.extra, super().execute(mm_kwargs)]

        def more(self) -> str:
            return "its own"

    for _ in range(2):
        derived = Derived(vllm.config(), CPU, torch.float32, tiny_towers.wrapped, extra="extra")
    assert type(derived) is Derived
    assert isinstance(derived, vllm.manager)
    assert derived.execute({}) == ["extra", None]
    assert derived.more() == "its own"
    assert calls(derived) == ["execute"]
    (warning,) = warned
    assert "Derived captures the encoder" in warning
    assert type(make()).__mro__[1] is VllmEncoderManager


def test_without_what_a_manager_imports_vllms_own_is_made(
    make: Make, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, adapter.__name__, None)
    manager = make()
    assert type(manager) is vllm.manager
    assert manager.token_budgets == [1, 2]
    manager.capture(graph_pool="pool")
    assert calls(manager) == ["capture"]
    (warning,) = warned
    assert "could not be imported" in warning


# --- weights that vLLM loads into a model that runs


class Model(nn.Module):
    """Loads weights as vLLM's models do: through `parameter.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            own[name].data.copy_(weight)
            loaded.add(name)
        return loaded


def in_place(model: Model, weight: Tensor) -> None:
    assert model.load_weights([("linear.weight", weight)]) == {"linear.weight"}


def interrupted(model: Model, weight: Tensor) -> None:
    with pytest.raises(KeyError):
        model.load_weights([("linear.weight", weight), ("nothing", weight)])


@pytest.mark.parametrize("reload", [in_place, interrupted])
def test_a_reload_is_told_at_its_end(reload: Callable[[Model, Tensor], None]) -> None:
    """Also of one that failed. What is derived of weights is then computed by the next run."""
    model = Model()
    told: list[float] = []
    note_reloads(model, lambda: told.append(float(model.linear.weight.sum())))
    for value in (3.0, 5.0):
        reload(model, torch.full((2, 2), value))
    assert told == [12.0, 20.0]


def test_noting_it_twice_changes_what_is_called_alone() -> None:
    model, told = Model(), []
    note_reloads(model, lambda: told.append("first"))
    once = model.load_weights
    note_reloads(model, lambda: told.append("second"))
    assert model.load_weights is once
    in_place(model, torch.ones(2, 2))
    assert told == ["second"]
    assert once.__doc__ == Model.load_weights.__doc__
    assert once.__wrapped__.__func__ is Model.load_weights  # type: ignore[attr-defined]
