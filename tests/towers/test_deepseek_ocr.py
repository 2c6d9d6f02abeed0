"""DeepSeek-OCR against plain loops over positions in float64, by the checkpoint's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.modules.clip_encoder import ClipConfig
from fxsplit_encoder.modules.deepseek_encoder import DeepseekOcrConfig, DeepseekOcrVisionModel
from fxsplit_encoder.modules.sam import SamConfig

from .random_weights import randomize
from .tiny_views import deepseek_ocr_config
from .token_counts import TOKEN, prompts_of
from .two_views import Crops, Family, TwoViewTests, assert_items, resize_bicubic

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


@pytest.fixture(scope="module")
def family() -> Family:
    return make_family(CONFIG)


@pytest.mark.slow
class TestDeepseekOcr(TwoViewTests):
    pass


@pytest.mark.slow
@torch.no_grad()
def test_the_manager_equals_the_plain_loops(family: Family) -> None:
    model = family.wrapped.tower
    inputs = make_inputs([(2, 1)], 3)
    reference = Reference(model.state_dict(), CONFIG)
    whole, *crops = (
        reference.features(tile.double()) for tile in [inputs["pixel_values"][0], *inputs["images_crop"]]
    )
    newline, separator = (reference.tensors[name] for name in ("image_newline", "view_seperator"))
    expected = assemble(whole, torch.stack(crops), 2, newline, separator)
    manager = family.manager(mode="full")
    assert_items(manager.execute(inputs), [expected])
    assert manager.stats().hits == 1


@pytest.mark.slow
@torch.no_grad()
def test_relative_positions_may_be_features_of_queries_and_keys() -> None:
    family = make_family(CONFIG)
    inputs = make_inputs([(2, 2), (0, 0)], 3)
    # The whole image's own forward is captured, untraced: a trace of each view tells nothing more.
    untraced = {"global": {"mode": "breakable"}}
    manager = family.manager(mode="full", passes=("decomposed_bias",), **untraced)
    assert_items(manager.execute(inputs), family.expected(inputs))
    assert manager.stats().hits == 2
    program = manager.programs["local"].program
    assert program.pass_report == {"decomposed_bias": CONFIG.sam.num_layers}
    assert program.padding.proved


# --- sizes


@pytest.mark.parametrize("size", [32, 48, 64, 80])
@torch.no_grad()
def test_tiles_of_every_mode_equal_the_plain_loops(size: int) -> None:
    """Smaller than the size whose positions are stored, the same, and larger, as 512, 640, 1024 and 1280."""
    config = deepseek_ocr_config(base_size=size, image_size=size)
    model = make_model(config)
    tile = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(size))
    expected = Reference(model.state_dict(), config).features(tile[0].double()).flatten(0, 1)
    torch.testing.assert_close(model(tile)[0], expected.float(), rtol=0, atol=1e-5)


PUBLISHED_MODES = [
    (1024, 640, 272, 100),
    (512, 512, 72, 64),
    (640, 640, 110, 100),
    (1280, 1280, 420, 400),
    (1280, 1024, 420, 256),
]
"""Pixels of a whole image and of a crop, and the rows of each."""


def narrow_config(base_size: int, image_size: int) -> DeepseekOcrConfig:
    """A model of the published patches and windows."""
    sam = SamConfig(
        hidden_size=8,
        num_layers=2,
        num_heads=1,
        mlp_size=8,
        global_layers=(1,),
        neck_channels=4,
        downsample_channels=(4, 8),
    )
    clip = ClipConfig(hidden_size=8, num_layers=1, num_heads=1, mlp_size=8)
    return DeepseekOcrConfig(
        base_size=base_size, image_size=image_size, out_hidden_size=4, sam=sam, clip=clip
    )


@pytest.mark.slow
@pytest.mark.parametrize(("base_size", "image_size", "whole", "crop"), PUBLISHED_MODES)
@torch.no_grad()
def test_published_modes_encode_images_of_their_own_sizes(
    base_size: int, image_size: int, whole: int, crop: int
) -> None:
    config = narrow_config(base_size, image_size)
    manager = fx.EncoderCudaGraphManager(fx.wrap(make_model(config)), fx.EncoderConfig(mode="none"))
    small, large = manager.execute(make_inputs([(0, 0), (2, 1)], 0, config))
    side = round(crop**0.5)
    assert (small.shape, large.shape) == ((whole + 1, 4), (whole + 1 + 2 * crop + side, 4))
    assert small.isfinite().all()
    assert large.isfinite().all()
    assert large.std() > 0.05


class GreedyFamily(Family):
    """Whose plans do not depend on what a token costs."""

    def manager(self, **config: Any) -> Any:
        return super().manager(packing="greedy", **config)


@pytest.mark.slow
class TestPublishedTokens:
    """The ways in which two paths are served, with the 110 tokens of a whole image of 640 pixels and the 100
    of a crop: that of 1024 pixels takes 2.56 times the patches, and six times the attention, to tell no more.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def family(cls) -> Family:
        return make_family(narrow_config(640, 640), GreedyFamily)

    def test_budgets(self, family: Family) -> None:
        assert family.budgets == {
            "global": {"token_budgets": [110, 220, 440]},
            "local": {"token_budgets": [200, 600]},
        }

    replays = staticmethod(TwoViewTests.replays)
    test_hit_and_hit = TwoViewTests.test_both_views_are_replayed
    test_hit_and_skipped = TwoViewTests.test_without_crops_their_view_is_skipped
    test_fallback_and_hit = TwoViewTests.test_a_view_without_captures_runs_at_its_exact_shape_beside_a_replay
    test_fallback_and_fallback = TwoViewTests.test_both_views_fall_back


@pytest.mark.parametrize(("base_size", "image_size", "whole", "crop"), PUBLISHED_MODES)
def test_tokens_of_the_published_modes(base_size: int, image_size: int, whole: int, crop: int) -> None:
    with torch.device("meta"):
        model = DeepseekOcrVisionModel(DeepseekOcrConfig(base_size=base_size, image_size=image_size))
    wrapped = fx.wrap(model)
    assert {path: view.tokens for path, view in wrapped.views.items()} == {"global": whole, "local": crop}
    assert wrapped.get_encoder_cudagraph_budget_range(None) == (whole, 8 * whole)
    assert wrapped.get_encoder_cudagraph_config().out_hidden_size == 1280


def test_rows_of_an_image_count_newlines_and_separator() -> None:
    with torch.device("meta"):
        wrapped = fx.wrap(DeepseekOcrVisionModel())
    inputs = {"images_spatial_crop": [(1, 1), (2, 1), (1, 2), (3, 2)]}
    specs = wrapped.get_encoder_cudagraph_item_specs(inputs)
    assert [spec.input_size for spec in specs] == [4096 + 1600 * crops for crops in (0, 2, 2, 6)]
    assert [spec.output_tokens for spec in specs] == [273, 273 + 10 * 21, 273 + 20 * 11, 273 + 20 * 31]
    assert [spec.path_output_tokens for spec in specs] == [
        {"global": 272, "local": 100 * crops} for crops in (0, 2, 2, 6)
    ]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="image_size: expected a positive multiple of 64 pixels; got 600"):
        DeepseekOcrVisionModel(DeepseekOcrConfig(image_size=600))
    with pytest.raises(InputError, match="SAM's features have 1024 channels; CLIP takes 768"):
        DeepseekOcrVisionModel(DeepseekOcrConfig(clip=ClipConfig(hidden_size=768)))
    with pytest.raises(InputError, match="a size of 64 or 48; got"):
        make_model()(torch.zeros(1, 3, 32, 32))
    wrapped = fx.wrap(make_model())
    with pytest.raises(
        InputError, match="images_spatial_crop: expected 2 non-negative integers for each image"
    ):
        wrapped.get_encoder_cudagraph_item_specs({"images_spatial_crop": [[1, 1], [2]]})


def test_crops_that_only_fill_a_place_are_ignored() -> None:
    model = make_model()
    wrapped = fx.wrap(model)
    inputs = make_inputs([(0, 0)], 0)
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="none"))
    (expected,) = manager.execute(inputs)
    for filler in (torch.zeros(1, 3, 64, 64), None):
        (item,) = manager.execute({**inputs, "images_crop": filler})
        assert torch.equal(item, expected)


# --- checkpoints


def checkpoint_names(config: DeepseekOcrConfig) -> set[str]:
    """What the published checkpoint holds beside the language model."""
    both, blocks, layers = ("weight", "bias"), range(config.sam.num_layers), range(config.clip.num_layers)
    sam = {
        "pos_embed",
        *(f"patch_embed.proj.{p}" for p in both),
        *(f"neck.{n}" for n in ("0.weight", "1.weight", "1.bias", "2.weight", "3.weight", "3.bias")),
        "net_2.weight",
        "net_3.weight",
        *(
            f"blocks.{b}.{name}.{p}"
            for b in blocks
            for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2")
            for p in both
        ),
        *(f"blocks.{b}.attn.rel_pos_{axis}" for b in blocks for axis in "hw"),
    }
    clip = {
        "embeddings.class_embedding",
        "embeddings.patch_embedding.weight",
        "embeddings.position_embedding.weight",
        *(f"pre_layrnorm.{p}" for p in both),
        *(
            f"transformer.layers.{n}.{name}.{p}"
            for n in layers
            for name in (
                "layer_norm1",
                "layer_norm2",
                "self_attn.qkv_proj",
                "self_attn.out_proj",
                "mlp.fc1",
                "mlp.fc2",
            )
            for p in both
        ),
    }
    return {
        *(f"model.sam_model.{name}" for name in sam),
        *(f"model.vision_model.{name}" for name in clip),
        *(f"model.projector.layers.{p}" for p in both),
        "model.image_newline",
        "model.view_seperator",
    }


@torch.no_grad()
def test_a_checkpoint_loads_by_its_own_names(tmp_path: Path) -> None:
    model = make_model()
    names = checkpoint_names(CONFIG)
    tensors = {name: model.get_parameter(name.removeprefix("model.")).clone() for name in names}
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = DeepseekOcrVisionModel(CONFIG)
    loaded.load_checkpoint(load_file(tmp_path / "model.safetensors"))
    tiles = torch.randn(1, 3, 48, 48)
    assert torch.equal(loaded(tiles), model(tiles))
    del tensors["model.sam_model.net_2.weight"]
    with pytest.raises(
        InputError, match=r"the checkpoint has no sam_model\.net_2\.weight \(1 tensors missing\)"
    ):
        loaded.load_checkpoint(tensors)


def test_the_names_are_all_there_and_the_published_model_has_400_million_parameters() -> None:
    with torch.device("meta"):
        model = DeepseekOcrVisionModel()
    assert {f"model.{name}" for name in model.state_dict()} == checkpoint_names(DeepseekOcrConfig())
    counts = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    assert counts == {"sam_model": 95_569_152, "vision_model": 303_177_728, "projector": 2_622_720}


# --- another dtype, and the model library's own tower


@torch.no_grad()
def test_bfloat16_after_a_forward_in_float32() -> None:
    """The folded tables follow the parameters' dtype."""
    model = make_model()
    tiles = torch.randn(2, 3, 48, 48)
    exact = model(tiles)
    got = model.to(torch.bfloat16)(tiles.bfloat16())
    assert got.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(got.float(), exact, dim=-1).min() > 0.99


@pytest.mark.parametrize("sizes", [(64, 48), (80, 32)])
@torch.no_grad()
def test_the_model_librarys_tower_computes_the_same(sizes: tuple[int, int]) -> None:
    """baidu/Unlimited-OCR has DeepSeek-OCR's encoder; transformers has it from 5.23 on."""
    modeling = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    configuration = pytest.importorskip("transformers.models.unlimited_ocr.configuration_unlimited_ocr")
    sam, clip = CONFIG.sam, CONFIG.clip
    library = modeling.UnlimitedOcrVisionModel(
        configuration.UnlimitedOcrVisionConfig(
            sam_config={
                "image_size": sam.image_size,
                "patch_size": sam.patch_size,
                "hidden_size": sam.hidden_size,
                "num_hidden_layers": sam.num_layers,
                "num_attention_heads": sam.num_heads,
                "mlp_dim": sam.mlp_size,
                "window_size": sam.window_size,
                "global_attn_indexes": sam.global_layers,
                "output_channels": sam.neck_channels,
                "downsample_channels": sam.downsample_channels,
            },
            encoder_config={
                "image_size": clip.image_size,
                "patch_size": clip.patch_size,
                "hidden_size": clip.hidden_size,
                "num_hidden_layers": clip.num_layers,
                "num_attention_heads": clip.num_heads,
                "intermediate_size": clip.mlp_size,
            },
        )
    ).train(False)
    model = make_model(deepseek_ocr_config(layers=2, base_size=sizes[0], image_size=sizes[1]))
    library.load_state_dict(library_names(model.state_dict()))
    for size in sizes:
        tiles = torch.randn(2, 3, size, size)
        expected = model.projector(library(tiles).last_hidden_state)
        torch.testing.assert_close(model(tiles), expected, rtol=0, atol=1e-5)


def test_the_model_librarys_prompt_has_a_token_for_every_row() -> None:
    processing = pytest.importorskip("transformers.models.unlimited_ocr.processing_unlimited_ocr")
    sizes = SimpleNamespace(size={"height": 1024, "width": 1024}, tile_size=640)
    prompts = prompts_of(
        processing.UnlimitedOcrProcessor, image_processor=sizes, patch_size=16, downsample_ratio=4
    )
    grids = [(1, 1), (2, 1), (1, 2), (3, 2)]
    counts = [columns * rows if columns * rows > 1 else 0 for columns, rows in grids]
    given = {"patches_grid": grids, "num_local_patches": counts}
    with torch.device("meta"):
        wrapped = fx.wrap(DeepseekOcrVisionModel())
    specs = wrapped.get_encoder_cudagraph_item_specs({"images_spatial_crop": grids})
    tokens = [prompts.replace_image_token(given, i).count(TOKEN) for i in range(len(grids))]
    assert [spec.output_tokens for spec in specs] == tokens


def library_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the model library's tower, queries, keys and values apart."""
    renamed = {
        "sam_model.blocks.": "sam_encoder.layers.",
        ".norm1.": ".layer_norm1.",
        ".norm2.": ".layer_norm2.",
        "patch_embed.proj.": "patch_embed.projection.",
        "neck.0.": "neck.conv1.",
        "neck.1.": "neck.layer_norm1.",
        "neck.2.": "neck.conv2.",
        "neck.3.": "neck.layer_norm2.",
        "net_2.": "proj.conv1.",
        "net_3.": "proj.conv2.",
        "sam_model.": "sam_encoder.",
        "vision_model.transformer.": "vision_encoder.encoder.",
        "vision_model.": "vision_encoder.",
    }
    result = {}
    for name, tensor in tensors.items():
        if not name.startswith(("sam_model", "vision_model")) or "patch_embedding" in name:
            continue
        new = name
        for old, replacement in renamed.items():
            new = new.replace(old, replacement)
        if "qkv_proj" in new:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                result[new.replace("qkv_proj", f"{part}_proj")] = piece
        else:
            result[new] = tensor
    return result
