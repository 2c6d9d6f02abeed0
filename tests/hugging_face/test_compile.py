"""Towers that are wrapped behind `torch.compile` in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason

from .comparisons import assert_close, assert_same_bits, generated
from .models import MODELS
from .test_models import num_captures, num_traces

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS = {"piece_compiler": "eager", "mode": "full"}

# What a tower is given beside its inputs: by hand, by transformers 5.16 and 5.17, by 5.23, and by a user.
STYLES: list[dict[str, Any]] = [
    {},
    {"return_dict": True, "use_cache": True},
    {"return_dict": True},
    {"use_cache": False, "output_attentions": False, "output_hidden_states": None},
]


@pytest.fixture
def wrapped(checkpoint: Callable[[str], Path]) -> tuple[Any, Any]:
    """A model whose tower is wrapped and compiled in its place, and one as it was loaded."""
    tiny, directory = MODELS["qwen3-vl"], checkpoint("qwen3-vl")
    model, reference = tiny.load(directory), tiny.load(directory)
    visual = fx.wrap(model.model.visual)
    options = {**OPTIONS, **tiny.settings}
    model.model.visual = torch.compile(visual, backend="encoder_cg", fullgraph=True, options=options)
    return model, reference


def test_no_style_of_keyword_arguments_is_another_trace(wrapped: tuple[Any, Any]) -> None:
    model, reference = wrapped
    tiny = MODELS["qwen3-vl"]
    compiled = model.model.visual
    assert fx.warmup(compiled) == 2
    traces = num_traces()
    inputs = tiny.image_inputs(tiny.images)
    patches, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.no_grad():
        expected = reference.model.visual(patches, grids)
    for context in (torch.no_grad, torch.inference_mode):
        for style in STYLES:
            with context():
                for got in (
                    compiled(patches, grid_thw=grids, **style),
                    compiled(patches.clone(), grids.clone()),
                ):
                    assert_close(got, expected)
                assert_close(compiled(patches, grids, **{**style, "return_dict": False}), expected.to_tuple())
    inputs = tiny.inputs([tiny.images[:2]])
    assert torch.equal(generated(model, inputs), generated(reference, inputs))
    stats = fx.stats(compiled)
    assert (num_traces(), num_captures(compiled)) == (traces, 2)
    assert (stats.hits, stats.misses) == (25, {})
    assert sum(each.replays for each in stats.budgets.values()) == 25
    assert 0 < stats.padding_fraction < 1


def test_options_that_change_the_result_go_to_the_tower_itself(wrapped: tuple[Any, Any]) -> None:
    model, reference = wrapped
    compiled = model.model.visual
    inputs = MODELS["qwen3-vl"].image_inputs(MODELS["qwen3-vl"].images[:1])
    given = inputs["pixel_values"], inputs["image_grid_thw"]
    reference.set_attn_implementation("eager")
    for options in ({"output_hidden_states": True}, {"output_attentions": True}):
        for tower in (compiled, reference.model.visual):
            tower.config._attn_implementation_internal = "eager"
        with torch.no_grad():
            assert_close(compiled(*given, **options), reference.model.visual(*given, **options))
    stats = fx.stats(compiled)
    assert stats.misses == {MissReason.OPTIONS: 2}
    assert stats.fallback_runs == {"eager": 2}


def test_a_wrapped_tower_in_its_place_is_saved_and_loaded_under_its_own_names(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    tiny, directory = MODELS["qwen3-vl"], checkpoint("qwen3-vl")
    model, reference = tiny.load(directory), tiny.load(directory)
    state = {key: tensor.clone() for key, tensor in reference.state_dict().items()}
    model.model.visual = fx.wrap(model.model.visual)
    assert_same_bits(model.state_dict(), state)
    model.save_pretrained(tmp_path)
    assert_same_bits(tiny.load(tmp_path).state_dict(), state)
    zeros = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    model.load_state_dict(zeros)
    assert not model.model.visual.tower.merger.linear_fc1.weight.any()
    model.load_state_dict(state, assign=True)
    model.set_attn_implementation("sdpa")
    inputs = tiny.inputs([tiny.images[:2]])
    assert torch.equal(generated(model, inputs), generated(reference, inputs))
    model.double()
    assert model.model.visual.tower.patch_embed.proj.weight.dtype == torch.float64
