"""Every model class of vLLM that is tested: a tiny configuration, its inputs, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm
from vllm_classes import (
    AUTO_MAP,
    frames_without_processor,
    internvl_without_tokenizer,
    shrunk,
    tokenizer_of,
)
from vllm_classes import TINY as TINY_QWEN3
from vllm_classes import TINY_IDS as IDS
from vllm_classes import TINY_MROPE as MROPE
from vllm_classes import TINY_TEXT as TEXT
from vllm_classes import TINY_VISION as VISION
from vllm_classes import TINY_WIDTH as WIDTH

from tests.vllm.inputs import (
    Grids,
    Positioned,
    Rasters,
    Size,
    Slices,
    Tiles,
    Views,
    WholeAndTiles,
)

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])
PATCH = VISION["patch_size"]
LAYERS = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=WIDTH, intermediate_size=96)

QWEN = Grids(3 * 2 * PATCH**2)
RAW_QWEN = Grids(QWEN.features, raw=True)
NORMALIZED = dict(do_normalize=True, do_rescale=True, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4])
IMAGES = [[(1, 8, 8)], [(1, 4, 8), (1, 8, 8), (1, 16, 8)], [(1, 2, 4)] * 6]
VIDEOS = [[(2, 8, 8)], [(2, 8, 8), (3, 8, 4)]]
TOO_LARGE = [(1, 32, 32)]
TOO_MANY_FRAMES = [(12, 4, 4)]


@dataclass(frozen=True)
class Tiny:
    """One class, by its configuration."""

    config: dict[str, Any]
    inputs: Callable[[str, list[Size]], dict[str, Any]]
    images: list[list[Size]] = field(default_factory=list)
    videos: list[list[Size]] = field(default_factory=list)
    eager: list[tuple[str, list[Size]]] = field(default_factory=list)
    """Batches, with their modality, that no capture holds."""
    budgets: tuple[int, ...] = (16, 64, 128)
    items: int = 4
    frames: int | None = 8
    modality: str = "image"
    small: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What is replaced while the model is built and used: sizes that its code writes out."""
    adjust: Callable[[Any], None] = lambda model: None
    """What is replaced in the model: what asks a processor for numbers."""
    rounding: float = 0.0
    """By how much its padded forward differs, where it pads within an image: vLLM's own captures do, too."""
    not_compiled: str = ""
    """Why it is not compiled; empty if it is."""
    eager_by_vllm: bool = False
    """Whether it has no eager forward for what captures do not hold: `embed_multimodal` is left."""
    processor: dict[str, Any] | None = None
    """Of one that leaves it to the model to normalize pixels, as vLLM's does for Qwen's classes."""
    since: tuple[int, int] = (0, 31)
    """The first version that captures it."""


few_frames = frames_without_processor(4)


@contextmanager
def small_deepseek_ocr() -> Iterator[None]:
    """SAM of two blocks and CLIP of two layers, for pages of 256 and crops of 128 pixels a side."""
    from functools import partial

    from torch import nn
    from vllm.model_executor.models import deepencoder, deepseek_ocr

    def small_sam() -> nn.Module:
        return deepencoder.ImageEncoderViT(
            depth=2,
            embed_dim=WIDTH,
            img_size=1024,
            mlp_ratio=4,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            num_heads=4,
            patch_size=16,
            qkv_bias=True,
            use_rel_pos=True,
            global_attn_indexes=[1],
            window_size=14,
            out_chans=256,
            last_conv_output=WIDTH,
        )

    clip_sizes = dict(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_attention_heads=4,
        num_hidden_layers=2,
        image_size=64,
        patch_size=16,
    )
    clip = deepseek_ocr.CLIPVisionConfig
    with (
        tokenizer_of("deepseek_ocr", 250),
        mock.patch.object(deepseek_ocr, "build_sam_vit_b", small_sam),
        mock.patch.object(deepseek_ocr, "CLIPVisionConfig", lambda **sizes: clip(**{**sizes, **clip_sizes})),
        mock.patch.object(deepseek_ocr, "BASE_SIZE", 256),
        mock.patch.object(deepseek_ocr, "IMAGE_SIZE", 128),
    ):
        yield


@contextmanager
def small_deepseek_vl2() -> Iterator[None]:
    """SigLIP of two layers."""
    import timm
    from timm.models import create_model as create  # not replaced, where this is entered twice

    def small(name: str, **options: Any) -> Any:
        return create(
            "vit_tiny_patch16_224",
            **options,
            img_size=64,
            depth=2,
            embed_dim=WIDTH,
            num_heads=4,
            class_token=False,
            global_pool="map",  # as SigLIP has it
        )

    with tokenizer_of("deepseek_vl2", 250), mock.patch.object(timm, "create_model", small):
        yield


@contextmanager
def minimax_m3_of_a_cpu() -> Iterator[None]:
    """Without the language model, and with what its Triton kernels compute."""
    from torch import nn
    from vllm.models.minimax_m3.common import vision_tower
    from vllm.models.minimax_m3.nvidia import model

    def planes(t: Any, h: Any, w: Any, grids: list[list[int]], merge: int) -> tuple[Any, Any]:
        places = torch.cat([torch.cartesian_prod(*map(torch.arange, grid)) for grid in grids])
        angles = torch.stack([places[:, axis, None] * each for axis, each in enumerate((t, h, w))])
        return angles.cos(), angles.sin()

    def rotate(q: Any, k: Any, cos: Any, sin: Any, *sizes: Any, **options: Any) -> None:
        width, half = sizes[1], 3 * cos.shape[-1]
        cos, sin = (each.permute(1, 0, 2).reshape(-1, 1, half) for each in (cos, sin))
        for rows in (q, k):
            heads = rows.view(rows.shape[0], -1, width)
            a, b = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
            heads[..., :half], heads[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin

    setup = ("vit_mrope_setup", planes) if VERSION < (0, 33) else ("VitMropeSetup", lambda: planes)

    class Nothing(nn.Module):
        make_empty_intermediate_tensors = None

    with (
        mock.patch.object(vision_tower, *setup),
        mock.patch.object(vision_tower, "triton_mrope", rotate),
        mock.patch.object(model, "init_vllm_registered_model", lambda *args, **options: Nothing()),
        mock.patch.object(model, "PreTrainedConfig", SimpleNamespace(from_dict=lambda config: config)),
    ):
        yield


def flash_attention_by_name(model: Any) -> None:
    """It captures nothing with another; layers have theirs all the same."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model.vision_tower.vision_model.attn_backend = AttentionBackendEnum.FLASH_ATTN


@contextmanager
def one_hot_of_a_gpu() -> Iterator[None]:
    """On a CPU torch's one_hot looks at every index, to refuse those that are out of range."""
    from torch.nn import functional

    def one_hot(index: torch.Tensor, num_classes: int) -> torch.Tensor:
        return (index.unsqueeze(-1) == torch.arange(num_classes)).long()

    with mock.patch.object(functional, "one_hot", one_hot):
        yield


def fixed_positions(model: Any) -> None:
    """Its resampler reads sizes on the host, but not while a GPU captures; a CPU does not tell."""
    few_frames(model)
    model.resampler._adjust_pos_cache = lambda tgt_sizes, device: None


DEEPSEEK_OCR = shrunk(
    "deepseek-ocr",
    language_config=dict(
        **TEXT,
        moe_intermediate_size=32,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        v_head_dim=16,
    ),
    projector_config=dict(input_dim=2 * WIDTH, n_embed=WIDTH),
)
DEEPSEEK_TEXT = DEEPSEEK_OCR["language_config"]

TINY: dict[str, Tiny] = {
    "Qwen2-VL": Tiny(
        dict(
            architectures=["Qwen2VLForConditionalGeneration"],
            model_type="qwen2_vl",
            **IDS,
            **TEXT,
            rope_scaling=MROPE,
            vision_config=dict(**VISION, embed_dim=WIDTH, mlp_ratio=2, temporal_patch_size=2),
        ),
        QWEN,
        IMAGES,
        VIDEOS,
        [("image", TOO_LARGE), ("video", TOO_MANY_FRAMES)],
        adjust=few_frames,
    ),
    "Qwen2.5-VL": Tiny(
        shrunk(
            "qwen2.5-vl-7b",
            **IDS,
            **TEXT,
            rope_scaling=MROPE,
            vision_config=dict(
                **VISION,
                out_hidden_size=WIDTH,
                intermediate_size=96,
                window_size=16,
                fullatt_block_indexes=[1],
            ),
        ),
        QWEN,
        IMAGES,
        VIDEOS,
        [("image", TOO_LARGE), ("video", TOO_MANY_FRAMES)],
        adjust=few_frames,
    ),
    "Qwen3-VL": Tiny(
        dict(TINY_QWEN3.config),
        QWEN,
        IMAGES,
        VIDEOS,
        [("image", TOO_LARGE), ("video", TOO_MANY_FRAMES)],
        adjust=few_frames,
    ),
    "GLM-4.1V": Tiny(
        dict(
            architectures=["Glm4vForConditionalGeneration"],
            model_type="glm4v",
            text_config=dict(
                model_type="glm4v_text",
                **TEXT,
                rope_scaling={**MROPE, "mrope_section": [2, 1, 1]},
                partial_rotary_factor=0.5,
            ),
            vision_config=dict(
                **VISION, out_hidden_size=WIDTH, intermediate_size=96, temporal_patch_size=2, image_size=32
            ),
            **dict(image_token_id=250, video_token_id=251, image_start_token_id=252),
            **dict(image_end_token_id=253, video_start_token_id=254, video_end_token_id=255),
        ),
        QWEN,
        IMAGES,
        VIDEOS,
        [("image", TOO_LARGE), ("video", TOO_MANY_FRAMES)],
    ),
    "InternVL": Tiny(
        shrunk(
            "internvl3-8b",
            text_config=TEXT,
            vision_config=dict(**LAYERS, image_size=32, patch_size=8),
            force_image_size=32,
        ),
        Tiles(
            32,
            {
                "image": ("pixel_values_flat", "image_num_patches"),
                "video": ("pixel_values_flat_video", "video_num_patches"),
            },
            {"image_token_id": 250, "video_token_id": 251},
        ),
        [[3], [1, 4, 2], [1] * 6],
        [[4], [2, 6]],
        [("image", [40])],
        budgets=(4, 16, 64),
        small=internvl_without_tokenizer,
    ),
    "Kimi-VL": Tiny(
        dict(
            architectures=["KimiVLForConditionalGeneration"],
            model_type="kimi_vl",
            text_config={**DEEPSEEK_TEXT, "kv_lora_rank": 16},
            vision_config=dict(
                **LAYERS,
                patch_size=PATCH,
                init_pos_emb_height=8,
                init_pos_emb_width=8,
                merge_kernel_size=[2, 2],
            ),
            media_placeholder_token_id=250,
        ),
        Rasters("image_grid_hws"),
        [[(8, 8)], [(4, 8), (8, 8), (16, 8)], [(2, 4)] * 6],
        eager=[("image", [(32, 32)])],
    ),
    "Kimi-K2.5": Tiny(
        dict(
            architectures=["KimiK25ForConditionalGeneration"],
            model_type="kimi_k25",
            text_config={**DEEPSEEK_TEXT, "kv_lora_rank": 16},
            vision_config=dict(
                **LAYERS,
                patch_size=PATCH,
                pos_emb_height=8,
                pos_emb_width=8,
                pos_emb_time=4,
                merge_kernel_size=[2, 2],
            ),
            image_token_id=250,
        ),
        Rasters("grid_thws"),
        [[(1, 8, 8)], [(1, 4, 8), (1, 8, 8), (1, 16, 8)], [(1, 2, 4)] * 6],
        eager=[("vision_chunk", [(1, 32, 32)]), ("vision_chunk", [(2, 8, 8)])],
        modality="vision_chunk",
    ),
    "Llama 4": Tiny(
        dict(
            architectures=["Llama4ForConditionalGeneration"],
            model_type="llama4",
            text_config=dict(
                model_type="llama4_text",
                **TEXT,
                head_dim=16,
                intermediate_size_mlp=WIDTH,
                num_local_experts=1,
                num_experts_per_tok=1,
                interleave_moe_layer_step=2,
            ),
            vision_config=dict(
                **{**LAYERS, "intermediate_size": 4 * WIDTH},
                image_size=32,
                patch_size=8,
                num_channels=3,
                pixel_shuffle_ratio=0.5,
                projector_input_dim=WIDTH,
                projector_output_dim=WIDTH,
                vision_output_dim=WIDTH,
            ),
            image_token_index=250,
        ),
        Tiles(
            32,
            {"image": ("pixel_values", "patches_per_image")},
            {"aspect_ratios": lambda sizes: [[1, 1]] * len(sizes)},
        ),
        [[3], [1, 4, 2], [1] * 6],
        eager=[("image", [40])],
        budgets=(4, 16, 64),
    ),
    "Step3-VL": Tiny(
        dict(
            architectures=["Step3VLForConditionalGeneration"],
            model_type="step3_vl",
            hidden_size=WIDTH,
            text_config=dict(
                architectures=["Step3TextForCausalLM"],
                hidden_size=WIDTH,
                intermediate_size=WIDTH,
                num_attention_heads=4,
                num_hidden_layers=1,
                vocab_size=256,
                moe_num_experts=2,
                moe_top_k=1,
                moe_layers_enum="1",
                head_dim=16,
                share_q_dim=32,
            ),
            vision_config=dict(**LAYERS, output_hidden_size=32, image_size=728, patch_size=56),
            understand_projector_stride=2,
            projector_bias=True,
            image_token_id=250,
        ),
        Views(728, 504, "patch_pixel_values", "num_patches", grids=False),
        [[(0, 0)], [(2, 1), (0, 0), (1, 1)], [(2, 2)], [(1, 1)] * 6],
        eager=[("image", [(3, 3)] * 2)],
        budgets=(16, 32, 64),
    ),
    "DeepSeek-OCR": Tiny(
        DEEPSEEK_OCR,
        Views(256, 128, "images_crop", "images_spatial_crop", grids=True),
        [[(0, 0)], [(2, 1), (0, 0), (1, 3)], [(2, 2)], [(2, 1)] * 6],
        eager=[("image", [(4, 6)])],
        budgets=(20, 40, 80),
        small=small_deepseek_ocr,
    ),
    "DeepSeek-VL2": Tiny(
        dict(
            architectures=["DeepseekVLV2ForCausalLM"],
            model_type="deepseek_vl_v2",
            language_config=DEEPSEEK_TEXT,
            projector_config=dict(input_dim=WIDTH, n_embed=WIDTH),
            tile_tag="2D",
            vision_config=dict(image_size=64, patch_size=16),
        ),
        WholeAndTiles(64),
        [[(1, 1)], [(2, 1), (1, 1), (1, 3)], [(2, 2)], [(1, 1)] * 6],
        eager=[("image", [(4, 6)])],
        budgets=(16, 32, 64),
        small=small_deepseek_vl2,
        eager_by_vllm=True,
        since=(0, 33),
    ),
    "MiniCPM-V": Tiny(
        dict(
            architectures=["MiniCPMV"],
            model_type="minicpmv",
            auto_map=AUTO_MAP,
            version="2.6",
            **{**TEXT, "hidden_size": 128},
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            hidden_act="silu",
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            query_num=4,
            drop_vision_last_layer=False,
            slice_config=dict(max_slice_nums=3),
            max_slice_num=3,
            vision_config=dict(
                model_type="siglip",
                **LAYERS,
                image_size=96,
                patch_size=2,
                num_channels=3,
                layer_norm_eps=1e-6,
                hidden_act="gelu_pytorch_tanh",
                attention_dropout=0.0,
            ),
        ),
        Slices(2),
        [[[(30, 20)]], [[(30, 20)], [(10, 12), (32, 8)], [(32, 32)]], [[(40, 20)]]],
        [[[(20, 20), (20, 20)]]],
        [("image", [[(30, 20)], [(40, 20)] * 9])],
        budgets=(8, 16),
        rounding=1e-6,
        adjust=fixed_positions,
    ),
    "Gemma 4": Tiny(
        dict(
            architectures=["Gemma4ForConditionalGeneration"],
            model_type="gemma4",
            text_config=dict(model_type="gemma4_text", **TEXT, head_dim=16, hidden_size_per_layer_input=0),
            vision_config=dict(
                model_type="gemma4_vision",
                **LAYERS,
                num_key_value_heads=4,
                head_dim=16,
                patch_size=2,
                pooling_kernel_size=3,
                position_embedding_size=64,
                default_output_length=70,
                num_soft_tokens=70,
            ),
            audio_config=None,
            image_token_id=250,
            video_token_id=251,
        ),
        Positioned(2),
        [[(1, 30, 21)], [(1, 30, 21)] * 3],
        [[(2, 30, 21)], [(2, 30, 21), (1, 30, 21)]],
        [("image", [(1, 30, 21)] * 9)],
        budgets=(70, 140, 280),
        not_compiled="do not have one size that varies" if VERSION < (0, 33) else "",
        small=one_hot_of_a_gpu,
    ),
}

TINY["MiniMax-M3"] = Tiny(
    dict(
        architectures=["MiniMaxM3SparseForConditionalGeneration"],
        model_type="minimax_m3_tiny",
        auto_map=AUTO_MAP,
        text_config=dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **TEXT),
        vision_config=dict(
            **LAYERS,
            num_channels=3,
            patch_size=PATCH,
            layer_norm_eps=1e-6,
            img_token_compression_config=dict(spatial_merge_size=2, temporal_patch_size=2),
        ),
        projector_hidden_size=WIDTH,
    ),
    QWEN,
    [[(1, 8, 8)], [(1, 4, 8), (1, 8, 8), (1, 16, 8)], [(1, 2, 4)] * 6],
    eager=[("image", TOO_LARGE)],
    small=minimax_m3_of_a_cpu,
    adjust=flash_attention_by_name,
)
TINY["Gemma 3"] = Tiny(
    dict(
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config=dict(model_type="gemma3_text", **TEXT, head_dim=16),
        vision_config=dict(
            model_type="siglip_vision_model", **LAYERS, image_size=32, patch_size=PATCH, num_channels=3
        ),
        mm_tokens_per_image=16,
        image_token_index=250,
    ),
    Tiles(32, {"image": ("pixel_values", "num_patches")}, {}),
    [[1], [3], [2, 1, 3], [2, 2, 2, 1], [1] * 6],
    eager=[("image", [6])],
    budgets=(16, 40, 128, 256),
)

TINY["Qwen3-VL, bytes"] = replace(
    TINY["Qwen3-VL"],
    inputs=RAW_QWEN,
    processor=NORMALIZED,
    videos=[],
    eager=[("image", TOO_LARGE)],
    since=(0, 32),
)
