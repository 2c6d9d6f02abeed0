"""Every model class of vLLM that is tested: a tiny configuration, its inputs, and batches of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm
from vllm_classes import TINY as TINY_QWEN3
from vllm_classes import frames_without_processor, internvl_without_tokenizer, tokenizer_of

from tests.vllm.inputs import Grids, Positioned, Rasters, Size, Slices, Tiles, Views, WholeAndTiles

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])
CONFIGS = json.loads(Path(__file__).with_name("tiny_configs.json").read_text("utf-8"))
PATCH, WIDTH = 4, 64
"""Of those configurations: pixels a side of a patch, and the hidden size."""

QWEN = Grids(3 * 2 * PATCH**2)
RAW_QWEN = Grids(QWEN.features, raw=True)
NORMALIZED = dict(do_normalize=True, do_rescale=True, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4])
IMAGES = [[(1, 8, 8)], [(1, 4, 8), (1, 8, 8), (1, 16, 8)], [(1, 2, 4)] * 6]
VIDEOS = [[(2, 8, 8)], [(2, 8, 8), (3, 8, 4)]]
TOO_LARGE = [(1, 32, 32)]
BY_GRIDS: dict[str, Any] = dict(
    inputs=QWEN, images=IMAGES, videos=VIDEOS, eager=[("image", TOO_LARGE), ("video", [(12, 4, 4)])]
)


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


TINY: dict[str, Tiny] = {
    "Qwen2-VL": Tiny(CONFIGS["Qwen2-VL"], **BY_GRIDS, adjust=few_frames),
    "Qwen2.5-VL": Tiny(CONFIGS["Qwen2.5-VL"], **BY_GRIDS, adjust=few_frames),
    "Qwen3-VL": Tiny(dict(TINY_QWEN3.config), **BY_GRIDS, adjust=few_frames),
    "GLM-4.1V": Tiny(CONFIGS["GLM-4.1V"], **BY_GRIDS),
    "InternVL": Tiny(
        CONFIGS["InternVL"],
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
        CONFIGS["Kimi-VL"],
        Rasters("image_grid_hws"),
        [[(8, 8)], [(4, 8), (8, 8), (16, 8)], [(2, 4)] * 6],
        eager=[("image", [(32, 32)])],
    ),
    "Kimi-K2.5": Tiny(
        CONFIGS["Kimi-K2.5"],
        Rasters("grid_thws"),
        IMAGES,
        eager=[("vision_chunk", [(1, 32, 32)]), ("vision_chunk", [(2, 8, 8)])],
        modality="vision_chunk",
    ),
    "Llama 4": Tiny(
        CONFIGS["Llama 4"],
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
        CONFIGS["Step3-VL"],
        Views(728, 504, "patch_pixel_values", "num_patches", grids=False),
        [[(0, 0)], [(2, 1), (0, 0), (1, 1)], [(2, 2)], [(1, 1)] * 6],
        eager=[("image", [(3, 3)] * 2)],
        budgets=(16, 32, 64),
    ),
    "DeepSeek-OCR": Tiny(
        CONFIGS["DeepSeek-OCR"],
        Views(256, 128, "images_crop", "images_spatial_crop", grids=True),
        [[(0, 0)], [(2, 1), (0, 0), (1, 3)], [(2, 2)], [(2, 1)] * 6],
        eager=[("image", [(4, 6)])],
        budgets=(20, 40, 80),
        small=small_deepseek_ocr,
    ),
    "DeepSeek-VL2": Tiny(
        CONFIGS["DeepSeek-VL2"],
        WholeAndTiles(64),
        [[(1, 1)], [(2, 1), (1, 1), (1, 3)], [(2, 2)], [(1, 1)] * 6],
        eager=[("image", [(4, 6)])],
        budgets=(16, 32, 64),
        small=small_deepseek_vl2,
        eager_by_vllm=True,
        since=(0, 33),
    ),
    "MiniCPM-V": Tiny(
        CONFIGS["MiniCPM-V"],
        Slices(2),
        [[[(30, 20)]], [[(30, 20)], [(10, 12), (32, 8)], [(32, 32)]], [[(40, 20)]]],
        [[[(20, 20), (20, 20)]]],
        [("image", [[(30, 20)], [(40, 20)] * 9])],
        budgets=(8, 16),
        rounding=1e-6,
        adjust=fixed_positions,
    ),
    "Gemma 4": Tiny(
        CONFIGS["Gemma 4"],
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
    CONFIGS["MiniMax-M3"],
    QWEN,
    IMAGES,
    eager=[("image", TOO_LARGE)],
    small=minimax_m3_of_a_cpu,
    adjust=flash_attention_by_name,
)
TINY["Gemma 3"] = Tiny(
    CONFIGS["Gemma 3"],
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
