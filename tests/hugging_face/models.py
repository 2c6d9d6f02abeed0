"""Models that `accelerate` is tested with, one of each tower and kind of inputs, at tiny sizes;
`test_classes.py` has every class.

Of Qwen3-VL an image is (rows, columns) of patches, a video has its frames before them; 2 x 2 patches are a
token. The others take images or tiles of 16 x 16 pixels, 4 x 4 patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..towers.tiny_views import step3p7_sizes
from .tiny_model import END, IMAGE, START, TEXT, VIDEO, Item, Pixels, Runs, TinyModel

PATCH = 4

QWEN3_TEXT = {
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
DEEPSTACK = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0],
}
SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def patches(images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    grids = (("", "image", [(1, *image) for image in images]), ("_videos", "video", list(videos)))
    for suffix, name, own in grids:
        if own:
            rows = sum(t * h * w for t, h, w in own)
            inputs[f"pixel_values{suffix}"] = torch.randn(rows, 2 * 3 * PATCH**2, generator=generator)
            inputs[f"{name}_grid_thw"] = torch.tensor(own)
    return inputs


QWEN3_VL = TinyModel(
    "Qwen3VL",
    {"text_config": TEXT | QWEN3_TEXT, "vision_config": DEEPSTACK, **SPECIAL},
    patches,
    lambda image: [(IMAGE, image[0] * image[1] // 4)],
    ((4, 6), (2, 4), (6, 6)),
    lambda video: [(VIDEO, video[1] * video[2] // 4)] * video[0],
    (2, 4, 4),
    token_types=True,
    settings={"token_budgets": (16, 32)},
)

SIZE = 16
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 4,
}
CLIP = {**TOWER, "model_type": "clip_vision_model"}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
STEP = step3p7_sizes(2)
STEP_TEXT = {
    "moe_intermediate_size": 8,
    "share_expert_dim": 8,
    "moe_num_experts": 2,
    "moe_top_k": 1,
    "head_dim": 8,
    "num_attention_groups": 1,
    "sliding_window": 64,
}
PINPOINTS = {"image_grid_pinpoints": [[SIZE, 2 * SIZE], [2 * SIZE, SIZE]]}


def tiles(images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator) -> dict[str, Any]:
    """All tiles in a row; an image is the number of its tiles."""
    return {"pixel_values": torch.randn(sum(images), 3, SIZE, SIZE, generator=generator)}


def padded_tiles(
    images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator
) -> dict[str, Any]:
    """(1, tiles, ...), as Idefics 3 takes those of a sequence; the last one is padding."""
    pixels = torch.randn(1, sum(images) + 1, 3, SIZE, SIZE, generator=generator)
    pixels[:, -1] = 0.0
    return {"pixel_values": pixels}


def any_resolution(
    images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator
) -> dict[str, Any]:
    """An image of one size for all: as a whole and two tiles. A video is its frames."""
    inputs: dict[str, Any] = {}
    if images:
        inputs["pixel_values"] = torch.randn(len(images), 3, 3, SIZE, SIZE, generator=generator)
        inputs["image_sizes"] = torch.tensor([(SIZE, 2 * SIZE)] * len(images))
    if videos:
        inputs["pixel_values_videos"] = torch.randn(
            len(videos), videos[0], 3, SIZE, SIZE, generator=generator
        )
    return inputs


def views(images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator) -> dict[str, Any]:
    """Whole images and crops; an image is the number of its crops."""
    inputs: dict[str, Any] = {
        "pixel_values": torch.randn(len(images), 3, 728, 728, generator=generator),
        "num_local_patches": torch.tensor(images),
    }
    if sum(images):
        inputs["pixel_values_local"] = torch.randn(sum(images), 3, 504, 504, generator=generator)
    return inputs


def of_tiles(
    family: str,
    vision: dict[str, Any],
    text: dict[str, Any],
    special: dict[str, Any],
    tokens: Callable[[Item], int],
    pixels: Pixels = tiles,
    images: tuple[Item, Item, Item] = (1, 1, 1),
    **options: Any,
) -> TinyModel:
    def runs(image: Item) -> Runs:
        return [(IMAGE, tokens(image))]

    arguments = {"text_config": TEXT | text, "vision_config": vision, **special}
    return TinyModel(family, arguments, pixels, runs, images, **options)


BY_ID, BY_INDEX = {"image_token_id": IMAGE}, {"image_token_index": IMAGE}
LLAMA, QWEN = {"model_type": "llama"}, {"model_type": "qwen2"}
TILE_MODELS = {
    "llava-next": of_tiles(
        "LlavaNext", CLIP, LLAMA, {**BY_INDEX, **PINPOINTS}, lambda image: 52, any_resolution
    ),
    "llava-onevision": of_tiles(
        "LlavaOnevision",
        SIGLIP,
        QWEN,
        {**BY_ID, "video_token_id": VIDEO, **PINPOINTS},
        lambda image: 52,
        any_resolution,
        video_runs=lambda frames: [(VIDEO, 4 * frames + 1)],
        video=3,
    ),
    "idefics3": of_tiles(
        "Idefics3",
        {**TOWER, "model_type": "idefics3_vision"},
        LLAMA,
        {**BY_ID, "scale_factor": 2},
        lambda count: 4 * count,  # each four patches of a tile are a token
        padded_tiles,
        (1, 3, 2),
    ),
    "step-3.7": of_tiles(
        "Step3p7", STEP, STEP_TEXT, BY_ID, lambda crops: 16 + 9 * crops, views, (0, 2, 1), exhaustive=True
    ),
}


def shapes(images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator) -> dict[str, Any]:
    """As SigLIP 2's processor makes them: patches up to a number, a mask, rows and columns."""
    sizes = torch.tensor([(4, 4), (3, 4), (5, 3), (2, 7)])[: len(images)]
    own = torch.arange(16)[None] < sizes.prod(1)[:, None]
    pixels = torch.randn(len(images), 16, 48, generator=generator) * own[..., None]
    return {"pixel_values": pixels, "pixel_attention_mask": own.int(), "spatial_shapes": sizes}


def embed(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    if hasattr(model, "get_image_features"):
        return model.get_image_features(**inputs, **options)
    return model(**inputs, **options)


def of_embeddings(family: str, pixels: Pixels = tiles, **sizes: Any) -> TinyModel:
    options: dict[str, Any] = {"features": embed, "embeds": True, "settings": {"exact_min_hits": 2}}
    return TinyModel(family, sizes, pixels, lambda image: [], (1, 1, 1), **options)


SHORT_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
DINO = {name: value for name, value in TOWER.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
NAFLEX = {name: value for name, value in TOWER.items() if name != "image_size"} | {"num_patches": 16}
EMBEDDERS = {
    "clip": of_embeddings("CLIP", text_config=SHORT_TEXT, vision_config=TOWER, projection_dim=24),
    "siglip2": of_embeddings("Siglip2", shapes, text_config=SHORT_TEXT, vision_config=NAFLEX),
    "dinov2": of_embeddings("Dinov2", **DINO),
}
MODELS = {"qwen3-vl": QWEN3_VL, **TILE_MODELS}
