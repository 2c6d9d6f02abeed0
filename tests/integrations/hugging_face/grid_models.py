"""Models whose inputs are patches and grids. An image is (rows, columns) of patches, a video has its frames
before them; 2 x 2 patches are a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from .prompts import END, IMAGE, START, TEXT, VIDEO, Runs
from .tiny_model import Item, Pixels, TinyModel

PATCH = 4
IMAGES = ((4, 6), (2, 4), (6, 6))
VIDEO_GRID = (2, 4, 4)

SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
GLM_SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": START - 3,
    "video_end_token_id": START - 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
WHOLE_ROPE = {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
LINEAR = {
    **WHOLE_ROPE,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["full_attention"],
}
GLM_EXPERTS = {
    **WHOLE_ROPE,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

BLOCKS = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "hidden_size": 32}
WIDE = {**BLOCKS, "intermediate_size": 48, "out_hidden_size": 32}
QWEN3 = {**WIDE, "num_position_embeddings": 49}
DEEPSTACK = {**QWEN3, "deepstack_visual_indexes": [0]}
GLM = {**WIDE, "image_size": 6 * PATCH}
KIMI = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "patch_size": PATCH,
}


def config(
    kind: str, vision: dict[str, Any], text: dict[str, Any], special: dict[str, Any] = SPECIAL
) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(transformers, kind)(text_config={**TEXT, **text}, vision_config={**vision}, **special)

    return make


def patches(*features: int) -> Pixels:
    """Inputs with patches of these features."""

    def make(images: Sequence[Item], videos: Sequence[Item], generator: torch.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        grids = (("", "image", [(1, *image) for image in images]), ("_videos", "video", list(videos)))
        for suffix, name, own in grids:
            if own:
                rows = sum(t * h * w for t, h, w in own)
                inputs[f"pixel_values{suffix}"] = torch.randn(rows, *features, generator=generator)
                inputs[f"{name}_grid_thw"] = torch.tensor(own)
        return inputs

    return make


def image_runs(image: Item) -> Runs:
    return [(IMAGE, image[0] * image[1] // 4)]


def whole_video(video: Item) -> Runs:
    frames, rows, columns = video
    return [(VIDEO, frames * rows * columns // 4)]


def frame_by_frame(token: int = VIDEO) -> Callable[[Item], Runs]:
    return lambda video: [(token, video[1] * video[2] // 4)] * video[0]


def pooled_video(video: Item) -> Runs:
    return [(VIDEO, video[1] * video[2] // 4)]


def model(
    kind: str, make: Callable[[], Any], video_runs: Callable[[Item], Runs], **options: Any
) -> TinyModel:
    values = {
        "pixels": patches(2 * 3 * PATCH**2),
        "image_runs": image_runs,
        "images": IMAGES,
        "video_runs": video_runs,
        "video": VIDEO_GRID,
        "token_types": True,
        "settings": {"token_budgets": (16, 32)},
        **options,
    }
    return TinyModel(kind, make, **values)


QWEN2 = {"rope_parameters": ROPE}
HEAD = {"head_dim": 8, **QWEN2}
WINDOWS = {**WIDE, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
GRID_MODELS = {
    "qwen2-vl": model(
        "Qwen2VLForConditionalGeneration",
        config("Qwen2VLConfig", {**BLOCKS, "embed_dim": 32}, QWEN2),
        whole_video,
    ),
    "qwen2.5-vl": model(
        "Qwen2_5_VLForConditionalGeneration", config("Qwen2_5_VLConfig", WINDOWS, QWEN2), whole_video
    ),
    "qwen3-vl": model(
        "Qwen3VLForConditionalGeneration", config("Qwen3VLConfig", DEEPSTACK, HEAD), frame_by_frame()
    ),
    "qwen3-vl-moe": model(
        "Qwen3VLMoeForConditionalGeneration",
        config("Qwen3VLMoeConfig", DEEPSTACK, {**HEAD, **EXPERTS}),
        frame_by_frame(),
        exhaustive=True,
    ),
    "qwen3.5": model(
        "Qwen3_5ForConditionalGeneration",
        config("Qwen3_5Config", QWEN3, LINEAR),
        frame_by_frame(),
        exhaustive=True,
    ),
    "qwen3.5-moe": model(
        "Qwen3_5MoeForConditionalGeneration",
        config("Qwen3_5MoeConfig", QWEN3, {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}),
        frame_by_frame(),
        exhaustive=True,
    ),
    "glm-4.1v": model(
        "Glm4vForConditionalGeneration",
        config("Glm4vConfig", GLM, QWEN2, GLM_SPECIAL),
        frame_by_frame(IMAGE),
        video_alone=True,
        exhaustive=True,
    ),
    "glm-4.5v": model(
        "Glm4vMoeForConditionalGeneration",
        config("Glm4vMoeConfig", GLM, GLM_EXPERTS, GLM_SPECIAL),
        frame_by_frame(IMAGE),
        video_alone=True,
        exhaustive=True,
    ),
    "glm-4.6v": model(
        "Glm46VForConditionalGeneration",
        config(
            "Glm46VConfig",
            {**GLM, "model_type": "glm4v_vision"},
            {**QWEN2, "model_type": "glm4v_text"},
            GLM_SPECIAL,
        ),
        frame_by_frame(IMAGE),
        video_alone=True,
        exhaustive=True,
    ),
    "kimi-k2.5": model(
        "Kimi_K25ForConditionalGeneration",
        config(
            "Kimi_K25Config",
            KIMI,
            {**GLM_EXPERTS, **DEEPSEEK, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            {"image_token_id": IMAGE, "video_token_id": VIDEO, "projection_hidden_size": 48},
        ),
        pooled_video,
        pixels=patches(3, PATCH, PATCH),
        video=(1, 4, 4),  # its own features of longer clips are cut as if frames were not pooled
        token_types=False,
        exhaustive=True,
    ),
}
