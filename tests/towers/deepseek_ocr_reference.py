"""DeepSeek-OCR as plain loops over positions in float64, by the checkpoint's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.modules.deepseek_encoder import DeepseekOcrConfig, DeepseekOcrVisionModel

from .random_weights import randomize
from .tiny_views import deepseek_ocr_config
from .two_views import Crops, Family, resize_bicubic

CONFIG = deepseek_ocr_config(layers=2)


def make_model(config: DeepseekOcrConfig = CONFIG, seed: int = 5) -> DeepseekOcrVisionModel:
    model = randomize(DeepseekOcrVisionModel(config), seed)
    assert isinstance(model, DeepseekOcrVisionModel)
    return model


# --- the reference


class Reference:
    """The encoder from the tensors of a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor], config: DeepseekOcrConfig) -> None:
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = config

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        deviation = (centered.square().mean(-1, keepdim=True) + eps).sqrt()
        return centered / deviation * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def convolve(self, x_HWC: Tensor, name: str, stride: int, padding: int) -> Tensor:
        weight = self.tensors[f"{name}.weight"]
        kernel = weight.shape[-1]
        padded = torch.nn.functional.pad(x_HWC, (0, 0, padding, padding, padding, padding))
        steps = range(0, padded.shape[0] - kernel + 1, stride)
        rows = [
            [torch.einsum("hwc,ochw->o", padded[y : y + kernel, x : x + kernel], weight) for x in steps]
            for y in steps
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def attention(self, x: Tensor, projection: str, heads: int, bias: Any) -> Tensor:
        """(positions, hidden); `bias(query, position)` is what the scores of all keys get."""
        length, width = x.shape
        size = width // heads
        qkv = self.linear(x, projection).view(length, 3, heads, size)
        out = torch.zeros(length, heads, size, dtype=torch.float64)
        for head in range(heads):
            q, k, v = (qkv[:, part, head] for part in range(3))
            for i in range(length):
                scores = k @ q[i] / math.sqrt(size) + bias(q[i], i)
                out[i, head] = scores.softmax(0) @ v
        return out.view(length, width)

    # --- SAM

    def sam(self, image_CHW: Tensor) -> Tensor:
        sam = self.config.sam
        patch, weight = sam.patch_size, self.tensors["sam_model.patch_embed.proj.weight"]
        side = image_CHW.shape[1] // patch
        x = torch.zeros(side, side, sam.hidden_size, dtype=torch.float64)
        for row in range(side):
            for column in range(side):
                pixels = image_CHW[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
                x[row, column] = torch.einsum("ochw,chw->o", weight, pixels)
        x = x + self.tensors["sam_model.patch_embed.proj.bias"]
        x = x + resize_bicubic(self.tensors["sam_model.pos_embed"][0], side)
        for layer in range(sam.num_layers):
            prefix = f"sam_model.blocks.{layer}"
            normed = self.norm(x, f"{prefix}.norm1", sam.layer_norm_eps)
            window = side if layer in sam.global_layers else sam.window_size
            x = x + self.windowed(normed, f"{prefix}.attn", window)
            hidden = self.linear(self.norm(x, f"{prefix}.norm2", sam.layer_norm_eps), f"{prefix}.mlp.lin1")
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
            x = x + self.linear(hidden, f"{prefix}.mlp.lin2")
        x = self.norm(self.convolve(x, "sam_model.neck.0", 1, 0), "sam_model.neck.1", sam.layer_norm_eps)
        x = self.norm(self.convolve(x, "sam_model.neck.2", 1, 1), "sam_model.neck.3", sam.layer_norm_eps)
        return self.convolve(self.convolve(x, "sam_model.net_2", 2, 1), "sam_model.net_3", 2, 1)

    def windowed(self, x_HWC: Tensor, prefix: str, window: int) -> Tensor:
        side, width = x_HWC.shape[0], x_HWC.shape[2]
        per_side = math.ceil(side / window)
        padded = torch.zeros(per_side * window, per_side * window, width, dtype=torch.float64)
        padded[:side, :side] = x_HWC
        distances = [resize_linear(self.tensors[f"{prefix}.rel_pos_{axis}"], 2 * window - 1) for axis in "hw"]

        def bias(query: Tensor, position: int) -> Tensor:
            row, column = divmod(position, window)
            for_rows = torch.stack(
                [query @ distances[0][row - other + window - 1] for other in range(window)]
            )
            for_columns = torch.stack(
                [query @ distances[1][column - other + window - 1] for other in range(window)]
            )
            return (for_rows[:, None] + for_columns[None, :]).reshape(-1)

        for top in range(0, per_side * window, window):
            for left in range(0, per_side * window, window):
                tile = padded[top : top + window, left : left + window].reshape(-1, width).clone()
                attended = self.attention(tile, f"{prefix}.qkv", self.config.sam.num_heads, bias)
                attended = self.linear(attended, f"{prefix}.proj")
                padded[top : top + window, left : left + window] = attended.view(window, window, width)
        return padded[:side, :side]

    # --- CLIP, projector, assembly

    def features(self, image_CHW: Tensor) -> Tensor:
        """(side, side, out_hidden_size)."""
        clip, sam = self.config.clip, self.sam(image_CHW)
        side, width = sam.shape[0], sam.shape[2]
        table = self.tensors["vision_model.embeddings.position_embedding.weight"]
        stored = math.isqrt(table.shape[0] - 1)
        grid = resize_bicubic(table[1:].view(stored, stored, width), side)
        first = self.tensors["vision_model.embeddings.class_embedding"] + table[0]
        x = torch.cat((first[None], (sam + grid).reshape(-1, width)))
        x = self.norm(x, "vision_model.pre_layrnorm", clip.layer_norm_eps)
        for layer in range(clip.num_layers):
            prefix = f"vision_model.transformer.layers.{layer}"
            normed = self.norm(x, f"{prefix}.layer_norm1", clip.layer_norm_eps)
            attended = self.attention(
                normed, f"{prefix}.self_attn.qkv_proj", clip.num_heads, lambda query, position: 0
            )
            x = x + self.linear(attended, f"{prefix}.self_attn.out_proj")
            hidden = self.linear(
                self.norm(x, f"{prefix}.layer_norm2", clip.layer_norm_eps), f"{prefix}.mlp.fc1"
            )
            x = x + self.linear(hidden / (1 + torch.exp(-1.702 * hidden)), f"{prefix}.mlp.fc2")
        joined = torch.cat((x[1:], sam.reshape(-1, width)), dim=1)
        return self.linear(joined, "projector.layers").view(side, side, -1)


def resize_linear(table: Tensor, length: int) -> Tensor:
    """Between the centers of entries, the ends repeated."""
    old = table.shape[0]
    rows = []
    for i in range(length):
        at = min(max((i + 0.5) * old / length - 0.5, 0), old - 1)
        low = min(int(at), old - 1)
        high = min(low + 1, old - 1)
        rows.append((1 - (at - low)) * table[low] + (at - low) * table[high])
    return torch.stack(rows)


# --- the family


def make_inputs(crops: list[Crops], seed: int, config: DeepseekOcrConfig = CONFIG) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    count = sum(columns * rows for columns, rows in crops)
    grids = [grid if grid != (0, 0) else (1, 1) for grid in crops]
    return {
        "pixel_values": torch.randn(len(crops), 3, config.base_size, config.base_size, generator=generator),
        "images_crop": torch.randn(count, 3, config.image_size, config.image_size, generator=generator),
        "images_spatial_crop": torch.tensor(grids, dtype=torch.int64).view(-1, 2),
    }


def assemble(whole: Tensor, crops: Tensor, columns: int, newline: Tensor, separator: Tensor) -> Tensor:
    """An image's embedding, line by line, from (side, side, hidden) features; the crops come row by row."""
    rows = []
    for first in range(0, len(crops), columns or 1):
        for line in range(crops.shape[1]):
            rows += [*(crop[line] for crop in crops[first : first + columns]), newline[None]]
    for line in whole:
        rows += [line, newline[None]]
    return torch.cat([*rows, separator[None]])


@torch.no_grad()
def eager(model: DeepseekOcrVisionModel, inputs: dict[str, Any]) -> list[Tensor]:
    """Every image through a model of its own, tile by tile, with the weights that `model` has now."""
    fresh = DeepseekOcrVisionModel(model.config).train(False)
    fresh.load_state_dict(model.state_dict())
    crops = list(inputs["images_crop"])
    items = []
    for image, (columns, rows) in zip(
        inputs["pixel_values"], torch.as_tensor(inputs["images_spatial_crop"]).tolist(), strict=True
    ):
        count = columns * rows if columns * rows > 1 else 0
        own, crops = crops[:count], crops[count:]
        parts = [fresh(tile[None])[0] for tile in [image, *own]]
        whole, *tiles = (part.unflatten(0, (math.isqrt(part.shape[0]),) * 2) for part in parts)
        tiles_NHWC = torch.stack(tiles) if tiles else whole[:0, None]
        items.append(assemble(whole, tiles_NHWC, columns, fresh.image_newline, fresh.view_seperator))
    return items


def make_family(config: DeepseekOcrConfig, kind: type[Family] = Family) -> Family:
    model = make_model(config)
    return kind(
        fx.wrap(model),
        lambda crops, seed: make_inputs(crops, seed, config),
        lambda inputs: eager(model, inputs),
        lambda output: output,
    )
