from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import FxSplitError
from fxsplit_encoder.towers import registry
from fxsplit_encoder.towers.base import matters, settle, without_inference_tensors


def test_an_unknown_tower_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        fx.UnsupportedTowerError, match=r"^wrap: no adapter for Linear; expected one of"
    ) as caught:
        fx.wrap(nn.Linear(2, 2))
    assert "torch.compile(module, backend='encoder_cg')" in str(caught.value)
    assert "wrap(module, DenseTowerSpec(...))" in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_a_wrapped_tower_is_not_wrapped_again(tiny_towers: Any) -> None:
    with pytest.raises(fx.UnsupportedTowerError, match="no adapter for Qwen3VLTower"):
        fx.wrap(tiny_towers.wrapped)


def test_a_subclass_of_a_supported_tower_is_supported(tiny_towers: Any) -> None:
    base = type(tiny_towers.reference)

    class Tuned(base):  # type: ignore[misc, valid-type]
        pass

    tuned = Tuned(tiny_towers.reference.config)
    assert fx.wrap(tuned).tower is tuned


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tiny_towers: Any
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "fxsplit_encoder.towers.qwen_vl")
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(fx.MissingExtraError, match=r"of the extra 'hf'; run: pip install ") as caught:
        registry.wrap(tiny_towers.reference)
    assert isinstance(caught.value, FxSplitError)
    assert isinstance(caught.value, ImportError)


# --- which keyword arguments of a tower change what it returns


PIXELS, GRIDS = torch.ones(1), torch.ones(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "changing"),
    [
        ({}, {}),
        ({"return_dict": False, "use_cache": True}, {}),
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
    assert settled == ({"hidden_states": PIXELS}, changing)


def test_inference_tensors_are_copied_and_others_are_not() -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    plain, copied, number = without_inference_tensors((PIXELS, {"a": made}, 3))
    assert plain is PIXELS
    assert not copied["a"].is_inference()
    assert torch.equal(copied["a"], made)
    assert number == 3
