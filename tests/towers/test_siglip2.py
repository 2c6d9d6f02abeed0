"""SigLIP 2's positions: of images of any shape, and of the table as it is at each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.towers.dense import Siglip2Tower, siglip2_tiles

SIDE, PATCHES = 4, 300
# Of one column torch resizes wrongly on a CPU.
SHAPES = [(4, 4), (1, 300), (100, 3), (2, 3), (1, 2), (14, 21), (5, 7)]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
    "num_patches": SIDE**2,
}
CONFIG = fx.EncoderConfig(piece_compiler="eager", exact_min_hits=1, mode="full", token_budgets=(42,))


def make(seed: int, **sizes: int) -> Any:
    torch.manual_seed(seed)
    tower = Siglip2VisionModel(Siglip2VisionConfig(**SIZES | sizes)).eval().requires_grad_(False)
    tower.embeddings.position_embedding.weight.normal_()
    return tower


def batch(patches: int = 20) -> dict[str, Tensor]:
    mask = torch.zeros(2, patches, dtype=torch.int64)
    mask[0, :12], mask[1, :20] = 1, 1
    pixels = torch.randn(2, patches, 12, generator=torch.Generator().manual_seed(0))
    shapes = torch.tensor([[3, 4], [2, 10]])
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_positions_are_the_towers_own(dtype: torch.dtype) -> None:
    """Of a tower without blocks, whose features are its embeddings, normalized."""
    inner = make(0, num_hidden_layers=0).to(dtype)
    pixels = torch.randn(len(SHAPES), PATCHES, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = torch.zeros(len(SHAPES), PATCHES, dtype=torch.int64)
    for row, (height, width) in zip(mask, SHAPES, strict=True):
        row[: height * width] = 1
    expected = inner(pixels, mask, torch.tensor(SHAPES)).last_hidden_state
    tower = Siglip2Tower(inner, PATCHES)
    features = tower.features(siglip2_tiles(pixels, mask, SHAPES, pixels))[:, :PATCHES]
    # Of 16 bits some last ones differ before the norm.
    bits = torch.finfo(dtype).eps
    torch.testing.assert_close(
        features[mask.bool()], expected[mask.bool()], rtol=2 * bits, atol=max(1e-5, bits / 4)
    )
    assert bool(tower.features(torch.zeros(1, *tower.first_view.shape, dtype=dtype)).isfinite().all())


@pytest.mark.slow
@torch.inference_mode()
def test_new_weights_are_those_of_the_next_call(fresh_dynamo: None) -> None:
    tower, inputs = make(0), batch()
    fx.accelerate(tower, CONFIG)
    for seed in (0, 1, 2):
        reference = make(seed)
        for own, other in zip(tower.parameters(), reference.parameters(), strict=True):
            own.data.copy_(other)  # which leaves no version
        output, expected = tower(**inputs), reference(**inputs)
        mask = inputs["pixel_attention_mask"].bool()
        torch.testing.assert_close(
            output.last_hidden_state[mask], expected.last_hidden_state[mask], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(output.pooler_output, expected.pooler_output, rtol=1e-4, atol=1e-5)
    assert fx.stats(tower).misses == {}
