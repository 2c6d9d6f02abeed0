"""DeepSeek-OCR: images tile by tile, sizes, refusals, its checkpoint, and the model library's tower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.encoders.deepseek_encoder import (
    ClipConfig,
    DeepseekOcrConfig,
    DeepseekOcrVisionModel,
)

from .dense_models import assert_close, encoded
from .random_weights import randomize
from .tiny_inputs import items
from .tiny_towers import tiny
from .tiny_views import deepseek_ocr_config

CONFIG = deepseek_ocr_config()


def make_model(config: DeepseekOcrConfig = CONFIG, seed: int = 5) -> DeepseekOcrVisionModel:
    model = randomize(DeepseekOcrVisionModel(config), seed)
    assert isinstance(model, DeepseekOcrVisionModel)
    return model


def make_inputs(
    crops: list[tuple[int, int]], seed: int = 0, config: DeepseekOcrConfig = CONFIG
) -> dict[str, Any]:
    """Of pages with so many columns and rows of crops."""
    known = tiny("DeepseekOcrVisionModel").inputs
    sizes = {"whole_size": config.base_size, "crop_size": config.image_size}
    return replace(known, **sizes).make(items("image", crops, seed))  # type: ignore[type-var, no-any-return]


def assemble(whole: Tensor, crops: Tensor, columns: int, newline: Tensor, separator: Tensor) -> Tensor:
    """An image's embedding, line by line, from (side, side, hidden) features; the crops come row by row."""
    rows = []
    for first in range(0, len(crops), columns or 1):
        for line in range(crops.shape[1]):
            rows += [*(crop[line] for crop in crops[first : first + columns]), newline[None]]
    for line in whole:
        rows += [line, newline[None]]
    return torch.cat([*rows, separator[None]])


@torch.no_grad()
def eager(model: DeepseekOcrVisionModel, inputs: dict[str, Any]) -> list[Tensor]:
    """Every image through the model, tile by tile."""
    crops = list(inputs["images_crop"])
    found = []
    for image, (columns, rows) in zip(
        inputs["pixel_values"], torch.as_tensor(inputs["images_spatial_crop"]).tolist(), strict=True
    ):
        count = columns * rows if columns * rows > 1 else 0
        own, crops = crops[:count], crops[count:]
        parts = [model(tile[None])[0] for tile in [image, *own]]
        whole, *tiles = (part.unflatten(0, (math.isqrt(part.shape[0]),) * 2) for part in parts)
        tiles_NHWC = torch.stack(tiles) if tiles else whole[:0, None]
        found.append(assemble(whole, tiles_NHWC, columns, model.image_newline, model.view_seperator))
    return found


# Of both: some 2e-5 from float64 where a page has 4096 patches.
CLOSE = 1e-4


@pytest.mark.parametrize("crops", [[(0, 0)], [(0, 0), (2, 2), (1, 2)], [(3, 3), (0, 0)]], ids=str)
def test_vllm_42224_vllm_46034_images_equal_the_reference(crops: Any) -> None:
    model, inputs = make_model(), make_inputs(crops)
    assert_close(encoded(fx.wrap(model), inputs), eager(model, inputs), CLOSE)


# --- sizes


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


# --- the model library's own tower


@pytest.mark.parametrize("sizes", [(64, 48), (80, 32)])
@torch.no_grad()
def test_the_model_librarys_tower_computes_the_same(sizes: tuple[int, int]) -> None:
    """baidu/Unlimited-OCR has DeepSeek-OCR's encoder; transformers has it from 5.23 on. Tiles are smaller
    than those whose positions are stored, of their size and larger, as 512, 640, 1024 and 1280 are.
    """
    modeling = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    configuration = pytest.importorskip("transformers.models.unlimited_ocr.configuration_unlimited_ocr")
    sam, clip = CONFIG.sam, CONFIG.clip
    library = modeling.UnlimitedOcrVisionModel(
        configuration.UnlimitedOcrVisionConfig(
            sam_config={
                "image_size": sam.image_size,
                "patch_size": sam.patch_size,
                "hidden_size": sam.hidden_size,
                "num_hidden_layers": sam.num_hidden_layers,
                "num_attention_heads": sam.num_attention_heads,
                "mlp_dim": sam.intermediate_size,
                "window_size": sam.window_size,
                "global_attn_indexes": sam.global_layers,
                "output_channels": sam.neck_channels,
                "downsample_channels": sam.downsample_channels,
            },
            encoder_config=asdict(clip),
        )
    ).train(False)
    model = make_model(deepseek_ocr_config(base_size=sizes[0], image_size=sizes[1]))
    library.load_state_dict(library_names(model.state_dict()))
    for size in sizes:
        tiles = torch.randn(2, 3, size, size)
        expected = model.projector(library(tiles).last_hidden_state)
        torch.testing.assert_close(model(tiles), expected, rtol=0, atol=1e-5)


def library_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, whose names are the published checkpoint's, under those of the model library's tower."""
    renamed = {
        "sam_model.blocks.": "sam_encoder.layers.",
        ".norm1.": ".layer_norm1.",
        ".norm2.": ".layer_norm2.",
        "patch_embed.proj.": "patch_embed.projection.",
        "neck.0.": "neck.conv1.",
        "neck.1.": "neck.layer_norm1.",
        "neck.2.": "neck.conv2.",
        "neck.3.": "neck.layer_norm2.",
        "net_2.": "proj.conv1.",
        "net_3.": "proj.conv2.",
        "sam_model.": "sam_encoder.",
        "vision_model.transformer.": "vision_encoder.encoder.",
        "vision_model.": "vision_encoder.",
    }
    result = {}
    for name, tensor in tensors.items():
        if not name.startswith(("sam_model", "vision_model")) or "patch_embedding" in name:
            continue
        new = name
        for old, replacement in renamed.items():
            new = new.replace(old, replacement)
        if "qkv_proj" in new:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                result[new.replace("qkv_proj", f"{part}_proj")] = piece
        else:
            result[new] = tensor
    return result
