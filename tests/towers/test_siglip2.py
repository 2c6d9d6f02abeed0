"""SigLIP 2's positions: of images of any shape, and of the table as it is at each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.towers.siglip2 import Siglip2Tower

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
CONFIG = fx.EncoderConfig(piece_compiler="eager", exact_min_hits=1)


def make(seed: int, mode: Callable[[], Any] = contextlib.nullcontext) -> Any:
    with mode():
        torch.manual_seed(seed)
        tower = Siglip2VisionModel(Siglip2VisionConfig(**SIZES)).eval().requires_grad_(False)
        tower.embeddings.position_embedding.weight.normal_()
        return tower


def batch(patches: int = 20) -> dict[str, Tensor]:
    mask = torch.zeros(2, patches, dtype=torch.int64)
    mask[0, :12], mask[1, :20] = 1, 1
    pixels = torch.randn(2, patches, 12, generator=torch.Generator().manual_seed(0))
    shapes = torch.tensor([[3, 4], [2, 10]])
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_positions_are_the_towers_own(dtype: torch.dtype) -> None:
    inner = make(0).to(dtype)
    embeddings, tower = inner.embeddings, Siglip2Tower(inner, PATCHES)
    table = embeddings.position_embedding.weight
    images = tower.images(
        torch.zeros(len(SHAPES), PATCHES, 12), torch.ones(len(SHAPES), PATCHES, dtype=torch.int64), SHAPES
    )
    expected = embeddings.resize_positional_embeddings(
        table.view(SIDE, SIDE, -1), torch.tensor(SHAPES), max_length=PATCHES
    )
    positions = tower._positions(images[:, 0, :, 12:-1])
    rounding = {"rtol": 0, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(positions, expected, **rounding)
    assert bool(tower._positions(torch.zeros(1, 2, 8, dtype=dtype)).isfinite().all())


def load(target: nn.Module, source: nn.Module) -> None:
    target.load_state_dict(source.state_dict())


def write_data(target: nn.Module, source: nn.Module) -> None:
    for own, other in zip(target.parameters(), source.parameters(), strict=True):
        own.data.copy_(other)


@pytest.mark.parametrize(
    ("mode", "write"),
    [(torch.no_grad, write_data), (torch.inference_mode, load), (torch.inference_mode, write_data)],
)
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_new_weights_are_those_of_the_next_call(
    mode: Callable[[], Any], write: Callable[[nn.Module, nn.Module], None], compiles: bool
) -> None:
    torch._dynamo.reset()
    tower, inputs = make(0, mode), batch()
    fx.accelerate(tower, CONFIG, compile=compiles)
    for seed in (0, 1, 2):
        reference = make(seed)
        with mode():
            write(tower, reference)
            output, expected = tower(**inputs), reference(**inputs)
        mask = inputs["pixel_attention_mask"].bool()
        torch.testing.assert_close(
            output.last_hidden_state[mask], expected.last_hidden_state[mask], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(output.pooler_output, expected.pooler_output, rtol=1e-4, atol=1e-5)
    assert fx.stats(tower).misses == {}
