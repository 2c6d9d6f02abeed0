"""Packed towers of Hugging Face against their own forwards; `test_conformance.py` captures them."""

from __future__ import annotations

import copy
import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError

from .conformance import Case, assert_compiled_once, assert_modes_agree
from .dense_models import assert_close, encoded
from .random_weights import randomize
from .tiny_inputs import PackedInputs
from .tiny_packed import (
    KIMI_HIDDEN,
    PATCH,
    exaone,
    glm4v,
    kimi_k25,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
    raster_patches,
)

INPUTS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
FEATURES = 3 * 2 * PATCH**2


class Model(NamedTuple):
    make: Callable[[], nn.Module]
    """A tower of several blocks, with 24 features a token."""
    by_frame: bool = False
    """Whether the tower takes a video as images, one a frame: so the model around it gives it."""
    by_item: bool = False
    """Whether a batch of different clips is too much for it."""
    patch: tuple[int, ...] = (FEATURES,)
    name: str = "hidden_states"
    """Of the argument that has the patches."""


MODELS = {
    "exaone4.5": Model(exaone),
    "glm4v": Model(lambda: glm4v(3), by_frame=True),
    "glm4v-moe": Model(lambda: glm4v(3, moe=True), by_frame=True),
    "kimi-k2.5": Model(lambda: kimi_k25(3), by_item=True, patch=(3, PATCH, PATCH), name="pixel_values"),
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

    def batch(self, make_batch: Any, *grids: Any) -> dict[str, Tensor]:
        inputs = make_batch(*grids, features=math.prod(self.model.patch))
        return {name: x.view(-1, *self.model.patch) if "pixel" in name else x for name, x in inputs.items()}

    def parts(self, pixels: Tensor, grid: Tensor) -> list[Tensor]:
        """What the tower itself returns; with what leaves it behind early blocks."""
        if self.model.by_item:
            clips = zip(pixels.split(grid.prod(1).tolist()), grid, strict=True)
            outputs = [parts_of(self.reference(clip, row[None])) for clip, row in clips]
            return [torch.cat(each) for each in zip(*outputs, strict=True)]
        if self.model.by_frame:
            grid = torch.tensor([[1, h, w] for t, h, w in grid.tolist() for _ in range(t)])
        return parts_of(self.reference(pixels, grid))


@pytest.fixture(scope="module", params=MODELS)
def towers(request: pytest.FixtureRequest) -> Towers:
    model = MODELS[request.param]
    tower = randomize(model.make())
    return Towers(model, copy.deepcopy(tower), fx.wrap(tower))


def parts_of(output: Any) -> list[Tensor]:
    return [output.pooler_output, output.last_hidden_state, *getattr(output, "deepstack_features", [])]


@pytest.mark.parametrize("grids", BATCHES, ids=str)
@torch.no_grad()
def test_the_forward_is_that_of_the_tower(grids: Any, towers: Towers, make_batch: Any) -> None:
    grid, pixels = towers.batch(make_batch, grids).values()
    expected = towers.parts(pixels, grid)
    named = towers.wrapped(**{towers.model.name: pixels}, grid_thw=grid)
    for got in (towers.wrapped(pixels, grid), named):
        assert type(got) is type(towers.reference(pixels[:24], torch.tensor([[1, 4, 6]])))
        assert_close(parts_of(got), expected)


@torch.no_grad()
def test_the_towers_own_options_work(towers: Towers, make_batch: Any) -> None:
    grid, pixels = towers.batch(make_batch, [(1, 4, 6), (1, 2, 8)]).values()
    got = towers.wrapped(pixels, grid, output_hidden_states=True)
    expected = towers.reference(pixels, grid, output_hidden_states=True)
    assert len(got.hidden_states) == len(expected.hidden_states) > 2
    assert_close([*got.hidden_states], [*expected.hidden_states])
    assert_close(towers.wrapped(pixels, grid, return_dict=False)[:2], expected.to_tuple()[:2])


@torch.no_grad()
def test_items_are_the_rows_of_images_and_videos(towers: Towers, make_batch: Any) -> None:
    """With what leaves the tower early beside them."""
    inputs = towers.batch(make_batch, [(1, 4, 6)], [(2, 4, 4)])
    outputs = [towers.parts(inputs[pixels], inputs[key]) for pixels, key in INPUTS]
    columns = [torch.cat([pooled.flatten(1), *deep], dim=1) for pooled, _, *deep in outputs]
    assert_close(encoded(towers.wrapped, inputs), columns)


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


def test_a_clip_is_one_segment_of_at_most_four_frames() -> None:
    wrapped = fx.wrap(kimi_k25())
    inputs = {"image_grid_thw": [(1, 4, 6)], "video_grid_thw": [(3, 4, 4), (1, 2, 2)]}
    assert wrapped.item_segments(inputs) == [1, 1, 1]
    assert wrapped.get_encoder_cudagraph_config().out_hidden_size == 4 * KIMI_HIDDEN
    assert wrapped.get_max_frames_per_video() == 4
    pixels, grid = raster_patches(20), torch.tensor([(5, 2, 2)])
    message = r"grid_thw: expected at most 4 frames per clip; got \(5, 2, 2\)"
    with pytest.raises(InputError, match=f"video_{message}"):
        encoded(wrapped, {"pixel_values_videos": pixels, "video_grid_thw": grid})
    with pytest.raises(InputError, match=f"^{message}"):
        wrapped(pixels, grid)


def test_the_mean_needs_the_inputs_of_the_batch() -> None:
    wrapped = fx.wrap(kimi_k25())
    with pytest.raises(InputError, match="batch_mm_kwargs: expected the inputs of the batch"):
        wrapped.postprocess_encoder_output({"default": torch.zeros(4, 4 * KIMI_HIDDEN)}, [0], [1], {})


# --- a tower of nobody's family: the example in docs/towers.md


ROOT = Path(__file__).parents[2]
GRIDS = [(1, 4, 8), (2, 4, 4), (1, 8, 8)]
"""In patches; the tower makes a token of 2 x 2."""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (source,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "towers.md").read_text("utf-8"), re.DOTALL
    )
    path = tmp_path_factory.mktemp("docs") / "packed_tower.py"
    path.write_text(source, encoding="utf-8")
    return SimpleNamespace(**runpy.run_path(str(path)))


def expected(tower: Any, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Frame by frame, with torch's own attention; a frame's patches come in blocks of 2 x 2."""
    items, start = [], 0
    for frames, height, width in grids:
        tokens = [(row, column) for row in range(0, height, 2) for column in range(0, width, 2)]
        places = [(row + y, column + x) for row, column in tokens for y in (0, 1) for x in (0, 1)]
        rows = []
        for _ in range(frames):
            frame = patches[start : start + height * width]
            x = tower.embed(frame) + tower.place(torch.tensor(places, dtype=torch.float32))
            q, k, v = tower.qkv(x).view(-1, 3, 2, 8).permute(1, 2, 0, 3)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            rows.append(tower.merge((x + attended.transpose(0, 1).flatten(1)).view(-1, 64)))
            start += height * width
        items.append(torch.cat(rows))
    return items


@pytest.fixture(scope="module")
def case(example: Any) -> Case:
    return Case("Tower", example.Adapter(example.Tower()), PackedInputs((48,), videos=()))


@torch.no_grad()
def test_rows_are_those_of_the_tower_frame_by_frame(case: Case) -> None:
    patches = torch.randn(sum(t * h * w for t, h, w in GRIDS), 48)
    wanted = torch.cat(expected(case.tower.tower, patches, GRIDS))
    got = case.tower.encoder_eager_forward({"pixel_values": patches, "image_grid_thw": GRIDS})
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_it_computes_the_same_in_every_mode(case: Case) -> None:
    assert_modes_agree(case)
    program = case.manager.programs["default"]
    assert program is not None
    assert len(program.program.splits) == 1
    assert str(program.program.padding) == "proved"


def test_it_compiles_once(case: Case) -> None:
    assert_compiled_once(case)
