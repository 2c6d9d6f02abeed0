"""Kimi-VL against a reference written from the model's description: loops over images, complex rotary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.encoders.moonvit import KimiVLVisionConfig, KimiVLVisionModel

from .random_weights import randomize
from .tiny_packed import KIMI_HIDDEN as HIDDEN
from .tiny_packed import KIMI_TEXT as TEXT
from .tiny_packed import PATCH, kimi_vl_config, raster_patches

HEADS, BLOCKS = 4, 3
SIZES = dict(hidden_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=BLOCKS, patch_size=PATCH)
CONFIG = kimi_vl_config(BLOCKS)
BATCHES = [[(4, 6), (2, 2), (6, 4)], [(8, 8), (6, 10)], [(2, 14)], [(4, 2), (12, 14), (2, 6), (4, 4)]]


def make_batch(sizes: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "pixel_values": raster_patches(sum(h * w for h, w in sizes)),
        "image_grid_hws": torch.tensor(sizes),
    }


def reference(weights: dict[str, Tensor], inputs: dict[str, Any]) -> list[Tensor]:
    """Every image alone, from the weights by the names of the checkpoint."""
    sizes = inputs["image_grid_hws"].tolist()
    images = inputs["pixel_values"].split([h * w for h, w in sizes])
    return [_encode(weights, image, *size) for image, size in zip(images, sizes, strict=True)]


def _encode(weights: dict[str, Tensor], image: Tensor, height: int, width: int) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].flatten(1).T + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = linear("vision_tower.patch_embed.proj", image.flatten(1))
    table = weights["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
    x = x + F.interpolate(table, size=(height, width), mode="bicubic")[0].permute(1, 2, 0).reshape(-1, HIDDEN)
    turns = _turns(height, width, HIDDEN // HEADS)
    for number in range(BLOCKS):
        block = f"vision_tower.encoder.blocks.{number}"
        qkv = linear(f"{block}.wqkv", norm(f"{block}.norm0", x)).reshape(-1, 3, HEADS, HIDDEN // HEADS)
        q, k = (torch.view_as_complex(qkv[:, i].reshape(*qkv.shape[:1], HEADS, -1, 2)) for i in (0, 1))
        q, k = (torch.view_as_real(z * turns).flatten(-2) for z in (q, k))
        attended = F.scaled_dot_product_attention(*(z.transpose(0, 1) for z in (q, k, qkv[:, 2])))
        x = x + linear(f"{block}.wo", attended.transpose(0, 1).reshape(-1, HIDDEN))
        inner = linear(f"{block}.mlp.fc0", norm(f"{block}.norm1", x))
        x = x + linear(f"{block}.mlp.fc1", F.gelu(inner, approximate="tanh"))
    x = norm("multi_modal_projector.pre_norm", norm("vision_tower.encoder.final_layernorm", x))
    image = x.reshape(height, width, HIDDEN)
    tokens = [
        torch.cat([image[r, c], image[r, c + 1], image[r + 1, c], image[r + 1, c + 1]])
        for r in range(0, height, 2)
        for c in range(0, width, 2)
    ]
    inner = linear("multi_modal_projector.linear_1", torch.stack(tokens))
    return linear("multi_modal_projector.linear_2", F.gelu(inner))


def _turns(height: int, width: int, head_dim: int) -> Tensor:
    """(patches, 1, head_dim / 2) complex: column, row, column, row..., at falling frequencies."""
    rows = []
    for r in range(height):
        for c in range(width):
            angles = []
            for i in range(head_dim // 4):
                frequency = 10000.0 ** (-4 * i / head_dim)
                angles += [c * frequency, r * frequency]
            rows.append(angles)
    angles_of = torch.tensor(rows)
    return torch.polar(torch.ones_like(angles_of), angles_of)[:, None]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return dict(randomize(KimiVLVisionModel(CONFIG)).state_dict())


@pytest.fixture(scope="module")
def wrapped() -> Any:
    return fx.wrap(randomize(KimiVLVisionModel(CONFIG)))


@pytest.mark.parametrize("sizes", BATCHES, ids=str)
@torch.no_grad()
def test_the_forward_is_the_references(sizes: Any, wrapped: Any, weights: Any) -> None:
    inputs = make_batch(sizes)
    expected = torch.cat(reference(weights, inputs))
    assert 0.2 < expected.std() < 5
    torch.testing.assert_close(wrapped(**inputs), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(wrapped(*inputs.values()), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(wrapped.encoder_eager_forward(inputs), expected, rtol=0, atol=1e-5)


def test_a_checkpoints_settings_are_read() -> None:
    """The reference reads its weights by their names."""
    settings = {
        "vision_config": {
            **SIZES,
            "model_type": "moonvit",
            "intermediate_size": 80,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "merge_kernel_size": [2, 2],
        },
        "text_config": {"hidden_size": TEXT, "num_hidden_layers": 27},
    }
    assert KimiVLVisionConfig.from_checkpoint(settings) == CONFIG


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[1, 4, 4]], r"expected rows of two integers \(height, width\) in patches; got \[1, 4, 4\]"),
        ([[4, 3]], r"multiples of the merge size 2 .* got \(1, 4, 3\)"),
        ([[4, 4], [4, 2]], r"\bdescribes 24 patches; got 16 rows"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: Any, message: str, wrapped: Any) -> None:
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="none"), log_interval=0)
    inputs = {"pixel_values": raster_patches(16), "image_grid_hws": torch.tensor(sizes)}
    for call in (lambda: wrapped(**inputs), lambda: manager.execute(inputs)):
        with pytest.raises(InputError, match=f"image_grid_hws:? .*{message}"):
            call()


def test_a_merge_that_is_not_square_is_refused() -> None:
    tower = KimiVLVisionModel(KimiVLVisionConfig(**SIZES, merge_kernel_size=(2, 1)))
    with pytest.raises(fx.UnsupportedTowerError, match="merge_kernel_size: expected a square; got 2 x 1"):
        fx.wrap(tower)
