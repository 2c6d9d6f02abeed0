from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError

from .packed_tower_tests import INPUTS, PackedModuleTests
from .tiny_packed import qwen3_vl

CPU = torch.device("cpu")


def joined(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.cat(value)


def assert_same_output(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    pairs = [
        (got.last_hidden_state, expected.last_hidden_state),
        (got.pooler_output, expected.pooler_output),
        *zip(got.deepstack_features, expected.deepstack_features, strict=True),
    ]
    assert len(pairs) == 4
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


class TestQwen3VL(PackedModuleTests):
    metadata: ClassVar[list[str]] = ["position_ids", "interp_indices", "interp_weights", "cu_seqlens"]
    out_hidden_size: ClassVar[int] = 2 * 24

    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen3_vl(blocks=3)

    @classmethod
    def encode(cls, tower: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
        """With what leaves the tower behind its first block."""
        items: list[torch.Tensor] = []
        for pixels, key in INPUTS:
            if key in inputs:
                output = tower(inputs[pixels], inputs[key])
                packed = torch.cat([output.pooler_output, *output.deepstack_features], dim=1)
                items += packed.split([t * h * w // 4 for t, h, w in inputs[key].tolist()])
        return items


sides = st.integers(1, 6).map(lambda n: 2 * n)
grids = st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=4)


@settings(max_examples=12)
@given(grids)
@torch.no_grad()
def test_the_forward_is_that_of_the_tower(tiny_towers: Any, make_batch: Any, listed: Any) -> None:
    inputs = make_batch(listed)
    x, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    expected = tiny_towers.reference(x, grid)
    assert_same_output(tiny_towers.wrapped(x, grid), expected)
    assert_same_output(tiny_towers.wrapped(hidden_states=x, grid_thw=grid), expected)


@torch.no_grad()
def test_the_forward_refuses_grids_that_do_not_describe_the_patches(tiny_towers: Any) -> None:
    wrapped = tiny_towers.wrapped
    with pytest.raises(InputError, match="grid_thw: describes 16 patches; got 15 rows"):
        wrapped(torch.zeros(15, 1536), torch.tensor([[1, 4, 4]]))
    with pytest.raises(InputError, match=r"grid_thw: .* multiples of the merge size 2"):
        wrapped(torch.zeros(15, 1536), torch.tensor([[1, 3, 5]]))


def test_only_the_wrapped_tower_changes_its_attention(make_tower: Any) -> None:
    first = make_tower()
    second = copy.deepcopy(first)
    shared = first.config
    fx.wrap(first)
    assert (
        second.config._attn_implementation == shared._attn_implementation != first.config._attn_implementation
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_another_dtype_of_the_tower(dtype: torch.dtype, make_tower: Any, make_batch: Any) -> None:
    tower = make_tower().to(dtype)
    eager = copy.deepcopy(tower)
    wrapped = fx.wrap(tower)
    assert wrapped.dtype == dtype
    inputs = make_batch([(1, 4, 4), (2, 2, 4)])
    output = wrapped(inputs["pixel_values"].to(dtype), inputs["image_grid_thw"]).pooler_output
    expected = eager(inputs["pixel_values"].to(dtype), inputs["image_grid_thw"]).pooler_output
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-9 if dtype == torch.float64 else 0.1)


# --- the protocol


def test_items_are_images_then_videos(tiny_towers: Any, make_batch: Any) -> None:
    wrapped = tiny_towers.wrapped
    inputs = make_batch([(1, 4, 6), (1, 2, 2)], [(3, 4, 4)])
    specs = wrapped.get_encoder_cudagraph_item_specs(inputs)
    assert [(s.input_size, s.output_tokens) for s in specs] == [(24, 6), (4, 1), (48, 12)]
    assert wrapped.item_segments(inputs) == [1, 1, 3]
    assert wrapped.get_encoder_cudagraph_item_specs({}) == []
    assert wrapped.get_max_frames_per_video() == 384
    assert wrapped.get_input_modality(inputs) == "video"
    assert wrapped.get_input_modality(make_batch([(1, 2, 2)])) == "image"


@pytest.mark.parametrize(
    "indices", [[0], [1], [2], [3], [0, 1], [3, 0], [2, 1], [0, 1, 2, 3], [3, 2, 1, 0], []]
)
def test_selected_items_keep_their_rows_in_the_order_asked_for(
    indices: list[int], tiny_towers: Any, make_batch: Any
) -> None:
    inputs = make_batch([(1, 4, 6), (1, 2, 2)], [(3, 4, 4), (1, 2, 4)])
    grids = [(1, 4, 6), (1, 2, 2), (3, 4, 4), (1, 2, 4)]
    rows = torch.cat([inputs["pixel_values"], inputs["pixel_values_videos"]]).split([24, 4, 48, 8])
    selected = tiny_towers.wrapped.select_encoder_cudagraph_items(inputs, indices)
    got_grids = [*selected.get("image_grid_thw", ()), *selected.get("video_grid_thw", ())]
    assert got_grids == [grids[i] for i in indices]
    got = [joined(selected[key]) for key in ("pixel_values", "pixel_values_videos") if key in selected]
    assert torch.equal(torch.cat(got), torch.cat([rows[i] for i in indices])) if indices else got == []
    if indices == sorted(indices):  # then the images stay images, and the videos videos
        assert len(selected.get("video_grid_thw", ())) == sum(index >= 2 for index in indices)


def test_replay_values_fit_the_buffers_of_a_capture(tiny_towers: Any, make_batch: Any) -> None:
    wrapped = tiny_towers.wrapped
    captured = wrapped.prepare_encoder_cudagraph_capture_inputs(16, 4, 8, CPU, torch.bfloat16).values
    assert captured["pixel_values"].shape == (64, 1536)
    assert captured["pixel_values"].dtype == torch.bfloat16
    assert captured["cu_seqlens"].tolist() == [0] + [64] * 9
    values = wrapped.prepare_encoder_cudagraph_replay_buffers(
        make_batch([(1, 4, 6)], [(2, 4, 4)]), 4, 8
    ).values
    assert values.keys() == captured.keys() == set(wrapped.get_encoder_cudagraph_config().buffer_keys)
    assert values["cu_seqlens"].tolist() == [0, 24, 40, 56]


@torch.no_grad()
def test_a_forward_leaves_no_marks_on_the_callers_tensors(tiny_towers: Any, make_batch: Any) -> None:
    inputs = make_batch([(1, 4, 4)])
    x, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    tiny_towers.wrapped(x, grid)
    for tensor in (x, grid):
        assert not [name for name in vars(tensor) if name.startswith("_dynamo")]
