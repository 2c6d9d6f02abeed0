"""Packed towers of Hugging Face against their own forwards; `test_conformance.py` captures them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx

from .dense_models import assert_close
from .random_weights import randomize
from .tiny_packed import PATCH, exaone, glm4v, qwen2_5_omni, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl

INPUTS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
FEATURES = 3 * 2 * PATCH**2


class Model(NamedTuple):
    make: Callable[[], nn.Module]
    """A tower of several blocks, with 24 features a token."""
    by_frame: bool = False
    """Whether the tower takes a video as images, one a frame: so the model around it gives it."""


MODELS = {
    "exaone4.5": Model(exaone),
    "glm4v": Model(lambda: glm4v(3), by_frame=True),
    "glm4v-moe": Model(lambda: glm4v(3, moe=True), by_frame=True),
    "qwen2-vl": Model(lambda: qwen2_vl(3)),
    "qwen2.5-vl": Model(qwen2_5_vl),
    "qwen2.5-omni": Model(qwen2_5_omni),
    "qwen3-vl": Model(lambda: qwen3_vl(3)),
    "qwen3.5": Model(lambda: qwen3_5(3)),
    "qwen3.5-moe": Model(lambda: qwen3_5(3, moe=True)),
}
BATCHES: list[list[tuple[int, int, int]]] = [
    [(1, 4, 6)],
    [(1, 10, 12), (3, 2, 4), (1, 2, 2)],
    [(1, 2, 40), (1, 24, 18), (2, 8, 6)],
]


class Towers(NamedTuple):
    model: Model
    reference: Any
    """Hugging Face's, which nobody wrapped."""
    wrapped: Any

    def run_reference(self, pixels: Tensor, grid: Tensor, **options: Any) -> Any:
        if self.model.by_frame:
            grid = torch.tensor([[1, h, w] for t, h, w in grid.tolist() for _ in range(t)])
        return self.reference(pixels, grid, **options)


@pytest.fixture(scope="module", params=MODELS)
def towers(request: pytest.FixtureRequest) -> Towers:
    model = MODELS[request.param]
    tower = randomize(model.make())
    return Towers(model, copy.deepcopy(tower), fx.wrap(tower))


def parts(output: Any) -> list[Tensor]:
    """What the tower returns; with what leaves it behind early blocks."""
    return [output.pooler_output, output.last_hidden_state, *getattr(output, "deepstack_features", [])]


@pytest.mark.parametrize("grids", BATCHES, ids=str)
@torch.no_grad()
def test_the_forward_is_that_of_the_tower(grids: Any, towers: Towers, make_batch: Any) -> None:
    grid, pixels = make_batch(grids, features=FEATURES).values()
    expected = towers.run_reference(pixels, grid)
    for got in (towers.wrapped(pixels, grid), towers.wrapped(hidden_states=pixels, grid_thw=grid)):
        assert type(got) is type(expected)
        assert_close(parts(got), parts(expected))


@torch.no_grad()
def test_the_towers_own_options_work(towers: Towers, make_batch: Any) -> None:
    grid, pixels = make_batch([(1, 4, 6), (1, 2, 8)], features=FEATURES).values()
    got = towers.wrapped(pixels, grid, output_hidden_states=True)
    expected = towers.reference(pixels, grid, output_hidden_states=True)
    assert len(got.hidden_states) == len(expected.hidden_states) > 2
    assert_close([*got.hidden_states], [*expected.hidden_states])
    assert_close(towers.wrapped(pixels, grid, return_dict=False)[:2], expected.to_tuple()[:2])


@torch.no_grad()
def test_items_are_the_rows_of_images_and_videos(towers: Towers, make_batch: Any) -> None:
    """With what leaves the tower early beside them."""
    inputs = make_batch([(1, 4, 6)], [(2, 4, 4)], features=FEATURES)
    outputs = [towers.run_reference(inputs[pixels], inputs[key]) for pixels, key in INPUTS]
    columns = [torch.cat([pooled, *deep], dim=1) for pooled, _, *deep in map(parts, outputs)]
    assert_close([towers.wrapped.encoder_eager_forward(inputs)], [torch.cat(columns)])


def test_budgets_and_names_are_those_of_the_tower(towers: Towers) -> None:
    assert towers.wrapped.get_encoder_cudagraph_budget_range(None) == (64, 4096)
    names = {name.removeprefix("tower.") for name in towers.wrapped.state_dict()}
    assert names == set(towers.reference.state_dict())


# --- of one of them


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_another_dtype_of_the_tower(dtype: torch.dtype, make_batch: Any) -> None:
    tower = randomize(qwen3_vl(2)).to(dtype)
    eager, wrapped = copy.deepcopy(tower), fx.wrap(tower)
    assert wrapped.dtype == dtype
    grid, pixels = make_batch([(1, 4, 4), (2, 2, 4)], features=FEATURES).values()
    output = wrapped(pixels.to(dtype), grid).pooler_output
    assert output.dtype == dtype
    expected = eager(pixels.to(dtype), grid).pooler_output
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-9 if dtype == torch.float64 else 0.1)


def test_items_are_images_then_videos(tiny_towers: Any, make_batch: Any) -> None:
    wrapped, inputs = tiny_towers.wrapped, make_batch([(1, 4, 6), (1, 2, 2)], [(3, 4, 4)])
    specs = wrapped.get_encoder_cudagraph_item_specs(inputs)
    assert [(s.input_size, s.output_tokens) for s in specs] == [(24, 6), (4, 1), (48, 12)]
    assert wrapped.item_segments(inputs) == [1, 1, 3]
    assert wrapped.get_encoder_cudagraph_item_specs({}) == []
    assert wrapped.get_max_frames_per_video() == 384
    captured = wrapped.prepare_encoder_cudagraph_capture_inputs(
        16, 4, 8, torch.device("cpu"), torch.bfloat16
    ).values
    assert captured["cu_seqlens"].tolist() == [0] + [64] * 9
    values = wrapped.prepare_encoder_cudagraph_replay_buffers(inputs, 4, 8).values
    assert values["cu_seqlens"].tolist() == [0, 24, 28, 44, 60, 76]
