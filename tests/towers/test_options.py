"""Which keyword arguments of a tower change what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.towers.base import matters, settle, without_inference_tensors

PIXELS, GRIDS = torch.ones(1), torch.ones(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "changing"),
    [
        ({}, {}),
        ({"return_dict": True, "use_cache": True}, {}),
        ({"return_dict": None, "use_cache": False, "logits_to_keep": 1}, {}),
        ({"output_attentions": False, "output_hidden_states": None, "interpolate_pos_encoding": False}, {}),
        ({"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}, {}),
        ({"output_attentions": True, "use_cache": True}, {"output_attentions": True}),
        ({"interpolate_pos_encoding": True}, {"interpolate_pos_encoding": True}),
        ({"cu_seqlens": GRIDS}, {"cu_seqlens": GRIDS}),
        ({"unknown": False}, {"unknown": False}),
    ],
)
def test_options_that_change_the_result_are_told_apart(
    options: dict[str, Any], changing: dict[str, Any]
) -> None:
    settled = settle({"hidden_states": PIXELS, **options}, ("hidden_states", "grid_thw"), matters)
    assert settled.kept == {"hidden_states": PIXELS}
    assert settled.changing == changing
    assert settled.returns_dict


def test_a_tuple_is_asked_for_by_return_dict() -> None:
    assert not settle({"return_dict": False}, (), matters).returns_dict
    assert settle({"return_dict": False}, (), matters).changing == {}


def test_inference_tensors_are_copied_and_others_are_not() -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    plain, copied, number = without_inference_tensors((PIXELS, {"a": made}, 3))
    assert plain is PIXELS
    assert not copied["a"].is_inference()
    assert torch.equal(copied["a"], made)
    assert number == 3
