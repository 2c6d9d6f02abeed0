"""PEFT's adapters in a tower: captures are kept for each state, and those of the state it is in serve."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime import states

from .mock_towers import PackedModel, SplitModel, alone, batch

peft = pytest.importorskip("peft")

UNCOMPILED = fx.EncoderConfig(token_budgets=(4, 8, 16), max_items_per_batch=4, compile=False)
COMPILED = UNCOMPILED.replace(compile=True, piece_compiler="eager")

INPUTS = batch(3, 2)


def add(tower: Any, name: str, rank: int = 2, **kind: Any) -> None:
    """Adds an adapter with random weights, which becomes active only if it is the first."""
    torch.manual_seed(len(name) + rank)
    vars(tower).pop("peft_config", None)  # of which the next would warn
    lora = peft.LoraConfig(r=rank, init_lora_weights=False, target_modules=["linear"], **kind)
    active = tower.linear.active_adapters if hasattr(tower.linear, "lora_A") else [name]
    peft.inject_adapter_in_model(lora, tower, adapter_name=name).eval()
    tower.linear.set_adapter(active)


def tower_with(*names: str, kind: type[PackedModel] = PackedModel) -> Any:
    tower = kind()
    for number, name in enumerate(names, 2):
        add(tower, name, number)
    return tower


class Served:
    """A tower whose captures are made anew only where the manager asks for it."""

    def __init__(self, tower: Any, config: fx.EncoderConfig = UNCOMPILED) -> None:
        self.tower = tower
        self.layer = tower.linear
        self.manager = fx.EncoderCudaGraphManager(tower, config)
        self.manager.capture()
        self.captures = 1

    @torch.no_grad()
    def encode(self, inputs: dict[str, Any] = INPUTS) -> list[torch.Tensor]:
        """The items, which are what the tower gives; each is a hit."""
        hits = self.manager.stats().hits
        expected = alone(self.tower, inputs)
        forwards = self.tower.forwards
        try:
            got = self.manager.execute(inputs)
            assert self.tower.forwards == forwards, "a replay runs no code of the tower"
        except fx.TowerChangedError:
            self.manager.capture()
            self.captures += 1
            got = self.manager.execute(inputs)
        for item, reference in zip(got, expected, strict=True):
            torch.testing.assert_close(item, reference, rtol=1e-4, atol=1e-5)
        assert self.manager.stats().hits == hits + len(inputs["lengths"])
        assert not self.manager.stats().misses
        return got


KINDS = {"use_dora": True, "use_rslora": True, "lora_bias": True, "lora_dropout": 0.5}


@pytest.mark.parametrize(
    ("config", "kind"), [*((UNCOMPILED, kind) for kind in KINDS), (COMPILED, "use_dora")]
)
def test_kinds_of_lora(config: fx.EncoderConfig, kind: str) -> None:
    tower = tower_with("default", kind=SplitModel if config.compile else PackedModel)
    add(tower, "other", 3, **{kind: KINDS[kind]})
    served = Served(tower, config)
    for name in ("other", "default", "other"):
        served.layer.set_adapter(name)
        served.encode()
    served.layer.lora_B["other"].weight.data.mul_(3)
    if kind == "use_dora":
        served.layer.lora_magnitude_vector["other"].weight.data.mul_(2)
    served.encode()
    assert served.captures == 2


@torch.inference_mode()
def test_adapters_that_were_loaded_in_inference_mode() -> None:
    served = Served(tower_with("default"))
    add(served.tower, "other", 3)
    assert served.layer.lora_A["other"].weight.is_inference()
    for name in ("other", "default", "other"):
        served.layer.set_adapter(name, inference_mode=True)
        before = served.encode()
    served.layer.lora_B["other"].weight.mul_(3)
    assert not torch.allclose(served.encode()[0], before[0], rtol=1e-3)
    assert served.captures == 2


def test_the_least_recently_used_state_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MOST_STATES", 2)
    names = ["default", "b", "c", "d"]
    served = Served(tower_with(*names))
    served.encode()
    for name, captures in (("b", 2), ("c", 3), ("default", 3), ("d", 4), ("c", 4), ("default", 4), ("b", 5)):
        served.layer.set_adapter(name)
        served.encode()
        assert served.captures == captures, name


@torch.no_grad()
def test_a_capture_among_requests_is_of_the_state_that_serves() -> None:
    served = Served(tower_with("default", "other"), UNCOMPILED.replace(mode="exact", exact_min_hits=1))
    served.layer.set_adapter("other")
    forwards = served.tower.forwards
    with pytest.raises(fx.TowerChangedError):
        served.manager.execute(INPUTS)
    assert served.tower.forwards == forwards, "nothing is captured of a changed tower"
    served.manager.capture()
    for name, sizes in (("other", [5, 6]), ("default", [5, 7]), ("other", [6, 7]), ("default", [5, 6, 7])):
        served.layer.set_adapter(name)
        for inputs in map(batch, sizes):
            (got,) = served.manager.execute(inputs)
            torch.testing.assert_close(got, alone(served.tower, inputs)[0])
    for name in ("other", "default"):
        served.layer.set_adapter(name)
        for inputs in map(batch, (5, 6, 7)):
            served.encode(inputs)


@torch.no_grad()
def test_weights_that_moved_with_the_state_are_captured_in_that_state() -> None:
    served = Served(tower_with("default"))
    for change in (lambda: served.layer.merge(safe_merge=True), served.layer.unmerge) * 2:  # to other memory
        change()
        try:
            got = served.manager.execute(INPUTS)
        except fx.TowerChangedError:
            served.manager.capture()
            got = served.manager.execute(INPUTS)
        torch.testing.assert_close(got, alone(served.tower, INPUTS))


def test_a_tower_whose_forward_would_unmerge_is_not_captured() -> None:
    served = Served(tower_with("default"))
    served.layer.merge()
    served.layer.enable_adapters(False)
    with pytest.raises(fx.InputError, match=r"merged or disabled; got linear, which is both: .* unmerge\(\)"):
        served.manager.capture()
    served.layer.unmerge()
    served.manager.capture()
    served.encode()


@torch.no_grad()
def test_what_is_captured_in_steps_is_given_up_if_the_state_changes() -> None:
    tower = tower_with("default", "other", kind=SplitModel)
    manager = fx.EncoderCudaGraphManager(tower, COMPILED)
    manager.capture(wait=False)
    tower.linear.set_adapter("other")
    with pytest.raises(fx.TowerChangedError):
        manager.execute(INPUTS)
    tower.linear.set_adapter("default")
    for _ in range(2):
        torch.testing.assert_close(manager.execute(INPUTS)[0], alone(tower, INPUTS)[0])
        manager.wait_captured(60)
    manager.capture()
    hits = manager.stats().hits
    torch.testing.assert_close(manager.execute(INPUTS)[0], alone(tower, INPUTS)[0])
    assert manager.stats().hits == hits + 2


@torch.no_grad()
def test_captures_in_steps_for_one_more_state() -> None:
    tower = tower_with("default", "other", kind=SplitModel)
    manager = fx.EncoderCudaGraphManager(tower, COMPILED)
    for name in ("default", "other", "default"):
        tower.linear.set_adapter(name)
        manager.capture(wait=False)
        assert manager.wait_captured(60)
        torch.testing.assert_close(manager.execute(INPUTS)[0], alone(tower, INPUTS)[0])
    assert manager.stats().hits == 6
    assert not manager.stats().misses.get(MissReason.NOT_CAPTURED)


NAMES = ("default", "b", "c")

CHANGES = st.one_of(
    st.tuples(st.just("set"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)),
    st.tuples(st.sampled_from(["enable", "disable", "merge", "unmerge"]), st.none()),
    st.tuples(st.sampled_from(["scale", "rescale", "write", "replace"]), st.sampled_from(NAMES)),
)


class Model:
    """A tower, its captures, and the states that it was captured in, as PEFT's pages tell them."""

    def __init__(self) -> None:
        self.served = Served(tower_with(*NAMES))
        self.layer = self.served.layer
        self.made = dict.fromkeys(NAMES, 0)
        self.scales = dict.fromkeys(NAMES, 1)
        self.known = {self.state()}

    def state(self) -> Any:
        layer = self.layer
        if layer.merged:
            return "merged", tuple(layer.merged_adapters)
        if layer.disable_adapters:
            return "disabled"
        return tuple((name, self.made[name], self.scales[name]) for name in layer.active_adapters)

    def apply(self, what: str, which: Any) -> None:
        layer = self.layer
        if what == "set":
            layer.set_adapter(which)
        elif what in ("enable", "disable") and not layer.merged:
            layer.enable_adapters(what == "enable")
        elif what == "merge" and not (layer.merged or layer.disable_adapters):
            layer.merge()
        elif what == "unmerge" and layer.merged:
            layer.unmerge()
        elif what in ("scale", "rescale") and not layer.merged:  # a merge is undone with the scale of now
            self.scales[which] = 3 if what == "scale" else 1
            layer.set_scale(which, self.scales[which])
        elif what == "write" and not layer.merged:
            layer.lora_B[which].weight.data.add_(0.1)
        elif what == "replace" and which not in layer.active_adapters and not layer.merged:
            layer.delete_adapter(which)
            add(self.served.tower, which, 3)
            self.made[which] += 1
            self.scales[which] = 1

    def check(self) -> None:
        before = self.served.captures
        self.served.encode()
        is_new = self.state() not in self.known
        assert self.served.captures - before == is_new, self.state()
        self.known.add(self.state())


@settings(max_examples=25)
@given(st.lists(CHANGES, min_size=4, max_size=12))
def test_whatever_is_done_to_adapters(changes: Sequence[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(states, "_MOST_STATES", 100)
        model = Model()
        for what, which in changes:
            model.apply(what, which)
            model.check()


def test_adapters_become_part_of_weights_by_a_pass() -> None:
    config = COMPILED.replace(passes=("folded_adapters",))
    served = Served(tower_with("default", "other", kind=SplitModel), config)
    for names in ("default", "other", ["default", "other"], "default"):
        served.layer.set_adapter(names)
        served.encode()
        program: Any = served.manager.programs["default"].program
        assert program.pass_report == {"folded_adapters": 2 if isinstance(names, list) else 1}
    for _ in range(2):
        with torch.no_grad():
            served.layer.lora_B["default"].weight.mul_(2)
        served.encode()
    assert served.captures == 3


@pytest.mark.parametrize(("spare", "captures"), [(0, 2), (-1, 3)])
def test_weights_with_folded_adapters_are_bytes_of_their_state(spare: int, captures: int) -> None:
    config = COMPILED.replace(passes=("folded_adapters",))
    served = Served(tower_with("default", kind=SplitModel), config)
    weight, derived = served.layer.base_layer.weight, served.manager.stats().derived_bytes
    assert derived == weight.numel() * weight.element_size()
    limit = 2 * (served.manager.num_bytes + derived) + spare
    served = Served(tower_with("default", "other", kind=SplitModel), config.replace(max_graph_bytes=limit))
    for name in ("default", "other", "default"):
        served.layer.set_adapter(name)
        served.encode()
    assert served.captures == captures
