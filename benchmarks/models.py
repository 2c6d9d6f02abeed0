"""The towers under test: how each is made, fed, run as it is, and run on prepared tensors."""

from __future__ import annotations

import functools
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from storage import ROOT
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from workloads import Request, most_square

import fxsplit_encoder as fx
from fxsplit_encoder.cli.ways import Prepared, prepare
from fxsplit_encoder.models.random import demo_tower, draw_weights
from fxsplit_encoder.models.registry import ARCHITECTURES, FAMILIES, architecture

DEFAULT_TOWERS = ("qwen3-vl-8b", "qwen2.5-vl-7b", "internvl3-8b", "deepseek-ocr")
TINY = "tiny"
TINY_SETTINGS: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 120,  # no multiple of 128, as in the real tower
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
"""Of Qwen3-VL's vision tower in narrow blocks, for machines without a GPU."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One request as tensors on the tower's device, random and never zeros."""

    mm_kwargs: dict[str, Any]
    """What the manager takes; grids and counts are on the CPU, where the model's processor leaves them."""
    calls: tuple[tuple[Tensor, ...], ...]
    """The arguments of the model's own calls; its grids are on the device."""
    patches: int
    """Rows that attention sees, class tokens left out."""


class Model(ABC):
    """A tower with random weights at a published size.

    `eager` runs the model that transformers has (sdpa). `adapter` wraps the same model in place and replaces
    the attention of packed towers, so `eager` comes first or not at all.
    """

    kind: ClassVar[str]
    """Its requests, a key of `workloads.WORKLOADS`."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.module = module
        parameter = next(module.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._generator = torch.Generator(self.device).manual_seed(1)

    @abstractmethod
    def batch(self, request: Request) -> Batch:
        """Random patches or tiles for a request."""

    @abstractmethod
    def eager(self, batch: Batch) -> Any:
        """The model's own forward, from its own inputs."""

    @functools.cached_property
    def adapter(self) -> Any:
        """The tower behind the manager's protocol."""
        return fx.wrap(self.module)

    def prepare(self, batch: Batch) -> Prepared:
        """The host metadata of a batch, computed and moved to the device."""
        return prepare(self.adapter, batch.mm_kwargs)

    def forward(self, prepared: Prepared) -> list[Tensor]:
        """The tower's eager forward on prepared tensors."""
        forward = self.adapter.encoder_cudagraph_forward
        outputs = {path: forward(dict(values), path=path) for path, values in prepared.inputs.items()}
        return self.adapter.items_of(outputs, prepared.tokens, prepared.mm_kwargs)

    def _random(self, *shape: int) -> Tensor:
        pixels = torch.randn(shape, generator=self._generator, device=self.device)
        return pixels.to(self.dtype)


class PackedModel(Model):
    """A tower of packed patches: Qwen's and GLM's."""

    kind = "packed"

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        config = module.config
        self.patch: int = config.patch_size
        self.merge: int = config.spatial_merge_size
        self.frames: int = config.temporal_patch_size
        self.features: int = config.in_channels * self.frames * self.patch**2

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches of an image or clip, each side rounded to whole merged patches as the processor does.

        The processor also enlarges images below its least number of pixels; here they stay small.
        """
        side = self.patch * self.merge
        rows, columns = (self.merge * max(1, round(length / side)) for length in (height, width))
        return math.ceil(frames / self.frames), rows, columns

    def batch(self, request: Request) -> Batch:
        images = [self.grid(1, *size) for size in request.images]
        clips = [self.grid(frames, *size) for frames, size in request.clips]
        mm_kwargs: dict[str, Any] = {}
        calls = []
        keys = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
        for (pixels_key, grid_key), grids in zip(keys, (images, clips), strict=True):
            if grids:
                pixels = self._random(sum(t * h * w for t, h, w in grids), self.features)
                mm_kwargs |= {pixels_key: pixels, grid_key: torch.tensor(grids)}
                calls.append((pixels, torch.tensor(grids, device=self.device)))
        return Batch(mm_kwargs, tuple(calls), sum(pixels.shape[0] for pixels, _ in calls))

    def eager(self, batch: Batch) -> Any:
        return [self.module(*arguments) for arguments in batch.calls]


class TilesModel(Model):
    """InternVL: an image is so many tiles, a clip so many frames, all of one size."""

    kind = "tiles"

    def batch(self, request: Request) -> Batch:
        config = self.module.config.vision_config
        counts = [*request.tiles, *(frames for frames, _ in request.clips)]
        pixels = self._random(sum(counts), config.num_channels, *config.image_size)
        patches = sum(counts) * math.prod(config.image_size) // math.prod(config.patch_size)
        return Batch({"pixel_values": pixels, "num_patches": counts}, ((pixels,),), patches)

    def eager(self, batch: Batch) -> Any:
        (arguments,) = batch.calls
        return self.module.get_image_features(*arguments, return_dict=True)


class PagesModel(Model):
    """DeepSeek-OCR: a page as a whole and as crops. transformers has no such tower; eager is our module."""

    kind = "pages"

    def batch(self, request: Request) -> Batch:
        config = self.module.config
        whole = self._random(len(request.tiles), 3, config.base_size, config.base_size)
        crops = self._random(sum(request.tiles), 3, config.image_size, config.image_size)
        mm_kwargs = {"pixel_values": whole, "images_crop": crops}
        mm_kwargs["images_spatial_crop"] = torch.tensor([most_square(count) for count in request.tiles])
        patch = config.sam.patch_size
        patches = sum(tiles.numel() // (3 * patch**2) for tiles in (whole, crops))
        calls = ((whole,), (crops,)) if sum(request.tiles) else ((whole,),)
        return Batch(mm_kwargs, calls, patches)

    def eager(self, batch: Batch) -> Any:
        return self.forward(self.prepare(batch))  # the adapter only adds newlines, as the model does


_KINDS: Mapping[str, type[Model]] = {
    TINY: PackedModel,
    "internvl3-8b": TilesModel,
    "internvl3-38b": TilesModel,
    "deepseek-ocr": PagesModel,
    **{name: PackedModel for name in ARCHITECTURES if name.startswith(("qwen", "glm"))},
}


def tower_names() -> list[str]:
    """The towers that `make_model` knows."""
    return list(_KINDS)


def kind_of(name: str) -> str:
    """The kind of requests that a tower takes."""
    return _KINDS[name].kind


@torch.no_grad()
def make_model(name: str, blocks: int | None, device: torch.device, dtype: torch.dtype) -> Model:
    """A tower with seeded random weights; `blocks` is the most, None all of them (of `TINY`: two)."""
    if name == TINY:
        return PackedModel(name, tiny_tower(blocks or 2).to(device, dtype))
    depth = None if blocks is None else min(blocks, ARCHITECTURES[name].blocks)
    return _KINDS[name](name, demo_tower(depth, device, dtype, model=name))


def tiny_tower(blocks: int = 2) -> Any:
    """A tower of `TINY_SETTINGS`, with the same random weights in every process."""
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(**{**TINY_SETTINGS, "depth": blocks})
    return Qwen3VLVisionModel(config).requires_grad_(False).eval()


def photographs(size: tuple[int, int]) -> list[bytes]:
    """The example pictures as JPEG files of one size, (width, height)."""
    from PIL import Image

    files = []
    for path in sorted((ROOT / "examples" / "images").iterdir()):
        stream = io.BytesIO()
        Image.open(path).convert("RGB").resize(size).save(stream, "JPEG", quality=90)
        files.append(stream.getvalue())
    return files


def make_checkpoint(directory: Path, model: str, blocks: int | None = None) -> Path:
    """A checkpoint of a model's vision tower with random weights, in bf16 where there is a GPU.

    Args:
        directory: to make.
        model: a name of `ARCHITECTURES`.
        blocks: its depth; None: the model's own.
    """
    settings = architecture(model).settings(blocks)
    family = FAMILIES[settings["model_type"]]
    tower = family.empty_tower(settings, torch.device("cpu"))
    draw_weights(tower, 0)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    prefix = next(iter(family.prefixes))
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    weights = {f"{prefix}{name}": each.to(dtype, copy=True) for name, each in tower.named_parameters()}
    save_file(weights, directory / "model.safetensors")
    return directory


def captured(tower: Any, **settings: Any) -> fx.EncoderCudaGraphManager:
    """A tower's manager under some settings, which logs nothing."""
    manager = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(**settings), log_interval=0)
    manager.capture()
    return manager


def rows_of(output: Any) -> Tensor:
    """(rows, columns) of whatever a variant returned, items and levels joined."""
    if isinstance(output, Tensor):
        return output.flatten(0, -2)
    if isinstance(output, list | tuple):
        return torch.cat([rows_of(part) for part in output])
    levels = getattr(output, "deepstack_features", None) or ()
    return torch.cat([rows_of(output.pooler_output), *levels], dim=-1)
