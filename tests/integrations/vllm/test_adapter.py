"""The class that vLLM's runners get in place of vLLM's manager."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.integrations.vllm import adapter
from fxsplit_encoder.integrations.vllm.plugin import register
from fxsplit_encoder.integrations.vllm.settings import PluginSettings
from fxsplit_encoder.manager.lifecycle import Lifecycle

from .fake_vllm import FakeVllm

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

    def make_manager(tower: Any = tiny_towers.wrapped, own: Any = None, **settings: Any) -> Any:
        if own is not None:
            kind.settings = own
        config = vllm.config(**{**SETTINGS, **settings})
        return kind(vllm_config=config, device=CPU, dtype=torch.float32, model=tower)

    return make_manager


def calls(manager: Any) -> list[str]:
    """The methods of vLLM's own manager that were called."""
    return [name for name, _ in manager.vllm_manager.calls if name != "__init__"]


def profile_cudagraph_memory(manager: Any) -> None:
    """Named as the function of both runners inside which they capture to measure memory."""
    manager.capture(graph_pool="thrown away")


def test_it_encodes_as_the_tower_does(
    make: Callable[..., Any], make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
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


def test_without_compiling_the_tower_is_captured_as_it_is(make: Callable[..., Any]) -> None:
    manager = make()
    manager.capture()
    assert manager.manager.programs == {"default": None}
    assert {each.mode for each in manager.manager.budget_graphs["default"].values()} == {"full"}


@pytest.mark.parametrize(("num_bytes", "said"), [(0, False), (5 << 20, True)])
def test_weights_that_passes_keep_are_named_with_their_size(
    num_bytes: int,
    said: bool,
    make: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Since vLLM's measurement of graphs has no part of them."""
    caplog.set_level("INFO", adapter.logger.name)
    manager = make()
    assert adapter._derived_bytes(manager.manager) == 0
    monkeypatch.setattr(adapter, "_derived_bytes", lambda manager: num_bytes)
    manager.capture()
    assert ("passes keep 5 MiB of weights" in caplog.text) == said


def test_captures_that_vllm_throws_away_only_take_memory(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, make_batch: Any
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(Lifecycle, "compile", lambda self, progress=None: compiled.append(self))
    manager = make(own=PluginSettings(fx.EncoderConfig()))
    for _ in range(2):
        profile_cudagraph_memory(manager)
        assert manager._rehearsal.num_captures == 4  # two budgets, in both modes of what is not compiled
        assert not manager.is_captured()
        assert manager.execute(make_batch(IMAGES)) is None
    assert compiled == []
    manager.capture(graph_pool=None)  # the second generation captures the same manager again, in earnest
    assert manager._rehearsal is None
    assert manager.is_captured()
    assert compiled == [manager.manager._lifecycle]
    manager.clear()


def test_clearing_gives_back_what_a_profile_took(make: Callable[..., Any]) -> None:
    manager = make()
    profile_cudagraph_memory(manager)
    rehearsal = manager._rehearsal
    manager.clear()
    assert rehearsal.num_captures == 0
    assert not manager.is_captured()


def _failing(error: Exception) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def test_vllms_manager_serves_where_ours_is_not_made(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, warnings_of_plugin: list[str]
) -> None:
    monkeypatch.setattr(adapter, "EncoderCudaGraphManager", _failing(RuntimeError("no driver")))
    for _ in range(2):  # for the profile, and for good
        manager = make()
        manager.vllm_manager.result_of_execute = ["theirs"]
        manager.vllm_manager.result_of_is_captured = True
        manager.capture(graph_pool="pool")
        assert manager.execute({"pixel_values": 1}) == ["theirs"]
        assert manager.is_captured()
        assert manager.token_budgets == [1, 2]
        assert calls(manager) == ["capture", "execute", "is_captured"]
        assert manager.vllm_manager.calls[1] == ("capture", {"graph_pool": "pool"})
        for method in ("clear", "get_num_graphs_to_capture", "get_cumulative_stats"):
            getattr(manager, method)()
        manager.supports_modality("image")
        assert len(calls(manager)) == 7
    (warning,) = warnings_of_plugin
    assert "RuntimeError: no driver" in warning


@pytest.mark.parametrize("profiling", [False, True])
def test_vllms_manager_serves_where_ours_cannot_capture(
    make: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    warnings_of_plugin: list[str],
    profiling: bool,
) -> None:
    manager = make()
    target = adapter.Rehearsal if profiling else fx.EncoderCudaGraphManager
    monkeypatch.setattr(target, "capture", _failing(ValueError("odd tower")))
    (profile_cudagraph_memory if profiling else type(manager).capture)(manager)
    assert manager.manager is None
    assert calls(manager) == ["capture"]
    (warning,) = warnings_of_plugin
    assert "ValueError: odd tower" in warning


def test_a_manager_that_could_not_capture_is_not_kept_by_its_model(
    make: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    warnings_of_plugin: list[str],
    tiny_towers: Any,
) -> None:
    model = tiny_towers.wrapped
    monkeypatch.setattr(model, "load_weights", lambda weights: set(), raising=False)
    manager = make(model)
    ours = weakref.ref(manager.manager)

    def fail(manager: Any) -> None:
        raise ValueError("odd tower")  # a new one, which nobody keeps with its frames

    monkeypatch.setattr(fx.EncoderCudaGraphManager, "capture", fail)
    manager.capture()
    gc.collect()
    assert ours() is None
    assert model.load_weights([]) == set()
    assert len(warnings_of_plugin) == 1


def test_new_weights_are_looked_at_by_the_next_batch(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tiny_towers: Any
) -> None:
    model = tiny_towers.wrapped
    monkeypatch.setattr(model, "load_weights", lambda weights: set(), raising=False)
    manager = make(model)
    checks = manager.manager._serving.runner.weight_checks
    assert [checks.is_due("path") for _ in range(2)] == [True, False]
    model.load_weights([])
    assert checks.is_due("path")


def test_vllms_manager_serves_where_no_budget_could_be_captured(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, warnings_of_plugin: list[str]
) -> None:
    manager = make()
    monkeypatch.setattr(manager.manager, "can_replay", lambda: False)
    manager.capture(graph_pool="pool")
    assert calls(manager) == ["capture"]
    assert "CaptureError" in warnings_of_plugin[0]


def test_what_cannot_be_encoded_is_left_to_vllms_eager_forward(
    make: Callable[..., Any], make_batch: Any, warnings_of_plugin: list[str]
) -> None:
    manager = make()
    assert manager.execute(make_batch(IMAGES)) is None  # not captured
    manager.capture()
    for _ in range(3):
        assert manager.execute({"pixel_values": "nothing of the kind"}) is None
    assert manager.get_cumulative_stats()["batches_left"] == 4
    (warning,) = warnings_of_plugin
    assert "InputError" in warning
    assert len(manager.execute(make_batch(IMAGES))) == 3
    assert calls(manager) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 2}, "ranks share its weights"),
        ({"tower_lora": True}, "LoRA"),
    ],
)
def test_what_is_left_to_vllm(
    make: Callable[..., Any], warnings_of_plugin: list[str], settings: dict[str, Any], said: str
) -> None:
    manager = make(**settings)
    assert manager.manager is None
    (warning,) = warnings_of_plugin
    assert said in warning


def test_other_devices_are_left_to_vllm(vllm: FakeVllm, tiny_towers: Any, warnings_of_plugin: Any) -> None:
    register()
    manager = vllm.manager(vllm.config(), torch.device("meta"), torch.float32, tiny_towers.wrapped)
    assert manager.manager is None
    assert "type meta" in warnings_of_plugin[0]


@pytest.mark.parametrize("others_agree", [True, False])
def test_ranks_that_share_the_images_capture_alike(
    make: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    warnings_of_plugin: list[str],
    others_agree: bool,
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
    assert len(warnings_of_plugin) == (0 if others_agree else 1)


def test_what_no_runner_reads_is_vllms(make: Callable[..., Any]) -> None:
    manager = make()
    manager.vllm_manager.log_stats_interval = 7
    assert manager.log_stats_interval == 7
    with pytest.raises(AttributeError):
        manager.nothing_of_the_kind  # noqa: B018
    with pytest.raises(AttributeError):
        type(manager).__new__(type(manager)).__deepcopy__  # noqa: B018


def test_without_what_a_manager_imports_vllms_own_is_made(
    make: Callable[..., Any], vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, warnings_of_plugin: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, adapter.__name__, None)
    assert type(make()) is vllm.manager.vllm_class
    (warning,) = warnings_of_plugin
    assert "could not be imported" in warning


def test_settings_that_do_not_suit_the_model_leave_it_to_vllm(
    make: Callable[..., Any], warnings_of_plugin: list[str]
) -> None:
    own = fx.EncoderConfig(paths={"crops": fx.PathConfig(mode="full")})
    assert make(own=PluginSettings(own)).manager is None
    assert "paths.crops" in warnings_of_plugin[0]
