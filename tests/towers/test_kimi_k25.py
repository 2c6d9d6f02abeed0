"""Kimi-K2.5 against Hugging Face's own tower, item by item: a batch of different clips is too much for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import vision_utils
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.kimi_k25 import modeling_kimi_k25

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError

from .packed_tower_tests import assert_equal
from .random_weights import randomize
from .tiny_packed import KIMI_HIDDEN as HIDDEN
from .tiny_packed import kimi_k25, raster_patches

Grid = tuple[int, int, int]
BLOCKS = 3
# Images, then clips. One frame is a clip of its own kind: it gets no time.
BATCHES: list[tuple[list[Grid], list[Grid]]] = [
    ([(1, 4, 4)], []),
    ([(1, 4, 6), (1, 2, 2), (1, 6, 4)], []),
    ([(1, 8, 8), (1, 6, 10)], []),
    ([(1, 2, 2)] * 5, []),
    ([], [(4, 4, 6)]),
    ([(1, 4, 6)], [(3, 4, 2), (1, 2, 6), (2, 4, 4)]),
    ([], [(4, 6, 8), (2, 2, 2)]),  # the first is over every budget
    ([(1, 12, 12), (1, 2, 4)], [(4, 2, 2)]),  # so is this one
]


def make_tower() -> Any:
    return randomize(kimi_k25(BLOCKS))


def make_batch(images: list[Grid], clips: list[Grid]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for grids, pixels, key in (
        (images, "pixel_values", "image_grid_thw"),
        (clips, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids:
            inputs[key] = torch.tensor(grids)
            inputs[pixels] = raster_patches(sum(t * h * w for t, h, w in grids), seed=len(key))
    return inputs


def one_by_one(tower: Any, x: Tensor, grid: Tensor) -> list[BaseModelOutputWithPooling]:
    with torch.no_grad():
        return [
            tower(part, row[None]) for part, row in zip(x.split(grid.prod(1).tolist()), grid, strict=True)
        ]


def encode(tower: Any, inputs: dict[str, Any]) -> list[Tensor]:
    return [
        output.pooler_output.flatten(1)
        for pixels, key in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
        if key in inputs
        for output in one_by_one(tower, inputs[pixels], inputs[key])
    ]


def assert_same_output(got: Any, tower: Any, x: Tensor, grid: Tensor) -> None:
    expected = one_by_one(tower, x, grid)
    assert type(got) is BaseModelOutputWithPooling
    for name in ("last_hidden_state", "pooler_output"):
        wanted = torch.cat([getattr(output, name) for output in expected])
        torch.testing.assert_close(getattr(got, name), wanted, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_tower()


@pytest.fixture(scope="module")
def wrapped() -> Any:
    return fx.wrap(make_tower())


@pytest.fixture(scope="module")
def manager(wrapped: Any) -> fx.EncoderCudaGraphManager:
    """Without captures; those are in `test_conformance.py`."""
    return fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="none"), log_interval=0)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@torch.no_grad()
def test_the_forward_is_that_of_the_tower(batch: Any, wrapped: Any, reference: Any) -> None:
    grid = torch.tensor([*batch[0], *batch[1]])
    x = raster_patches(int(grid.prod(1).sum()))
    output = wrapped(x, grid_thw=grid)
    assert 0.2 < output.pooler_output.std() < 5
    assert_same_output(output, reference, x, grid)
    assert_same_output(wrapped(pixel_values=x, grid_thw=grid, return_dict=True), reference, x, grid)


@torch.no_grad()
def test_options_of_the_tower_run_its_own_forward(reference: Any) -> None:
    wrapped = fx.wrap(copy.deepcopy(reference))
    grid = torch.tensor([[2, 4, 4], [2, 2, 6]])
    x = raster_patches(56)
    output = wrapped(x, grid, output_hidden_states=True)
    expected = reference(x, grid, output_hidden_states=True)
    assert len(output.hidden_states) == BLOCKS + 1
    for a, b in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.pooler_output, expected.pooler_output, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_every_item_is_that_of_the_tower(batch: Any, manager: Any, reference: Any) -> None:
    inputs = make_batch(*batch)
    result = manager.execute(inputs)
    assert_equal(result, encode(reference, inputs))
    assert all(item.untyped_storage().nbytes() == item.nbytes for item in result)
    rows = [spec.output_tokens for spec in manager.tower.get_encoder_cudagraph_item_specs(inputs)]
    assert [len(item) for item in result] == rows


def test_host_metadata_is_that_of_transformers(wrapped: Any) -> None:
    grids = [(1, 4, 6), (3, 2, 4), (1, 2, 2), (4, 6, 2)]
    grid = torch.tensor(grids)
    metadata = wrapped.metadata(grids)
    assert torch.equal(metadata["position_ids"], vision_utils.get_vision_position_ids(grid, 1))
    assert torch.equal(metadata["frame_index"], modeling_kimi_k25.get_vision_frame_index(grid))
    lengths = vision_utils.get_vision_cu_seqlens(grid, merge_temporal=True).diff().tolist()
    assert wrapped.segment_lengths(grids) == {"cu_seqlens": lengths}
    order = metadata["merge_permutation"]
    for (t, h, w), part in zip(grids, order.split([t * h * w for t, h, w in grids]), strict=True):
        theirs = modeling_kimi_k25.get_vision_temporal_merge_index(torch.tensor([[t, h, w]]), 2, 2)
        assert torch.equal((part - part.min()).view(t, -1, 4).transpose(0, 1), theirs)


def test_budgets_count_frames_and_specs_count_rows(wrapped: Any) -> None:
    inputs = make_batch([(1, 4, 6)], [(3, 4, 4), (1, 2, 2)])
    specs = wrapped.get_encoder_cudagraph_item_specs(inputs)
    assert [(s.input_size, s.output_tokens, s.get_path_output_tokens("default")) for s in specs] == [
        (24, 6, 6),
        (48, 4, 12),
        (4, 1, 1),
    ]
    assert wrapped.item_segments(inputs) == [1, 1, 1]
    config = wrapped.get_encoder_cudagraph_config()
    assert (config.modalities, config.out_hidden_size) == (["image", "video"], 4 * HIDDEN)
    assert wrapped.get_max_frames_per_video() == 4
    x, grid = wrapped.example_inputs()
    assert wrapped(x, grid).pooler_output.shape == (64, 4, HIDDEN)


def test_a_clip_that_is_too_long_is_refused(wrapped: Any, manager: Any) -> None:
    inputs = make_batch([], [(5, 2, 2)])
    with pytest.raises(
        InputError, match=r"video_grid_thw: expected at most 4 frames per clip; got \(5, 2, 2\)"
    ):
        manager.execute(inputs)
    with pytest.raises(InputError, match="grid_thw: expected at most 4 frames per clip"):
        wrapped(inputs["pixel_values_videos"], inputs["video_grid_thw"])


def test_the_mean_needs_the_inputs_of_the_batch(wrapped: Any) -> None:
    with pytest.raises(InputError, match="batch_mm_kwargs: expected the inputs of the batch"):
        wrapped.postprocess_encoder_output({"default": torch.zeros(4, 4 * HIDDEN)}, [0], [1], {})
