"""What `accelerate` promises, for every model: one test a promise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason

from .comparisons import assert_close, assert_same_bits, generated
from .conftest import ALL, Loaded, config_of
from .models import EMBEDDERS, MODELS, embed
from .tiny_model import TinyModel


def names_of(models: dict[str, TinyModel]) -> Any:
    marks = {name: pytest.mark.exhaustive if tiny.exhaustive else () for name, tiny in models.items()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


every_model = names_of(ALL)


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
        made["video"] = tiny.inputs([[third]], [tiny.video], seed=3)
    return made


@pytest.fixture
def case(name: str, loaded: Callable[[str], Loaded]) -> Loaded:
    return loaded(name)


def num_traces() -> int:
    return counters["stats"]["unique_graphs"] + counters["frames"]["total"]  # type: ignore[no-any-return]


def num_captures(model: Any) -> int:
    return sum(bool(each.mode) for each in fx.stats(model).budgets.values())


@names_of(MODELS)
def test_generate_gives_the_same_tokens(case: Loaded) -> None:
    before = fx.stats(case.model)
    for request, inputs in requests(case.tiny).items():
        expected = generated(case.reference, inputs)
        assert torch.equal(generated(case.model, inputs), expected), request
    after = fx.stats(case.model)
    assert after.hits - before.hits >= len(requests(case.tiny)) - 1  # no image, no call
    assert after.misses == before.misses


@every_model
@torch.no_grad()
def test_features_are_those_of_the_model(case: Loaded) -> None:
    """All fields, also those that captures do not make."""
    for images in (case.tiny.images[:1], case.tiny.images):
        inputs = case.tiny.image_inputs(images)
        expected = case.tiny.features(case.reference, inputs)
        assert_close(case.tiny.features(case.model, inputs), expected)
    misses = set(fx.stats(case.model).misses)
    assert not misses if case.tiny.embeds else misses <= {MissReason.UNCAPTURED_OUTPUT}


@every_model
def test_after_a_warm_up_nothing_is_traced_or_captured(case: Loaded) -> None:
    traces, captures = num_traces(), num_captures(case.model)
    assert captures > 0
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            if case.tiny.embeds:
                for images in (case.tiny.images[:1], case.tiny.images):
                    case.tiny.features(case.model, case.tiny.image_inputs(images))
            else:
                for inputs in requests(case.tiny).values():
                    generated(case.model, inputs)
    assert (num_traces(), num_captures(case.model)) == (traces, captures)


@every_model
@torch.no_grad()
def test_what_is_saved_is_the_checkpoint(case: Loaded, tmp_path: Path) -> None:
    """And whoever loads it without this library gets the model that was saved, bit for bit."""
    assert_same_bits(case.model.state_dict(), case.reference.state_dict())
    case.model.save_pretrained(tmp_path)
    assert_same_bits(case.tiny.load(tmp_path).state_dict(), case.reference.state_dict())


# --- images of other sizes than the configuration's


def embedders(name: str, checkpoint: Callable[[str], Path], **settings: Any) -> list[Any]:
    """A model that is accelerated and nothing else, and one as it was loaded."""
    tiny = EMBEDDERS[name]
    model, reference = (tiny.load(checkpoint(name)) for _ in range(2))
    return [fx.accelerate(model, config_of(tiny).replace(**settings)), reference]


def images(count: int, size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))}


@torch.no_grad()
def test_a_warm_up_by_example_captures_its_size(checkpoint: Callable[[str], Path]) -> None:
    model, reference = embedders("dinov2", checkpoint)
    assert fx.warmup(model, **images(1, 20)) > 0
    before, inputs = num_traces(), images(3, 20)
    assert_close(model(**inputs), reference(**inputs))
    assert (num_traces(), fx.stats(model).misses) == (before, {})


@torch.no_grad()
def test_positions_are_interpolated_where_that_is_asked_for(checkpoint: Callable[[str], Path]) -> None:
    both = model, _ = embedders("clip", checkpoint, compile=False, piece_compiler="auto")
    for number in range(2):
        inputs = images(1, 24, seed=number)
        got, expected = (embed(each, inputs, interpolate_pos_encoding=True) for each in both)
        assert_close(got, expected)
    with pytest.raises(ValueError, match="Input image size"):
        embed(model, images(1, 24))
    assert fx.stats(model).hits == 1


@torch.no_grad()
def test_an_image_may_have_rows_in_eagers_strides(checkpoint: Callable[[str], Path]) -> None:
    """Those of Step's tower are a transposed view, where no replay has copied them."""
    tiny = MODELS["step-3.7"]
    model, reference = (tiny.load(checkpoint("step-3.7")) for _ in range(2))
    fx.accelerate(model, config_of(tiny).replace(mode="none"))
    inputs = tiny.image_inputs(tiny.images[:1])
    assert_close(tiny.features(model, inputs), tiny.features(reference, inputs))


@pytest.mark.slow
@torch.no_grad()
def test_captures_of_one_size_outlive_those_of_another(tmp_path: Path) -> None:
    """Step's tower is called with whole images and with crops; each size has tables among its modules."""
    arguments = copy.deepcopy(MODELS["step-3.7"].arguments)
    arguments["vision_config"]["num_hidden_layers"] = 1
    tiny = replace(MODELS["step-3.7"], arguments=arguments)
    tiny.make(tmp_path)
    config = config_of(tiny).replace(compile=False, piece_compiler="auto")
    model = fx.accelerate(tiny.load(tmp_path), config)
    fx.warmup(model)
    for _ in range(2):
        tiny.features(model, tiny.image_inputs(tiny.images))
    stats = fx.stats(model)
    assert (stats.hits, stats.misses) == (4, {})
