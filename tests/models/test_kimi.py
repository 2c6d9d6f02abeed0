from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.models.checkpoint import rename, split_fused
from fxsplit_encoder.models.eager import share_weights
from fxsplit_encoder.models.kimi import K25_NAMES, padded_size, patchify_raster
from fxsplit_encoder.models.load import load_tower
from fxsplit_encoder.models.prepare import ProcessorSettings, load_inputs
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES

from .checkpoints import CPU, STACK, clip, save
from .processors import library

sides = st.integers(1, 4000)

NAVIT = library("kimi_k25.image_processing_kimi_k25", "navit_resize")


@given(sides, sides, st.sampled_from([64, 4096, 16384]), st.sampled_from([16, 512]))
def test_moonvit_fits_as_the_library_does(height: int, width: int, max_patches: int, max_side: int) -> None:
    expected = NAVIT["navit_resize"](height, width, 14, 2, max_patches, max_side)
    assert padded_size(height, width, 14, 2, max_patches, max_side) == expected


def test_patches_in_raster_order() -> None:
    frames = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6)
    patches = patchify_raster(frames, 2)
    assert patches.shape == (12, 3, 2, 2)
    np.testing.assert_array_equal(patches[4], frames[0, :, 2:4, 2:4])
    np.testing.assert_array_equal(patches[6], frames[1, :, :2, :2])


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


def test_names_of_the_tower_itself_stay() -> None:
    for name in ("layers.3.attn.q_proj.weight", "final_layernorm.bias", "layers.0.norm1.weight"):
        assert rename(name, K25_NAMES) == name
    tensors = {"layers.0.attn.q_proj.weight": torch.zeros(2)}
    assert split_fused(tensors, 2).keys() == tensors.keys()


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
