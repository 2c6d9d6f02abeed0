"""What a model gives its tower and reads of it, of its own accord."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason

from .comparisons import assert_close, generated
from .models import MODELS, TOWER
from .tiny_model import randomize

DISABLED = {"enabled": False}
"""Without captures: whatever would be one is computed by the manager, and counted so."""


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_no_model_has_an_image_encoded_twice(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Without a trace, so that every model is tried also where `make test-all` is not."""
    tiny, directory = MODELS[name], checkpoint(name)
    model, reference = tiny.load(directory), tiny.load(directory)
    fx.accelerate(model, DISABLED)
    inputs = tiny.inputs([tiny.images[:2]])
    torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, rtol=0, atol=1e-4)
    expected = generated(reference, inputs)
    assert torch.equal(generated(model, inputs), expected)
    with contextlib.suppress(KeyError, RuntimeError, ValueError):  # not all of transformers' models can
        pieces = generated(reference, inputs, prefill_chunk_size=8)
        assert torch.equal(generated(model, inputs, prefill_chunk_size=8), pieces)
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert torch.equal(generated(model, inputs), expected)
    remove_hook_from_submodules(model)
    assert set(fx.stats(model).misses) == {MissReason.DISABLED}
    model, inputs = fx.accelerate(tiny.load(directory), DISABLED), tiny.image_inputs(tiny.images)
    assert_close(tiny.features(model, inputs), tiny.features(reference, inputs))
    assert set(fx.stats(model).misses) <= {MissReason.DISABLED, MissReason.UNCAPTURED_OUTPUT}


class Case:
    """A model of random weights, and its untouched twin."""

    def __init__(self, model: Any) -> None:
        randomize(model)
        self.reference = model.eval()
        self.model = fx.accelerate(copy.deepcopy(model), DISABLED)

    def call(self, *args: Any, read: Callable[[Any], Any] = lambda output: output, **kwargs: Any) -> Any:
        with torch.no_grad():
            got, expected = (read(each(*args, **kwargs)) for each in (self.model, self.reference))
        assert_close(got, expected)

    def misses(self) -> dict[MissReason, int]:
        return {
            reason: n for reason, n in fx.stats(self.model).misses.items() if reason != MissReason.DISABLED
        }


def tower(**options: Any) -> Case:
    return Case(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**TOWER, **options})))


def images(count: int = 2, size: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


# --- arguments


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_mask_that_the_tower_does_not_read_is_none(is_whole: bool) -> None:
    """As ModernVBERT gives it to SigLIP."""
    case = Case(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER)))
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[1, 2:] = is_whole
    case.call(images(), patch_attention_mask=mask)
    assert case.misses() == {}


@pytest.mark.parametrize("value", [True, torch.ones(2), "text"])
def test_an_argument_for_another_is_served(value: Any) -> None:
    case = tower()
    case.call(images(), for_another=value, return_dict=False)
    assert case.misses() == {}


def test_pixels_of_another_dtype_than_the_towers() -> None:
    case = Case(transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**TOWER)))
    case.call(images().half(), image_sizes=torch.tensor([[16, 16], [8, 12]]))
    assert case.misses() == {}


def test_an_argument_that_the_tower_reads_is_a_miss_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Case(transformers.Dinov2Model(transformers.Dinov2Config(**TOWER, use_mask_token=True)))
    mask = torch.zeros(2, 16, dtype=torch.bool)
    with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
        for _ in range(3):
            case.call(images(), bool_masked_pos=mask.index_fill(1, torch.arange(4), True))
    assert case.misses() == {MissReason.OPTIONS: 3}
    (record,) = caplog.records
    assert "'bool_masked_pos' changes the output" in record.getMessage()


def test_an_argument_at_its_default_is_none() -> None:
    class Tower(transformers.CLIPVisionModel):
        def forward(self, pixel_values: Any, scale: float = 1.0, **kwargs: Any) -> Any:
            output = super().forward(pixel_values, **kwargs)
            output.last_hidden_state = output.last_hidden_state * scale
            return output

    case = Case(Tower(transformers.CLIPVisionConfig(**TOWER)))
    case.call(images(), scale=1.0)
    assert case.misses() == {}
    case.call(images(), scale=2.0)
    assert case.misses() == {MissReason.OPTIONS: 1}


# --- layers and fields


@pytest.mark.parametrize(
    ("read", "options"),
    [
        (lambda output: (output.hidden_states[1], output.pooler_output), {"output_hidden_states": True}),
        (lambda output: output.hidden_states[-2], {"output_hidden_states": True}),
        (lambda output: torch.cat(output.hidden_states), {"output_hidden_states": True}),
        (lambda output: (output.hidden_states[0], output.last_hidden_state), {"output_hidden_states": [0]}),
    ],
)
def test_what_is_read_once_is_captured_from_then_on(read: Callable[[Any], Any], options: Any) -> None:
    case = tower()
    case.call(images())
    case.call(images(), read=read, **options)
    first = case.misses()
    assert first.keys() <= {MissReason.UNCAPTURED_OUTPUT}
    for _ in range(3):
        case.call(images(), read=read, **options)
        case.call(images())
    assert case.misses() == first


# --- threads


def test_first_calls_of_several_threads_make_one_capture() -> None:
    reference = tower().reference
    model = fx.accelerate(copy.deepcopy(reference), {"piece_compiler": "eager", "mode": "full"})
    pixels, barrier = images(), Barrier(8)
    with torch.no_grad():
        expected = reference(pixels).last_hidden_state

    def call(number: int) -> None:
        barrier.wait()
        with torch.no_grad():
            for _ in range(7):
                assert_close(model(pixels).last_hidden_state, expected)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    stats = fx.stats(model)
    assert stats.misses == {}
    assert stats.hits == 56


# --- sizes


def sizes(case: Case, *wanted: int) -> int:
    """How many of calls with images of these sizes their size had refused."""
    before = case.misses().get(MissReason.NEW_SHAPE, 0)
    for size in wanted:
        case.call(images(1, size), interpolate_pos_encoding=True)
    return case.misses().get(MissReason.NEW_SHAPE, 0) - before


def test_a_size_that_recurs_takes_the_place_of_the_one_that_was_used_least_recently() -> None:
    case = tower()
    first = [4 * n for n in range(5, 13)]
    assert sizes(case, *first, *first, *first) == 8
    assert sizes(case, 64, 64, 64) == 1
    assert sizes(case, *first[1:]) == 0
    assert sizes(case, first[0]) == 1
    others = [4 * n for n in range(20, 28)]
    assert sizes(case, *others * 5) < 20
    assert sizes(case, *others) == 0


def test_more_sizes_than_places_are_not_captured_in_turn(made: list[type]) -> None:
    case = tower()
    rotating = [4 * n for n in range(5, 25)]
    assert sizes(case, *rotating * 10) < 150
    assert len(made) < 20


def test_a_size_of_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit_encoder.hugging_face.captured._MOST_SEEN", 4)
    case = tower()
    assert sizes(case, 20, 24, 28, 32, 36) == 5
    assert sizes(case, 20, 20) == 1
