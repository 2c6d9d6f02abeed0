"""Every family from a checkpoint and an image file to embeddings, at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.checkpoint_names import KIMI_K25, rename, split_fused
from fxsplit_encoder.models.eager import EagerTower, as_tensors, share_weights
from fxsplit_encoder.models.families import FAMILIES
from fxsplit_encoder.models.inputs import load_inputs
from fxsplit_encoder.models.load import draw_weights, load_tower, read_family
from fxsplit_encoder.models.preparation import ProcessorSettings

CPU = torch.device("cpu")
STACK = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
GRID = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48}
TILE = {**STACK, "image_size": 28, "patch_size": 14}
TEXT = {"text_config": {"hidden_size": 12}}
SAM = {"layers": 1, "heads": 1, "width": 16, "global_attn_indexes": [0], "downsample_channels": [16, 32]}
CLIP = {"layers": 1, "heads": 2, "width": 32}

# What config.json holds, the prefix of the tower's tensors, and the tokens of the photograph.
CHECKPOINTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "qwen2_vl": (
        {"vision_config": {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 20}},
        "visual.",
        15,
    ),
    "qwen2_5_vl": ({"vision_config": {**GRID, "out_hidden_size": 20}}, "model.visual.", 15),
    "qwen3_5": ({"vision_config": {**GRID, "out_hidden_size": 20}}, "model.visual.", 12),
    "glm4v": ({"vision_config": {**GRID, "out_hidden_size": 20, "image_size": 56}}, "model.visual.", 15),
    "kimi_vl": ({"vision_config": STACK, **TEXT}, "", 15),
    "kimi_k25": ({"vision_config": STACK}, "model.vision_tower.", 15),
    "internvl": ({"vision_config": {**TILE, "image_size": [28, 28], "patch_size": [14, 14]}, **TEXT}, "", 7),
    "llama4": (
        {
            "vision_config": {
                **TILE,
                "intermediate_size": 64,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            **TEXT,
        },
        "",
        16,
    ),
    "step3_vl": ({"vision_config": {**STACK, "output_hidden_size": 8}, **TEXT}, "model.", 331),
    "step3p7": ({"vision_config": {**STACK, "mlp_ratio": 1.5}, **TEXT}, "model.", 331),
    "DeepseekOCRForCausalLM": (
        {
            "model_type": "deepseek_vl_v2",
            "architectures": ["DeepseekOCRForCausalLM"],
            "vision_config": {"width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM}},
            "projector_config": {"n_embed": 12},
        },
        "model.",
        273,
    ),
    "siglip": ({"vision_config": TILE}, "vision_model.", 4),
    "clip_vision_model": ({"vision_config": TILE}, "vision_model.", 4),
    "dinov2": ({**STACK, "image_size": 28, "patch_size": 14}, "", 4),
}


def save(directory: Path, name: str, tensors: dict[str, torch.Tensor] | None = None) -> tuple[Any, Path]:
    """A tower with random weights, and a checkpoint of it beside tensors of another module."""
    settings, prefix, _ = CHECKPOINTS[name]
    settings = {"model_type": name, **settings}
    tower = FAMILIES[name].build(settings).requires_grad_(False).eval()
    draw_weights(tower, 0)
    own = {f"{prefix}{key}": value.clone() for key, value in tower.named_parameters()}
    language = {} if name == "dinov2" else {"model.layers.0.mlp.weight": torch.zeros(2)}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({**own, **language} if tensors is None else tensors, directory / "model.safetensors")
    return tower, directory


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (84, 130, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_from_a_checkpoint_and_a_file_to_embeddings(name: str, photograph: Path, tmp_path: Path) -> None:
    saved, directory = save(tmp_path / "checkpoint", name)
    family, settings = read_family(Checkpoint.locate(directory))
    tower = load_tower(directory, torch.float32, CPU)
    expected = dict(saved.named_parameters())
    assert all(torch.equal(parameter, expected[key]) for key, parameter in tower.named_parameters())
    assert not tower.training and not any(p.requires_grad for p in tower.parameters())
    inputs = load_inputs([photograph, photograph], family.prepare(settings, ProcessorSettings()))
    wrapped = family.wrap(share_weights(tower))
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(enabled=False))
    ours = manager.execute(inputs.mm_kwargs)
    eager = EagerTower(saved, family.eager, family.wrap)
    for item, own in zip(ours, eager(inputs.mm_kwargs), strict=True):
        assert item.shape == (CHECKPOINTS[name][2], wrapped.out_hidden_size)
        assert item.std() > 0
        torch.testing.assert_close(item, own, rtol=0, atol=1e-4 * float(own.abs().max()))
    alone = eager(as_tensors(eager.adapter.select_encoder_cudagraph_items(inputs.mm_kwargs, [1])))
    torch.testing.assert_close(alone[0], ours[1], rtol=0, atol=1e-4 * float(ours[1].abs().max()))


def test_every_family_has_a_checkpoint_here() -> None:
    tested = {id(FAMILIES[name]) for name in CHECKPOINTS}
    bare = {"llama4_vision_model", "step3p5_vision"}
    untested = {name for name, family in FAMILIES.items() if id(family) not in tested}
    assert untested - bare == {name for name in FAMILIES if name.startswith("qwen3_vl")}


@torch.no_grad()
def test_step3p7_is_loaded_as_the_library_saves_it(tmp_path: Path) -> None:
    """`save_pretrained` writes the published names, with fused projections in the published order."""
    vision, directory = FAMILIES["step3p5_vision"], tmp_path / "checkpoint"
    saved: Any = vision.build({**STACK, "mlp_ratio": 1.5}).requires_grad_(False).eval()
    draw_weights(saved, 0)
    saved.save_pretrained(directory)
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert "transformer.resblocks.0.attn.in_proj_weight" in set(file.keys())
    tower = load_tower(directory, torch.float32, CPU)
    expected = dict(saved.named_parameters())
    assert all(torch.equal(parameter, expected[key]) for key, parameter in tower.named_parameters())


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
        # Of each head the tower has even channels first, the checkpoint pairs of neighbours.
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


def test_names_of_the_tower_itself_stay() -> None:
    for name in ("layers.3.attn.q_proj.weight", "final_layernorm.bias", "layers.0.norm1.weight"):
        assert rename(name, KIMI_K25) == name
    tensors = {"layers.0.attn.q_proj.weight": torch.zeros(2)}
    assert split_fused(tensors, 2).keys() == tensors.keys()


def test_what_is_beside_the_tower_is_not_read_and_what_is_missing_is_named(tmp_path: Path) -> None:
    tower, directory = save(tmp_path / "checkpoint", "DeepseekOCRForCausalLM")
    tensors = {f"model.{key}": value.clone() for key, value in tower.named_parameters()}
    del tensors["model.image_newline"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError, match="1 tensors missing: image_newline"):
        load_tower(directory, torch.float32, CPU)


def clip(path: Path, frames: int) -> Path:
    images = [Image.effect_noise((56, 84), 60).convert("RGB") for _ in range(frames)]
    images[0].save(path, save_all=True, append_images=images[1:], lossless=True)
    return path


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
    for item, own in zip(ours, EagerTower(tower, family.eager, family.wrap)(inputs.mm_kwargs), strict=True):
        torch.testing.assert_close(item, own, rtol=1e-4, atol=1e-4)


def test_a_frame_is_a_tile_for_internvl(tmp_path: Path) -> None:
    preparation = FAMILIES["internvl"].prepare({"model_type": "internvl"}, ProcessorSettings())
    inputs = load_inputs([clip(tmp_path / "clip.webp", 3)], preparation)
    assert inputs.mm_kwargs["pixel_values_videos"].shape == (3, 3, 448, 448)
    assert inputs.mm_kwargs["video_num_patches"].tolist() == [3]
    assert inputs.items[0].layout == {"tiles": 3}


def test_models_of_images_refuse_clips(tmp_path: Path) -> None:
    path = clip(tmp_path / "clip.webp", 2)
    for name in ("llama4", "kimi_vl", "siglip"):
        preparation = FAMILIES[name].prepare({}, ProcessorSettings())
        with pytest.raises(InputError, match=r"clip\.webp: it is a clip, and this model takes images only"):
            load_inputs([path], preparation)


@pytest.mark.parametrize(
    ("name", "size", "layout", "short"),
    [
        ("internvl", (1344, 896), {"tiles": 7}, "7"),
        ("internvl", (300, 300), {"tiles": 1}, "1"),
        ("llama4", (900, 440), {"tiles": 7}, "7"),
        ("DeepseekOCRForCausalLM", (1280, 640), {"crops": (2, 1)}, "1+2"),
        ("DeepseekOCRForCausalLM", (640, 300), {"crops": (0, 0)}, "1"),
        ("step3p7", (1100, 520), {"crops": (2, 1)}, "1+2"),
        ("clip", (500, 300), {"tiles": 1}, "1"),
    ],
)
def test_how_an_image_is_cut_is_told(
    name: str, size: tuple[int, int], layout: dict[str, Any], short: str
) -> None:
    settings = {"vision_config": {"image_size": 336}} if name == "llama4" else {}
    prepared = FAMILIES[name].prepare(settings, ProcessorSettings()).image(Image.new("RGB", size))
    assert (prepared.layout, prepared.size) == (layout, short)


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
    # The upper edge is grey where the page keeps its aspect ratio; a small mode without crops stretches it.
    edge = inputs.mm_kwargs["pixel_values"][0, :, 0]
    assert edge.unique().tolist() == pytest.approx([1.0 if whole == 512 else 127 / 127.5 - 1])


def test_a_processors_statistics_are_used() -> None:
    own = ProcessorSettings({"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]})
    white = Image.new("RGB", (336, 336), (255, 255, 255))
    for name in ("internvl", "llama4", "siglip", "clip", "dinov2", "DeepseekOCRForCausalLM", "step3_vl"):
        pixels = FAMILIES[name].prepare({}, own).image(white).tensors["pixel_values"]
        assert pixels.max().item() == pytest.approx(1.0)
