"""DeepSeek-OCR: images against tiles one by one, its sizes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.encoders.deepseek_encoder import (
    ClipConfig,
    DeepseekOcrConfig,
    DeepseekOcrVisionModel,
    SamConfig,
)

from .deepseek_ocr_reference import CONFIG, eager, make_inputs, make_model
from .dense_models import assert_close, encoded

# Of both: some 2e-5 from float64 where a page has 4096 patches.
CLOSE = 1e-4


@pytest.mark.parametrize("crops", [[(0, 0)], [(0, 0), (2, 2), (1, 2)], [(3, 3), (0, 0)]], ids=str)
def test_vllm_42224_vllm_46034_images_equal_the_reference(crops: Any) -> None:
    model, inputs = make_model(), make_inputs(crops)
    assert_close(encoded(fx.wrap(model), inputs), eager(model, inputs), CLOSE)


@pytest.mark.slow
@torch.no_grad()
def test_relative_positions_may_be_features_of_queries_and_keys() -> None:
    """Of crops; the whole image's own forward is captured, untraced."""
    model, inputs = make_model(), make_inputs([(2, 2), (0, 0)])
    wrapped = fx.wrap(model)
    budgets = {path: {"token_budgets": [4 * view.tokens]} for path, view in wrapped.views.items()}
    config = fx.EncoderConfig(
        mode="full",
        passes=("decomposed_bias",),
        paths={**budgets, "global": {**budgets["global"], "mode": "breakable"}},
        max_items_per_batch=4,
    )
    manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    manager.capture()
    assert_close(manager.execute(inputs), eager(model, inputs), CLOSE)
    assert manager.stats().hits == 2
    bound = manager.programs["local"]
    assert bound is not None
    assert bound.program.pass_report == {"decomposed_bias": CONFIG.sam.num_layers}
    assert bound.program.padding.proved


# --- sizes


PUBLISHED_MODES = [
    (1024, 640, 272, 100),
    (512, 512, 72, 64),
    (640, 640, 110, 100),
    (1280, 1280, 420, 400),
    (1280, 1024, 420, 256),
]
"""Pixels of a whole image and of a crop, and the rows of each."""


def narrow_config(base_size: int, image_size: int) -> DeepseekOcrConfig:
    """A model of the published patches and windows."""
    sam = SamConfig(
        hidden_size=8,
        num_layers=2,
        num_heads=1,
        mlp_size=8,
        global_layers=(1,),
        neck_channels=4,
        downsample_channels=(4, 8),
    )
    clip = ClipConfig(hidden_size=8, num_layers=1, num_heads=1, mlp_size=8)
    return DeepseekOcrConfig(
        base_size=base_size, image_size=image_size, out_hidden_size=4, sam=sam, clip=clip
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_size", "image_size", "whole", "crop"),
    [
        pytest.param(*mode, marks=pytest.mark.exhaustive if mode[0] == 1280 else ())
        for mode in PUBLISHED_MODES
    ],
)
@torch.no_grad()
def test_published_modes_encode_images_of_their_own_sizes(
    base_size: int, image_size: int, whole: int, crop: int
) -> None:
    config = narrow_config(base_size, image_size)
    small, large = encoded(fx.wrap(make_model(config)), make_inputs([(0, 0), (2, 1)], 0, config))
    side = round(crop**0.5)
    assert (small.shape, large.shape) == ((whole + 1, 4), (whole + 1 + 2 * crop + side, 4))
    assert small.isfinite().all()
    assert large.isfinite().all()
    assert large.std() > 0.05


@pytest.mark.parametrize(("base_size", "image_size", "whole", "crop"), PUBLISHED_MODES)
def test_tokens_of_the_published_modes(base_size: int, image_size: int, whole: int, crop: int) -> None:
    with torch.device("meta"):
        model = DeepseekOcrVisionModel(DeepseekOcrConfig(base_size=base_size, image_size=image_size))
    wrapped = fx.wrap(model)
    assert {path: view.tokens for path, view in wrapped.views.items()} == {"global": whole, "local": crop}
    assert wrapped.get_encoder_cudagraph_budget_range(None) == (whole, 8 * whole)
    assert wrapped.get_encoder_cudagraph_config().out_hidden_size == 1280


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="image_size: expected a positive multiple of 64 pixels; got 600"):
        DeepseekOcrVisionModel(DeepseekOcrConfig(image_size=600))
    with pytest.raises(InputError, match="SAM's features have 1024 channels; CLIP takes 768"):
        DeepseekOcrVisionModel(DeepseekOcrConfig(clip=ClipConfig(hidden_size=768)))
    with pytest.raises(InputError, match="a size of 64 or 48; got"):
        make_model()(torch.zeros(1, 3, 32, 32))
    wrapped = fx.wrap(make_model())
    with pytest.raises(
        InputError, match="images_spatial_crop: expected 2 non-negative integers for each image"
    ):
        wrapped.get_encoder_cudagraph_item_specs({"images_spatial_crop": [[1, 1], [2]]})


def test_crops_that_only_fill_a_place_are_ignored() -> None:
    """Of an image alone, and of images beside one with crops: as a tensor for each image, or all in one."""
    manager = fx.EncoderCudaGraphManager(fx.wrap(make_model()), fx.EncoderConfig(mode="none"))
    alone, crops = make_inputs([(0, 0)], 0), make_inputs([(2, 1)], 1)
    (expected,), (with_crops,) = manager.execute(alone), manager.execute(crops)
    pages = torch.cat([alone["pixel_values"], crops["pixel_values"], alone["pixel_values"]])
    own, side = crops["images_crop"], CONFIG.image_size
    fillers = [torch.zeros(1, 3, side, side), torch.zeros(1, 3, 96, 96), torch.zeros(0), None]
    for filler in fillers:
        (item,) = manager.execute({**alone, "images_crop": filler})
        assert torch.equal(item, expected)
    joined = torch.cat([fillers[0], own, fillers[0]])
    for given in (joined, own, *([first, own, last] for first in fillers for last in fillers)):
        for none in ([0, 0], [1, 1]):
            grids = [none, [2, 1], none]
            batch = {"pixel_values": pages, "images_crop": given, "images_spatial_crop": grids}
            got = manager.execute(batch)
            torch.testing.assert_close(got, [expected, with_crops, expected], rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", [(1, 3), (4, 2), (1,), (4,)])
def test_crops_of_images_without_any_are_refused(given: tuple[int, ...]) -> None:
    inputs = make_inputs([(0, 0), (2, 1)], 0)
    crops = [torch.ones(count, *inputs["images_crop"].shape[1:]) for count in given]
    wrapped = fx.wrap(make_model())
    with pytest.raises(InputError, match=r"images_crop: expected \(2, 3, .* for 2 images; got \("):
        wrapped.get_encoder_cudagraph_item_specs({**inputs, "images_crop": crops})


# --- another dtype


@torch.no_grad()
def test_bfloat16_after_a_forward_in_float32() -> None:
    """The folded tables follow the parameters' dtype."""
    model = make_model()
    tiles = torch.randn(2, 3, 48, 48)
    exact = model(tiles)
    got = model.to(torch.bfloat16)(tiles.bfloat16())
    assert got.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(got.float(), exact, dim=-1).min() > 0.99
