"""The grid rule: what it sees of a tower, and what it says of one that it cannot serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import vision_utils
from transformers.modeling_outputs import BaseModelOutput

import fxsplit_encoder as fx
from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder.towers.rules import GridTower, check_values, look_at_grids

from .conformance import make_case

GRIDS = [(1, 4, 6), (3, 2, 8), (1, 8, 2)]


@pytest.mark.parametrize(
    "name", ["Qwen2VisionTransformerPretrainedModel", "Qwen3VLVisionModel", "Qwen3_5VisionModel"]
)
def test_metadata_is_that_of_the_family(name: str) -> None:
    """Bit for bit; indices have the dtype of the tower's own."""
    family = make_case(name).tower
    by_rule = GridTower(linked_copy(family.tower))
    assert by_rule.frames_are_independent
    assert by_rule.out_hidden_size == family.out_hidden_size
    expected, got = family.host_metadata(GRIDS), by_rule.host_metadata(GRIDS)
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert torch.equal(got[key], value.to(got[key].dtype)), key
    assert by_rule.item_segments({"image_grid_thw": GRIDS}) == family.item_segments({"image_grid_thw": GRIDS})


class Tower(transformers.PreTrainedModel):
    """Patches with a sum of each frame's rows and columns."""

    config_class = transformers.Qwen2VLConfig.sub_configs["vision_config"]

    def __init__(self) -> None:
        super().__init__(self.config_class())
        self.proj = nn.Linear(12, 8)
        self.post_init()

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        positions = vision_utils.get_vision_position_ids(self.of(grid_thw), 2, kwargs=kwargs)
        vision_utils.get_vision_cu_seqlens(grid_thw, kwargs=kwargs)
        hidden = self.proj(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden + positions.sum(1, keepdim=True).to(hidden.device))

    def of(self, grids: Any) -> Any:
        return grids


def test_a_tower_of_nobody_is_served() -> None:
    adapter = fx.wrap(Tower().eval())
    assert isinstance(adapter, GridTower)
    look = adapter.look
    assert look.input_names == ("hidden_states", "grid_thw")
    assert (look.patches, look.merge_size, look.by_frame) == ((-1, 12), 2, True)
    assert look.fields == ((("last_hidden_state", None), 32),)
    assert look.columns == {"position_ids": (2, torch.int64)}


class Transposed(Tower):
    def of(self, grids: Any) -> Any:
        return None if grids is None else grids[:, [0, 2, 1]]


class Reads(Tower):
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, grid_thw, **kwargs)
        return BaseModelOutput(last_hidden_state=output.last_hidden_state * len(grid_thw))


class Pools(Tower):
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, grid_thw, **kwargs)
        return BaseModelOutput(last_hidden_state=output.last_hidden_state.mean(0, keepdim=True))


class Plain(Tower):
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        return BaseModelOutput(last_hidden_state=self.proj(hidden_states))


class Clips(Tower):
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, grid_thw, **kwargs)
        vision_utils.get_vision_position_ids(grid_thw, 2, include_temporal=True, kwargs={**kwargs})
        return output


class More(Tower):
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, sizes: Any) -> Any:
        return BaseModelOutput(last_hidden_state=self.proj(hidden_states))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Transposed, "its forward calls get_vision_position_ids with grid_thw of its own"),
        (Reads, "its forward also reads grid_thw, beside position_ids, cu_seqlens: TypeError: "),
        (Pools, r"it returns {'last_hidden_state': (1, 8)} for 12 patches, not a row a token"),
        (Plain, "its forward makes no cu_seqlens by transformers.vision_utils"),
        (Clips, "its metadata of a video is not that of the frames, its segments"),
        (More, "its forward also takes sizes"),
    ],
)
def test_a_refusal_says_why(kind: type[Tower], reason: str) -> None:
    with pytest.raises(fx.UnsupportedTowerError) as caught:
        look_at_grids(kind().eval())
    assert reason in str(caught.value)


def test_values_that_differ_are_not_served() -> None:
    """Images that read one another, which no shape shows."""

    class Mixes(Tower):
        def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states + hidden_states.mean(0), grid_thw, **kwargs)

    tower = Mixes().eval()
    adapter = GridTower(linked_copy(tower))
    with pytest.raises(fx.UnsupportedTowerError, match="each item encoded by itself"):
        check_values(tower, adapter)
    tower = Tower().eval()
    check_values(tower, GridTower(linked_copy(tower)))
