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

from .dense_models import assert_close
from .random_weights import randomize
from .tiny_packed import KIMI_HIDDEN as HIDDEN
from .tiny_packed import kimi_k25, raster_patches

Grid = tuple[int, int, int]
BLOCKS = 3
# Images, then clips. One frame is a clip of its own kind: it gets no time.
BATCHES: list[tuple[list[Grid], list[Grid]]] = [
    ([(1, 4, 6), (1, 2, 2), (1, 6, 4)], []),
    ([(1, 8, 8), (1, 6, 10)], []),
    ([], [(4, 4, 6)]),
    ([(1, 4, 6)], [(3, 4, 2), (1, 2, 6), (2, 4, 4)]),
    ([(1, 12, 12), (1, 2, 4)], [(4, 6, 8), (2, 2, 2)]),
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return randomize(kimi_k25(BLOCKS))


@pytest.fixture(scope="module")
def wrapped(reference: Any) -> Any:
    return fx.wrap(copy.deepcopy(reference))


@pytest.fixture(scope="module")
def manager(wrapped: Any) -> fx.EncoderCudaGraphManager:
    """Without captures; those are in `test_conformance.py`."""
    return fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="none"), log_interval=0)


def patches_of(grids: list[Grid]) -> Tensor:
    return raster_patches(sum(t * h * w for t, h, w in grids))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@torch.no_grad()
def test_forward_and_items_are_those_of_the_tower(
    batch: Any, wrapped: Any, manager: Any, reference: Any
) -> None:
    images, clips = batch
    grid, x = torch.tensor([*images, *clips]), patches_of([*images, *clips])
    parts = x.split(grid.prod(1).tolist())
    expected = [reference(part, row[None]) for part, row in zip(parts, grid, strict=True)]
    for output in (wrapped(x, grid_thw=grid), wrapped(pixel_values=x, grid_thw=grid, return_dict=True)):
        assert type(output) is BaseModelOutputWithPooling
        assert 0.2 < output.pooler_output.std() < 5
        for name in ("last_hidden_state", "pooler_output"):
            assert_close([getattr(output, name)], [torch.cat([getattr(each, name) for each in expected])])
    given = (
        ("pixel_values", "image_grid_thw", images, parts[: len(images)]),
        ("pixel_values_videos", "video_grid_thw", clips, parts[len(images) :]),
    )
    inputs: dict[str, Any] = {}
    for pixels, key, grids, own in given:
        inputs |= {pixels: torch.cat(own), key: grids} if grids else {}
    result = manager.execute(inputs)
    assert_close(result, [each.pooler_output.flatten(1) for each in expected])
    assert all(item.untyped_storage().nbytes() == item.nbytes for item in result)


@torch.no_grad()
def test_options_of_the_tower_run_its_own_forward(wrapped: Any, reference: Any) -> None:
    grid = torch.tensor([[2, 4, 4], [2, 2, 6]])
    x = raster_patches(56)
    output = wrapped(x, grid, output_hidden_states=True)
    expected = reference(x, grid, output_hidden_states=True)
    assert len(output.hidden_states) == BLOCKS + 1
    assert_close(output.hidden_states, expected.hidden_states)
    assert_close([output.pooler_output], [expected.pooler_output])


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


def test_a_clip_is_one_segment_of_at_most_four_frames(wrapped: Any, manager: Any) -> None:
    inputs = {"image_grid_thw": [(1, 4, 6)], "video_grid_thw": [(3, 4, 4), (1, 2, 2)]}
    assert wrapped.item_segments(inputs) == [1, 1, 1]
    assert wrapped.get_encoder_cudagraph_config().out_hidden_size == 4 * HIDDEN
    assert wrapped.get_max_frames_per_video() == 4
    pixels, grid = raster_patches(20), torch.tensor([(5, 2, 2)])
    message = r"grid_thw: expected at most 4 frames per clip; got \(5, 2, 2\)"
    with pytest.raises(InputError, match=f"video_{message}"):
        manager.execute({"pixel_values_videos": pixels, "video_grid_thw": grid})
    with pytest.raises(InputError, match=f"^{message}"):
        wrapped(pixels, grid)


def test_the_mean_needs_the_inputs_of_the_batch(wrapped: Any) -> None:
    with pytest.raises(InputError, match="batch_mm_kwargs: expected the inputs of the batch"):
        wrapped.postprocess_encoder_output({"default": torch.zeros(4, 4 * HIDDEN)}, [0], [1], {})
