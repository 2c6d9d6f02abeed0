"""Models with PEFT's adapters in their tower: each state is captured once, whatever comes between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason

from .comparisons import assert_close
from .models import MODELS

peft = pytest.importorskip("peft")

LAYERS = {"qwen3-vl": ["qkv", "linear_fc1"], "llava-next": ["q_proj", "fc1"]}


class Pair:
    """An accelerated model and its plain twin, with the same two adapters in the towers alone."""

    def __init__(self, name: str, directory: Path) -> None:
        self.tiny = MODELS[name]
        self.layers = "|".join(LAYERS[name])
        self.model, self.plain = (self._with_adapters(self.tiny.load(directory)) for _ in range(2))
        fx.accelerate(self.model, {"token_budgets": [64, 128], "compile": False})

    def _with_adapters(self, model: Any) -> Any:
        model = peft.get_peft_model(model, self._lora(2), adapter_name="one")
        model.add_adapter("two", self._lora(4))
        return model.eval()

    def _lora(self, rank: int) -> Any:
        torch.manual_seed(rank)
        targets = rf".*vis.*\.({self.layers})"
        return peft.LoraConfig(r=rank, init_lora_weights=False, target_modules=targets)

    def both(self, change: Callable[[Any], object]) -> None:
        for model in (self.model, self.plain):
            change(model)

    def features(self, model: Any) -> Any:
        return model.get_image_features(**self.tiny.image_inputs(self.tiny.images[:2]))

    @torch.no_grad()
    def assert_alike(self) -> Any:
        features = [self.features(model) for model in (self.model, self.plain)]
        assert_close(*features, 1e-4)
        return features[0]

    @property
    def hits(self) -> int:
        return fx.stats(self.model).hits

    @property
    def misses(self) -> set[MissReason]:
        """Why the tower itself served whole calls."""
        return {*fx.stats(self.model).misses} - {MissReason.UNCAPTURED_OUTPUT}


def scale(factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("one", factor)

    return change


@pytest.fixture
def begin(checkpoint: Callable[[str], Path], made: list[Any]) -> Callable[..., Pair]:
    """Makes a pair whose captures make all that is read of them; `made` begins after it."""

    def make(name: str = "llava-next") -> Pair:
        pair = Pair(name, checkpoint(name))
        pair.assert_alike()
        pair.assert_alike()
        made.clear()
        return pair

    return make


@pytest.mark.parametrize("name", LAYERS)
def test_each_state_is_captured_once(name: str, begin: Callable[..., Pair], made: list[Any]) -> None:
    pair = begin(name)
    hits = [pair.hits]
    pair.assert_alike()
    hits.append(pair.hits)
    calls = 1
    for turn in range(2):
        for change in (
            lambda model: model.set_adapter("two"),
            lambda model: model.set_adapter("one"),
            scale(3.0),
            scale(1.0),
            lambda model: model.base_model.disable_adapter_layers(),
            lambda model: model.base_model.enable_adapter_layers(),
            lambda model: model.merge_adapter(),
            lambda model: model.unmerge_adapter(),
        ):
            pair.both(change)
            pair.assert_alike()
            calls += 1
        assert len(made) == 4, turn
    assert not pair.misses
    assert pair.hits - hits[0] == calls * (hits[1] - hits[0]) > 0
    with pair.model.disable_adapter(), pair.plain.disable_adapter():
        pair.assert_alike()
    pair.assert_alike()
    assert len(made) == 4


def test_weights_of_adapters_are_read_and_a_forward_may_unmerge(
    begin: Callable[..., Pair], made: list[Any]
) -> None:
    pair = begin()
    before = pair.assert_alike()

    @torch.no_grad()
    def write(model: Any) -> None:
        for key, parameter in model.named_parameters():
            if "lora_B.one" in key:
                parameter.mul_(3)

    pair.both(write)
    after = pair.assert_alike()
    with pytest.raises(AssertionError):
        assert_close(after, before, 1e-4)
    assert not made and not pair.misses
    pair.both(lambda model: model.merge_adapter())
    with pair.model.disable_adapter(), pair.plain.disable_adapter():
        pair.assert_alike()
    assert pair.misses == {MissReason.FOREIGN_CODE}, "its forward unmerges"
    hits = pair.hits
    pair.assert_alike()
    assert pair.hits > hits


def test_hooks_that_mix_adapters_leave_the_captures(begin: Callable[..., Pair], made: list[Any]) -> None:
    """PEFT hangs them into adapter layers for a call with `adapter_names`."""
    pair = begin()
    first = pair.assert_alike()
    images = pair.tiny.image_inputs(pair.tiny.images[:2])["pixel_values"].flatten(0, -4)
    names = ["one", "two", "__base__"] * len(images)
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for model in (pair.model, pair.plain):
                mixed = model.base_model._enable_peft_forward_hooks(adapter_names=names[: len(images)])
                stack.enter_context(mixed)
            with pytest.raises(AssertionError):
                assert_close(pair.assert_alike(), first, 1e-4)
        assert_close(pair.assert_alike(), first, 1e-4)
    assert pair.misses == {MissReason.FOREIGN_CODE}
    assert not made


def test_what_another_dtype_left_does_not_serve(begin: Callable[..., Pair], made: list[Any]) -> None:
    pair = begin()
    pair.both(lambda model: model.set_adapter("two"))
    pair.assert_alike()
    pair.both(lambda model: model.model.model.vision_tower.double())
    pair.both(lambda model: model.model.model.multi_modal_projector.double())
    for name in ("two", "one"):
        pair.both(lambda model, name=name: model.set_adapter(name))
        with torch.no_grad():
            inputs = pair.tiny.image_inputs(pair.tiny.images[:2])
            inputs["pixel_values"] = inputs["pixel_values"].double()
            assert_close(*(m.get_image_features(**inputs) for m in (pair.model, pair.plain)), 1e-4)
    assert len(made) == 3
