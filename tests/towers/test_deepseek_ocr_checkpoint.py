"""DeepSeek-OCR's checkpoint by its own names, and the model library's tower with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.models.encoders.deepseek_encoder import DeepseekOcrConfig, DeepseekOcrVisionModel

from .deepseek_ocr_reference import CONFIG, make_model
from .tiny_views import deepseek_ocr_config
from .token_counts import TOKEN, prompts_of


def checkpoint_names(config: DeepseekOcrConfig) -> set[str]:
    """What the published checkpoint holds beside the language model."""
    both, blocks, layers = ("weight", "bias"), range(config.sam.num_layers), range(config.clip.num_layers)
    sam = {
        "pos_embed",
        *(f"patch_embed.proj.{p}" for p in both),
        *(f"neck.{n}" for n in ("0.weight", "1.weight", "1.bias", "2.weight", "3.weight", "3.bias")),
        "net_2.weight",
        "net_3.weight",
        *(
            f"blocks.{b}.{name}.{p}"
            for b in blocks
            for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2")
            for p in both
        ),
        *(f"blocks.{b}.attn.rel_pos_{axis}" for b in blocks for axis in "hw"),
    }
    clip = {
        "embeddings.class_embedding",
        "embeddings.patch_embedding.weight",
        "embeddings.position_embedding.weight",
        *(f"pre_layrnorm.{p}" for p in both),
        *(
            f"transformer.layers.{n}.{name}.{p}"
            for n in layers
            for name in (
                "layer_norm1",
                "layer_norm2",
                "self_attn.qkv_proj",
                "self_attn.out_proj",
                "mlp.fc1",
                "mlp.fc2",
            )
            for p in both
        ),
    }
    return {
        *(f"model.sam_model.{name}" for name in sam),
        *(f"model.vision_model.{name}" for name in clip),
        *(f"model.projector.layers.{p}" for p in both),
        "model.image_newline",
        "model.view_seperator",
    }


@torch.no_grad()
def test_a_checkpoint_loads_by_its_own_names(tmp_path: Path) -> None:
    model = make_model()
    names = checkpoint_names(CONFIG)
    tensors = {name: model.get_parameter(name.removeprefix("model.")).clone() for name in names}
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = DeepseekOcrVisionModel(CONFIG)
    found = load_file(tmp_path / "model.safetensors")
    loaded.load_state_dict({name.removeprefix("model."): found[name] for name in names})
    tiles = torch.randn(1, 3, 48, 48)
    assert torch.equal(loaded(tiles), model(tiles))


def test_the_names_are_all_there_and_the_published_model_has_400_million_parameters() -> None:
    with torch.device("meta"):
        model = DeepseekOcrVisionModel()
    assert {f"model.{name}" for name in model.state_dict()} == checkpoint_names(DeepseekOcrConfig())
    counts = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    assert counts == {"sam_model": 95_569_152, "vision_model": 303_177_728, "projector": 2_622_720}


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
                "num_hidden_layers": sam.num_layers,
                "num_attention_heads": sam.num_heads,
                "mlp_dim": sam.mlp_size,
                "window_size": sam.window_size,
                "global_attn_indexes": sam.global_layers,
                "output_channels": sam.neck_channels,
                "downsample_channels": sam.downsample_channels,
            },
            encoder_config={
                "image_size": clip.image_size,
                "patch_size": clip.patch_size,
                "hidden_size": clip.hidden_size,
                "num_hidden_layers": clip.num_layers,
                "num_attention_heads": clip.num_heads,
                "intermediate_size": clip.mlp_size,
            },
        )
    ).train(False)
    model = make_model(deepseek_ocr_config(base_size=sizes[0], image_size=sizes[1]))
    library.load_state_dict(library_names(model.state_dict()))
    for size in sizes:
        tiles = torch.randn(2, 3, size, size)
        expected = model.projector(library(tiles).last_hidden_state)
        torch.testing.assert_close(model(tiles), expected, rtol=0, atol=1e-5)


def test_the_model_librarys_prompt_has_a_token_for_every_row() -> None:
    processing = pytest.importorskip("transformers.models.unlimited_ocr.processing_unlimited_ocr")
    sizes = SimpleNamespace(size={"height": 1024, "width": 1024}, tile_size=640)
    prompts = prompts_of(
        processing.UnlimitedOcrProcessor, image_processor=sizes, patch_size=16, downsample_ratio=4
    )
    grids = [(1, 1), (2, 1), (1, 2), (3, 2)]
    counts = [columns * rows if columns * rows > 1 else 0 for columns, rows in grids]
    given = {"patches_grid": grids, "num_local_patches": counts}
    with torch.device("meta"):
        wrapped = fx.wrap(DeepseekOcrVisionModel())
    specs = wrapped.get_encoder_cudagraph_item_specs({"images_spatial_crop": grids})
    tokens = [prompts.replace_image_token(given, i).count(TOKEN) for i in range(len(grids))]
    assert [spec.output_tokens for spec in specs] == tokens


def library_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the model library's tower, queries, keys and values apart."""
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
