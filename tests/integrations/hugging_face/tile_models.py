"""Models whose inputs are images or tiles of 16 x 16 pixels, 4 x 4 patches, and Pixtral's of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from .prompts import END, IMAGE, START, TEXT, VIDEO
from .tiny_model import Item, Pixels, TinyModel

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
LLAMA4 = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,  # of the pixel shuffle: four patches
    "projector_input_dim": 24,
    "projector_output_dim": 24,
    "vision_output_dim": 24,
    "image_size": SIZE,
    "patch_size": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
STEP = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 728,
    "patch_size": 56,
    "mlp_ratio": 1.5,
}
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


def config(kind: str, vision: dict[str, Any], text: dict[str, Any], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(transformers, kind)(text_config={**TEXT, **text}, vision_config={**vision}, **options)

    return make


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


def sized(images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator) -> dict[str, Any]:
    """Images padded to the largest; one is (rows, columns) of patches."""
    height, width = (4 * max(side) for side in zip(*images, strict=True))
    sizes = torch.tensor([(4 * rows, 4 * columns) for rows, columns in images])
    pixels = torch.randn(len(images), 3, height, width, generator=generator)
    return {"pixel_values": pixels, "image_sizes": sizes}


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


def model(
    kind: str,
    make: Callable[[], Any],
    tokens: Callable[[Item], int],
    pixels: Pixels = tiles,
    images: tuple[Item, Item, Item] = (1, 1, 1),
    **options: Any,
) -> TinyModel:
    return TinyModel(kind, make, pixels, lambda image: [(IMAGE, tokens(image))], images, **options)


def llama4_features(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs, vision_feature_select_strategy="default")


HEAD = {"head_dim": 8}
MARKS = {"boi_token_id": START, "eoi_token_id": END}
TILE_MODELS = {
    "internvl": model(
        "InternVLForConditionalGeneration",
        config(
            "InternVLConfig",
            {**TOWER, "image_size": [SIZE, SIZE], "patch_size": [4, 4]},
            {"model_type": "qwen2"},
            image_token_id=IMAGE,
        ),
        lambda count: 4 * count,
        images=(1, 2, 3),
    ),
    "llama4": model(
        "Llama4ForConditionalGeneration",
        config(
            "Llama4Config",
            LLAMA4,
            {**HEAD, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
            image_token_index=IMAGE,
        ),
        lambda count: 4 * count,
        images=(1, 3, 2),
        features=llama4_features,
        exhaustive=True,
    ),
    "llava": model(
        "LlavaForConditionalGeneration",
        config(
            "LlavaConfig",
            CLIP,
            {"model_type": "llama"},
            image_token_index=IMAGE,
            vision_feature_layer=[-2, -1],
        ),
        lambda count: 16 * count,
        exhaustive=True,
    ),
    "llava-next": model(
        "LlavaNextForConditionalGeneration",
        config("LlavaNextConfig", CLIP, {"model_type": "llama"}, image_token_index=IMAGE, **PINPOINTS),
        lambda image: 52,
        any_resolution,
    ),
    "llava-onevision": model(
        "LlavaOnevisionForConditionalGeneration",
        config(
            "LlavaOnevisionConfig",
            SIGLIP,
            {"model_type": "qwen2"},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            **PINPOINTS,
        ),
        lambda image: 52,
        any_resolution,
        video_runs=lambda frames: [(VIDEO, 4 * frames + 1)],
        video=3,
    ),
    "paligemma": model(
        "PaliGemmaForConditionalGeneration",
        config(
            "PaliGemmaConfig",
            {**SIGLIP, "projection_dim": 32},
            {"model_type": "gemma", **HEAD},
            image_token_id=IMAGE,
            projection_dim=32,
        ),
        lambda count: 16 * count,
        exhaustive=True,
    ),
    "gemma3": model(
        "Gemma3ForConditionalGeneration",
        config(
            "Gemma3Config",
            SIGLIP,
            {"model_type": "gemma3_text", **HEAD},
            image_token_id=IMAGE,
            mm_tokens_per_image=4,
            **MARKS,
        ),
        lambda count: 4 * count,
        exhaustive=True,
    ),
    "idefics3": model(
        "Idefics3ForConditionalGeneration",
        config(
            "Idefics3Config",
            {**TOWER, "model_type": "idefics3_vision"},
            {"model_type": "llama"},
            image_token_id=IMAGE,
            scale_factor=2,
        ),
        lambda count: 4 * count,
        padded_tiles,
        images=(1, 3, 2),
    ),
    "smolvlm": model(
        "SmolVLMForConditionalGeneration",
        config(
            "SmolVLMConfig",
            {**TOWER, "model_type": "smolvlm_vision"},
            {"model_type": "llama"},
            image_token_id=IMAGE,
            scale_factor=2,
        ),
        lambda count: 4 * count,
        padded_tiles,
        images=(1, 3, 2),
        exhaustive=True,
    ),
    "mistral3": model(
        "Mistral3ForConditionalGeneration",
        config(
            "Mistral3Config",
            {**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
            {"model_type": "mistral", **HEAD},
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        lambda image: image[0] * image[1] // 4,
        sized,
        images=((4, 6), (2, 4), (6, 6)),
        exhaustive=True,
        settings={"token_budgets": (32, 64)},
    ),
    "step-3.7": model(
        "Step3p7ForConditionalGeneration",
        config("Step3p7Config", STEP, STEP_TEXT, image_token_id=IMAGE),
        lambda crops: 16 + 9 * crops,
        views,
        images=(0, 2, 1),
        exhaustive=True,
    ),
}
