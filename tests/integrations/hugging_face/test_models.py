"""What `accelerate` promises, for every model: one test a promise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fxsplit_encoder as fx
from fxsplit_encoder.planning import MissReason

from .comparisons import assert_close, assert_same_bits, generated
from .conftest import Loaded, config_of
from .models import MODELS

every_model = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if tiny.exhaustive else ())
        for name, tiny in MODELS.items()
    ],
)


def requests(tiny: Any) -> dict[str, dict[str, Any]]:
    """One, two and no images, a padded batch of two, and a video where there are any."""
    first, second, third = tiny.images
    made = {
        "one": tiny.inputs([[first]]),
        "two": tiny.inputs([[first, second]], seed=1),
        "none": tiny.inputs([[]]),
        "batch": tiny.inputs([[first], [second, third]], seed=2),
    }
    if tiny.video_runs is not None:
        made["video"] = tiny.inputs([[] if tiny.video_alone else [third]], [tiny.video], seed=3)
    return made


def num_traces() -> int:
    return counters["stats"]["unique_graphs"] + counters["frames"]["total"]  # type: ignore[no-any-return]


def num_captures(model: Any) -> int:
    return sum(bool(each.mode) for each in fx.stats(model).budgets.values())


@every_model
def test_generate_gives_the_same_tokens(name: str, loaded: Callable[[str], Loaded]) -> None:
    case = loaded(name)
    before = fx.stats(case.model)
    for request, inputs in requests(case.tiny).items():
        expected = generated(case.reference, inputs)
        assert torch.equal(generated(case.model, inputs), expected), request
    after = fx.stats(case.model)
    assert after.hits - before.hits >= len(requests(case.tiny)) - 1  # no image, no call
    assert after.misses == before.misses


@every_model
@torch.no_grad()
def test_features_are_those_of_the_model(name: str, loaded: Callable[[str], Loaded]) -> None:
    """All fields, also those that captures do not make."""
    case = loaded(name)
    for images in (case.tiny.images[:1], case.tiny.images):
        inputs = case.tiny.image_inputs(images)
        expected = case.tiny.features(case.reference, inputs)
        assert_close(case.tiny.features(case.model, inputs), expected)
    assert set(fx.stats(case.model).misses) <= {MissReason.UNCAPTURED_OUTPUT}


@pytest.mark.parametrize("name", [name for name, tiny in MODELS.items() if tiny.exhaustive])
@torch.no_grad()
def test_features_are_those_of_the_model_without_captures(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    """By the same code, and without a trace: so every model is tried also where `make test-all` is not."""
    tiny, directory = MODELS[name], checkpoint(name)
    model, reference = tiny.load(directory), tiny.load(directory)
    fx.accelerate(model, fx.EncoderConfig(enabled=False))
    inputs = tiny.image_inputs(tiny.images)
    assert_close(tiny.features(model, inputs), tiny.features(reference, inputs))
    misses = set(fx.stats(model).misses)
    assert misses and misses <= {MissReason.DISABLED, MissReason.UNCAPTURED_OUTPUT}


@every_model
def test_after_a_warm_up_nothing_is_traced_or_captured(name: str, loaded: Callable[[str], Loaded]) -> None:
    case = loaded(name)
    traces, captures = num_traces(), num_captures(case.model)
    assert captures > 0
    for context in (torch.no_grad, torch.inference_mode):
        for inputs in requests(case.tiny).values():
            with context():
                generated(case.model, inputs)
    assert (num_traces(), num_captures(case.model)) == (traces, captures)


@every_model
@torch.no_grad()
def test_what_is_saved_is_the_checkpoint(name: str, loaded: Callable[[str], Loaded], tmp_path: Path) -> None:
    """And whoever loads it without this library gets the model that was saved, bit for bit."""
    case = loaded(name)
    assert_same_bits(case.model.state_dict(), case.reference.state_dict())
    case.model.save_pretrained(tmp_path)
    assert_same_bits(case.tiny.load(tmp_path).state_dict(), case.reference.state_dict())


@every_model
@torch.no_grad()
def test_restored_it_computes_the_same_bits(name: str, loaded: Callable[[str], Loaded]) -> None:
    case = loaded(name)
    inputs = case.tiny.image_inputs(case.tiny.images[:1])
    expected = case.tiny.features(case.reference, inputs)
    restored = copy.deepcopy(case.model)  # has no captures to lose
    assert_same_bits(case.tiny.features(fx.restore(restored), inputs), expected)
    with pytest.raises(fx.InputError, match="stats: expected a model after accelerate"):
        fx.stats(restored)


@torch.no_grad()
def test_captures_of_one_size_outlive_those_of_another(tmp_path: Path) -> None:
    """Step's tower is called with whole images and with crops; each size has tables among its modules."""
    tiny = MODELS["step-3.7"]
    tiny.make(tmp_path)
    model = fx.accelerate(tiny.load(tmp_path), config_of(tiny))
    fx.warmup(model)
    for _ in range(2):
        tiny.features(model, tiny.image_inputs(tiny.images))
    stats = fx.stats(model)
    assert (stats.hits, stats.misses) == (4, {})
