"""Families with a preparation of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from transformers.image_utils import SizeDict

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import share_weights
from fxsplit_encoder.models.kimi import RasterPatches
from fxsplit_encoder.models.load import load_tower
from fxsplit_encoder.models.patches import patchify
from fxsplit_encoder.models.prepare import HALF, ProcessorSettings, load_inputs
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES
from fxsplit_encoder.models.tiles import cut, llama4_grid, llama4_tiles
from fxsplit_encoder.models.views import DeepseekOcrViews, Step3Plan, Step3Views, step3_plan

from .checkpoints import CHECKPOINTS, CPU, STACK, clip, save
from .processors import library, noise


@pytest.mark.parametrize(
    ("size", "side", "grid"),
    [
        ((640, 640), 640, (1, 1)),
        ((1280, 640), 640, (2, 1)),
        ((2000, 2000), 640, (3, 3)),
        ((500, 4000), 640, (1, 8)),
        ((640, 640), 1024, (1, 1)),
        ((1000, 500), 1024, (2, 1)),
    ],
)
def test_large_pages_are_cut(size: tuple[int, int], side: int, grid: tuple[int, int]) -> None:
    tensors = DeepseekOcrViews(1280, side, HALF).image(noise(*size)).tensors
    assert tensors["images_spatial_crop"].tolist() == [[*grid]]
    count = grid[0] * grid[1] if grid != (1, 1) else 0
    assert tensors["images_crop"].shape == (count, 3, side, side)


@pytest.mark.parametrize(
    ("whole", "crop", "crops", "tokens"),
    [
        (512, 512, (0, 0), 8 * 9 + 1),
        (1024, 1024, (0, 0), 16 * 17 + 1),
        (1024, 640, (2, 1), 16 * 17 + 1 + 10 * 21),
        (1280, 1024, (2, 1), 20 * 21 + 1 + 16 * 33),
    ],
)
def test_the_modes_of_deepseek_ocr_are_read(
    whole: int, crop: int, crops: tuple[int, int], tokens: int, tmp_path: Path
) -> None:
    """Of the same page, from what config.json sets beside the encoders."""
    name = "DeepseekOCRForCausalLM"
    settings = {**CHECKPOINTS[name][0], "base_size": whole, "image_size": crop}
    Image.new("RGB", (1000, 500), (255, 255, 255)).save(tmp_path / "page.png")
    preparation = FAMILIES[name].prepare(settings, ProcessorSettings())
    inputs = load_inputs([tmp_path / "page.png"], preparation)
    assert inputs.items[0].layout == {"crops": crops}
    wrapped = FAMILIES[name].wrap(FAMILIES[name].build(settings))
    assert [view.shape[-1] for view in wrapped.views.values()] == [whole, crop]
    (spec,) = wrapped.get_encoder_cudagraph_item_specs(inputs.mm_kwargs)
    assert spec.output_tokens == tokens
    for path, view in wrapped.views.items():
        (tiles,) = wrapped.tiles(inputs.mm_kwargs, path)
        assert tiles.shape[0] * view.tokens == spec.path_output_tokens[path]
    # The upper edge is gray where the page keeps its aspect ratio; a small mode without crops stretches it.
    edge = inputs.mm_kwargs["pixel_values"][0, :, 0]
    assert edge.unique().tolist() == pytest.approx([1.0 if whole == 512 else 127 / 127.5 - 1])


sides = st.integers(1, 4000)

LLAMA4 = library(
    "llama4.image_processing_llama4",
    "get_factors",
    "find_supported_resolutions",
    "get_best_fit",
    "get_max_res_without_distortion",
)


@given(sides, sides, st.sampled_from([4, 16]))
def test_llama4_has_the_librarys_canvas(width: int, height: int, max_tiles: int) -> None:
    tile = SizeDict(height=336, width=336)
    supported = torch.tensor(LLAMA4["find_supported_resolutions"](max_tiles, tile))
    expected = LLAMA4["get_best_fit"]((height, width), supported).tolist()
    columns, rows = llama4_grid(width, height, 336, max_tiles)
    assert [rows * 336, columns * 336] == expected


@pytest.mark.parametrize(
    ("size", "grid", "count", "inside"),
    [
        ((300, 200), (1, 1), 1, (336, 224)),
        ((1344, 336), (4, 1), 5, (1344, 336)),
        ((700, 700), (3, 3), 10, (700, 700)),
        ((5000, 2500), (5, 3), 16, (1680, 840)),
    ],
)
def test_llama4_keeps_the_aspect_ratio_on_black(
    size: tuple[int, int], grid: tuple[int, int], count: int, inside: tuple[int, int]
) -> None:
    white = Image.new("RGB", size, (255, 255, 255))
    tiles = llama4_tiles(white, 336, 16)
    assert (llama4_grid(*size, 336, 16), len(tiles)) == (grid, count)
    assert {tile.size for tile in tiles} == {(336, 336)}
    lit = sum((np.asarray(tile)[..., 0] > 127).sum() for tile in tiles[: grid[0] * grid[1]])
    assert lit == inside[0] * inside[1]


STEP3 = library("step3p7.image_processing_step3p7", "_is_extreme_aspect", "_plan_patches")


@given(sides, sides)
@example(700, 600)
@example(1100, 520)
@example(400, 20)
def test_step3_has_the_librarys_plan(width: int, height: int) -> None:
    class Processor:
        max_image_size = 3024
        _is_extreme_aspect = staticmethod(STEP3["_is_extreme_aspect"].__func__)

    expected = STEP3["_plan_patches"](Processor(), width, height, 728, 504)
    plan = step3_plan(width, height, 728, 504)
    assert plan == Step3Plan(expected[5], expected[0], expected[1], expected[2])
    if max(plan.size) <= 1500:
        assert plan.grid == (expected[3:5] if plan.window else (0, 0))
        made = Step3Views(728, 504, ("crops", "count"), HALF).image(Image.new("RGB", (width, height))).tensors
        assert made["pixel_values"].shape == (1, 3, 728, 728)
        assert made["crops"].shape == (math.prod(plan.grid), 3, 504, 504)


@torch.no_grad()
def test_step3p7_is_loaded_as_the_library_saves_it(tmp_path: Path) -> None:
    """`save_pretrained` writes the published names, with fused projections in the published order."""
    vision, directory = FAMILIES["step3p5_vision"], tmp_path / "checkpoint"
    saved: Any = vision.build({**STACK, "mlp_ratio": 1.5}).requires_grad_(False).eval()
    draw_weights(saved, 0)
    saved.save_pretrained(directory)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert "transformer.resblocks.0.attn.in_proj_weight" in set(file.keys())
    tower = load_tower(directory, torch.float32, CPU)
    expected = dict(saved.named_parameters())
    assert all(torch.equal(parameter, expected[key]) for key, parameter in tower.named_parameters())


def test_tiles_are_cut_row_by_row() -> None:
    image = noise(5, 4)
    pixels = np.asarray(image)
    tiles = [np.asarray(tile) for tile in cut(image, 2, 2)]
    expected = [pixels[y : y + 2, x : x + 2] for y in (0, 2) for x in (0, 2)]
    np.testing.assert_array_equal(tiles, expected)


NAVIT = library("kimi_k25.image_processing_kimi_k25", "navit_resize")


@given(sides, sides, st.sampled_from([64, 4096, 16384]), st.sampled_from([16, 512]))
def test_moonvit_fits_as_the_library_does(height: int, width: int, max_patches: int, max_side: int) -> None:
    expected = NAVIT["navit_resize"](height, width, 14, 2, max_patches, max_side)
    fitted, (_, *padded) = RasterPatches(max_side=max_side).fit(1, width, height, max_patches)
    assert (fitted[::-1], tuple(14 * side for side in padded)) == expected


def test_patches_in_raster_order() -> None:
    frames = [noise(6, 4, seed) for seed in range(2)]
    patches = patchify(frames, (2, 2, 3), 2, HALF).view(12, 3, 2, 2)
    pixels = HALF(frames)
    assert torch.equal(patches[4], pixels[0, :, 2:4, 2:4])
    assert torch.equal(patches[6], pixels[1, :, :2, :2])


@torch.no_grad()
def test_kimi_k25_is_loaded_under_its_published_names(tmp_path: Path) -> None:
    published = {
        r"layers.0.norm1.": "blocks.0.norm0.",
        r"layers.0.norm2.": "blocks.0.norm1.",
        r"layers.0.mlp.fc1.": "blocks.0.mlp.fc0.",
        r"layers.0.mlp.fc2.": "blocks.0.mlp.fc1.",
        r"layers.0.attn.proj.": "blocks.0.wo.",
        "final_layernorm.": "final_layernorm.",
    }
    saved = FAMILIES["kimi_k25"].build({"vision_config": STACK}).requires_grad_(False)
    draw_weights(saved, 0)
    own = dict(saved.named_parameters())
    tensors: dict[str, torch.Tensor] = {}
    for key, value in own.items():
        for new, old in published.items():
            if key.startswith(new):
                tensors[f"vision_tower.encoder.{key.replace(new, old)}"] = value.clone()
    for kind in ("weight", "bias"):
        heads = [own[f"layers.0.attn.{part}_proj.{kind}"] for part in ("q", "k", "v")]
        # Of each head the tower has even channels first, the checkpoint pairs of neighbors.
        order = torch.arange(16).view(2, 2, 4).transpose(1, 2).flatten()
        fused = torch.cat([heads[0][order], heads[1][order], heads[2]])
        tensors[f"vision_tower.encoder.blocks.0.wqkv.{kind}"] = fused
        tensors[f"vision_tower.patch_embed.proj.{kind}"] = own[f"patch_embed.proj.{kind}"].clone()
    tensors["vision_tower.patch_embed.pos_emb.weight"] = own[
        "patch_embed.pos_emb.position_embeddings"
    ].clone()
    tensors["mm_projector.proj.0.weight"] = torch.zeros(2)
    _, directory = save(tmp_path / "checkpoint", "kimi_k25", tensors)
    tower = load_tower(directory, torch.float32, CPU)
    assert all(torch.equal(parameter, own[key]) for key, parameter in tower.named_parameters())


@torch.no_grad()
def test_a_clip_is_cut_for_kimi_k25(photograph: Path, tmp_path: Path) -> None:
    family = FAMILIES["kimi_k25"]
    preparation = family.prepare({"vision_config": STACK}, ProcessorSettings())
    inputs = load_inputs([clip(tmp_path / "clip.webp", 6), photograph], preparation)
    assert [(item.key, item.frames) for item in inputs.items] == [
        ("photo.png", 0),
        ("clip.webp[1]", 4),
        ("clip.webp[2]", 2),
    ]
    assert inputs.mm_kwargs["video_grid_thw"].tolist() == [[4, 6, 4], [2, 6, 4]]
    tower = family.build({"vision_config": STACK}).requires_grad_(False).eval()
    draw_weights(tower, 0)
    wrapped = family.wrap(share_weights(tower))
    ours = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(enabled=False)).execute(inputs.mm_kwargs)
    for item, own in zip(ours, family.eager_tower(tower)(inputs.mm_kwargs), strict=True):
        torch.testing.assert_close(item, own, rtol=1e-4, atol=1e-4)
