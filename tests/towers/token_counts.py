"""How many tokens the language model reserves for each item, by every family's own processors.

Image processors are those that need no torchvision. Text processors say what an image or a video becomes in
the prompt; they are made here without a tokenizer, which that does not need. No video processor works without
torchvision, so the videos' grids are made by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from .tiny_inputs import TileInputs
from .tiny_packed import PATCH

TOKEN = "#"
"""Stands for the image's or the video's token in a prompt."""


class Counted(NamedTuple):
    """Inputs, and what belongs to each of their items."""

    inputs: dict[str, Any]
    tokens: list[int]
    patches: list[int] | None = None
    """Where the processor tells: the rows that an image attends over, or its tiles; of images only."""


@dataclass(frozen=True)
class Counts:
    """Where a class's counts come from."""

    source: str
    """The processors."""
    count: Callable[[], Counted]


def prompts_of(processor: type, **attributes: Any) -> Any:
    """A text processor with these attributes and nothing else."""
    made: Any = object.__new__(processor)
    tokens = {
        **dict.fromkeys(("image_token", "video_token"), TOKEN),
        **dict.fromkeys(("start_image_token", "end_image_token"), ""),
        **dict.fromkeys(("vision_start_token", "vision_end_token"), ""),
    }
    made.__dict__.update({**tokens, **attributes})
    return made


def random_image(height: int, width: int) -> Any:
    return np.random.default_rng(height).integers(0, 255, (height, width, 3), dtype=np.uint8)


# --- grids


def by_grids(text: type, images: type, tile: int = PATCH) -> Counts:
    """Towers of the Qwen line and those with the same processors."""

    def count() -> Counted:
        sizes = [(40, 24), (8, 8), (33, 90), (64, 64), (17, 121)]
        pixels = {"shortest_edge": 16 * tile**2, "longest_edge": 400 * tile**2}
        processor: Any = images(patch_size=tile, size=pixels)
        inputs = dict(processor([random_image(*size) for size in sizes], return_tensors="pt"))
        patches = [processor.get_number_of_image_patches(*size) for size in sizes]
        assert len(inputs["pixel_values"]) == sum(patches)
        sizes_only = SimpleNamespace(merge_size=processor.merge_size, temporal_patch_size=2)
        prompts = prompts_of(text, image_processor=sizes_only, video_processor=sizes_only)
        grids = [(2, 4, 6), (1, 2, 2), (5, 4, 4)]
        tokens = [prompts.replace_image_token(inputs, i).count(TOKEN) for i in range(len(sizes))]
        videos = {
            "pixel_values_videos": torch.zeros(
                sum(t * h * w for t, h, w in grids), inputs["pixel_values"].shape[1]
            ),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": [
                VideoMetadata(total_num_frames=2 * t, fps=2.0, frames_indices=list(range(2 * t)))
                for t, _, _ in grids
            ],
        }
        tokens += [prompts.replace_video_token(videos, i).count(TOKEN) for i in range(len(grids))]
        return Counted({**inputs, **videos}, tokens, patches)

    return Counts(f"{images.__name__}, {text.__name__}", count)


def kimi_k25() -> Counted:
    """The second video is two clips: four frames, then two."""
    images, clips = [(1, 4, 6), (1, 12, 10)], [(4, 4, 6), (4, 2, 8), (2, 2, 8)]
    sizes_only = SimpleNamespace(merge_size=2, temporal_patch_size=4)
    prompts = prompts_of(Kimi_K25Processor, image_processor=sizes_only, video_processor=sizes_only)
    inputs = {
        "image_grid_thw": torch.tensor(images),
        "video_grid_thw": torch.tensor(clips),
        "num_chunks_per_video": [1, 2],
        "video_metadata": [
            VideoMetadata(total_num_frames=n, fps=2.0, frames_indices=list(range(n))) for n in (4, 6)
        ],
    }
    tokens = [prompts.replace_image_token(inputs, i).count(TOKEN) for i in range(len(images))]
    for video in range(2):
        clips_of_video = prompts.replace_video_token(inputs, video).split("<|media_begin|>")[1:]
        tokens += [clip.count(TOKEN) for clip in clips_of_video]
    return Counted(inputs, tokens)


# --- tiles


def internvl() -> Counted:
    sizes = [(16, 16), (40, 20), (20, 70), (64, 64)]
    processor: Any = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4
    )
    inputs = dict(processor([random_image(*size) for size in sizes], return_tensors="pt"))
    tiles = [processor.get_number_of_image_patches(*size, {}) for size in sizes]
    assert max(tiles) > 2
    inputs["pixel_values_videos"] = [torch.zeros(frames, *TileInputs.TILE) for frames in (3, 1)]
    prompts = prompts_of(InternVLProcessor, image_seq_length=TileInputs.TOKENS)
    tokens = [prompts.replace_image_token(inputs, i).count(TOKEN) for i in range(len(sizes))]
    tokens += [prompts.replace_video_token(inputs, i).count(TOKEN) for i in range(2)]
    return Counted(inputs, tokens, tiles)


def llama4() -> Counted:
    """An image of several tiles has the whole image as one more."""
    ratios = [(1, 1), (2, 2), (1, 3)]
    inputs = {"pixel_values": torch.zeros(1 + 5 + 4, *TileInputs.TILE), "aspect_ratios": torch.tensor(ratios)}
    prompts = prompts_of(Llama4Processor, patch_size=4, downsample_ratio=4)
    tokens = [prompts.replace_image_token(inputs, i).count("<|patch|>") for i in range(len(ratios))]
    return Counted(inputs, tokens)


# --- the table

NO_TORCHVISION = "its image processor needs torchvision"
QWEN3 = by_grids(Qwen3VLProcessor, Qwen2VLImageProcessorPil)
GLM4V = by_grids(Glm4vProcessor, Glm4vImageProcessorPil)
GLM46V = by_grids(Glm46VProcessor, Glm46VImageProcessorPil)
INTERNVL = Counts("GotOcr2ImageProcessorPil, InternVLProcessor", internvl)
LLAMA4 = Counts(f"Llama4Processor, {NO_TORCHVISION}", llama4)

QWEN25 = by_grids(Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil)

COUNTS: dict[str, tuple[Counts, ...]] = {
    "Exaone4_5_VisionModel": (QWEN25,),
    "Glm4vMoeVisionModel": (GLM4V, GLM46V),
    "Glm4vVisionModel": (GLM4V, GLM46V),
    "InternVLForConditionalGeneration": (INTERNVL,),
    "InternVLModel": (INTERNVL,),
    "Kimi_K25VisionModel": (Counts(f"Kimi_K25Processor, {NO_TORCHVISION}", kimi_k25),),
    "Llama4ForConditionalGeneration": (LLAMA4,),
    "Llama4VisionModel": (LLAMA4,),
    "Qwen2VisionTransformerPretrainedModel": (by_grids(Qwen2VLProcessor, Qwen2VLImageProcessorPil),),
    "Qwen2_5OmniVisionEncoder": (QWEN25,),
    "Qwen2_5_VisionTransformerPretrainedModel": (QWEN25,),
    "Qwen3VLMoeVisionModel": (QWEN3,),
    "Qwen3VLVisionModel": (QWEN3,),
    "Qwen3_5MoeVisionModel": (QWEN3,),
    "Qwen3_5VisionModel": (QWEN3,),
    # Transformers has no processor of these, or one for published sizes alone: their own files have counts.
    **dict.fromkeys(("DeepseekOcrVisionModel", "KimiVLVisionModel", "Step3VisionModel"), ()),
    **dict.fromkeys(("Step3p7Model", "Step3p7VisionModel"), ()),
}
