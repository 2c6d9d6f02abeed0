"""Passes on the device: what they change must not show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxsplit_encoder as fx
from fxsplit_encoder.compile.passes import PASSES
from fxsplit_encoder.models.encoders.deepseek_encoder import (
    ClipConfig,
    DeepseekOcrConfig,
    DeepseekOcrVisionModel,
    SamConfig,
)
from fxsplit_encoder.models.random import demo_tower, draw_weights

from .support import relative_rms

pytestmark = pytest.mark.gpu

GRID = torch.tensor([[1, 28, 28], [1, 12, 20]])
LIMITS = {"token_budgets": (64, 256, 512), "max_items_per_batch": 4, "max_frames_per_batch": 4}


@pytest.fixture
def pixels(towers: Any) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = int(GRID.prod(1).sum())
    return torch.randn(rows, towers[2].patch_features, device="cuda", generator=generator)


def error(tower: Any, towers: Any, pixels: torch.Tensor, **settings: Any) -> float:
    """Of a captured tower, relative to float32."""
    config = fx.EncoderConfig(mode="full", packing="greedy", debug=True, **LIMITS, **settings)
    manager = fx.EncoderCudaGraphManager(tower, config)
    manager.capture()
    result = torch.cat(manager.execute({"pixel_values": pixels, "image_grid_thw": GRID}))
    assert manager.stats().hits == len(GRID)
    manager.clear()
    return relative_rms(result, packed(towers[1](pixels, GRID.cuda())))


def packed(output: Any) -> torch.Tensor:
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


@pytest.mark.parametrize("names", [*[(name,) for name in PASSES], tuple(PASSES)], ids="+".join)
@torch.no_grad()
def test_an_exact_pass_adds_no_error(names: tuple[str, ...], towers: Any, pixels: torch.Tensor) -> None:
    eager = relative_rms(
        packed(towers[0](pixels.bfloat16(), GRID.cuda())), packed(towers[1](pixels, GRID.cuda()))
    )
    assert error(towers[2], towers, pixels, passes=names) <= 1.1 * eager


@torch.no_grad()
def test_replays_see_weights_that_change_in_place(towers: Any, pixels: torch.Tensor) -> None:
    tower, reference = copy.deepcopy(towers[0]), copy.deepcopy(towers[1])
    config = fx.EncoderConfig(mode="full", packing="greedy", passes=tuple(PASSES), **LIMITS)
    manager = fx.EncoderCudaGraphManager(fx.wrap(tower), config)
    manager.capture()
    inputs = {"pixel_values": pixels, "image_grid_thw": GRID}
    before = torch.cat(manager.execute(inputs))
    for module in (tower, reference):
        for block in module.blocks:
            block.mlp.linear_fc1.weight.mul_(-2)
            block.mlp.linear_fc2.bias.add_(1)
    after = torch.cat(manager.execute(inputs))
    assert relative_rms(after, before) > 0.1
    assert relative_rms(after, packed(reference(pixels, GRID.cuda()))) < 0.05


def eagerly(tower: Any, inputs: dict[str, Any]) -> torch.Tensor:
    manager = fx.EncoderCudaGraphManager(fx.wrap(tower), fx.EncoderConfig(enabled=False))
    return torch.cat(manager.execute(inputs))


@torch.no_grad()
def test_relative_positions_as_features_add_no_error() -> None:
    """DeepSeek-OCR at its widths: two windowed blocks and a global one, at 1024 and at 640 pixels."""
    sam, clip = SamConfig(num_hidden_layers=3, global_layers=(2,)), ClipConfig(num_hidden_layers=1)
    reference = DeepseekOcrVisionModel(DeepseekOcrConfig(sam=sam, clip=clip)).cuda().requires_grad_(False)
    draw_weights(reference, 0)
    tower = copy.deepcopy(reference).bfloat16()
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = {
        "pixel_values": torch.randn(2, 3, 1024, 1024, device="cuda", generator=generator),
        "images_crop": torch.randn(4, 3, 640, 640, device="cuda", generator=generator),
        "images_spatial_crop": torch.tensor([[2, 2], [1, 1]]),
    }
    exact, eager = eagerly(reference, inputs), eagerly(tower, inputs)
    config = fx.EncoderConfig(mode="full", passes=("decomposed_bias",))
    manager = fx.EncoderCudaGraphManager(fx.wrap(tower), config)
    manager.capture()
    ours = torch.cat(manager.execute(inputs))
    assert {bound.program.pass_report["decomposed_bias"] for bound in manager.programs.values()} == {3}
    assert relative_rms(ours, exact) <= 1.1 * relative_rms(eager, exact)


@torch.no_grad()
def test_attention_over_a_batch_has_a_measured_kernel_and_adds_no_error() -> None:
    """InternVL at its width, whose tiles are 1025 tokens each."""
    tower = demo_tower(2, "cuda", torch.bfloat16, model="internvl3-8b")
    reference = copy.deepcopy(tower).float()
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = {
        "pixel_values": torch.randn(5, 3, 448, 448, device="cuda", generator=generator).bfloat16(),
        "num_patches": [1, 4],
    }
    exact = eagerly(reference, {**inputs, "pixel_values": inputs["pixel_values"].float()})
    eager = eagerly(tower, inputs)
    for mode in ("full", "piecewise", "none"):
        config = fx.EncoderConfig(
            mode=mode, packing="greedy", token_budgets=(256, 1024, 2048), passes=("dense_attention",)
        )
        manager = fx.EncoderCudaGraphManager(fx.wrap(tower), config)
        manager.capture()
        assert manager.programs["default"].program.pass_report == {"dense_attention": 2}
        for _ in range(2):
            ours = torch.cat(manager.execute(inputs))
            assert relative_rms(ours, exact) <= 1.1 * relative_rms(eager, exact)
        assert manager.stats().hits == (0 if mode == "none" else 4)
        manager.clear()


@pytest.mark.parametrize("others", [(), ("dense_attention",)], ids=str)
@torch.no_grad()
def test_one_layer_for_queries_keys_and_values_saves_two_kernels_a_block(others: tuple[str, ...]) -> None:
    """InternVL at its width: no copy takes the place of the products, and no error is added."""
    blocks = 2
    tower = demo_tower(blocks, "cuda", torch.bfloat16, model="internvl3-8b")
    pixels = torch.randn(4, 3, 448, 448, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs = {"pixel_values": pixels.bfloat16(), "num_patches": [4]}
    precise = copy.deepcopy(tower).float()
    exact = eagerly(precise, {**inputs, "pixel_values": inputs["pixel_values"].float()})
    kernels: dict[str, list[int]] = {"full": [], "piecewise": []}
    errors: list[float] = []
    for mode, counts in kernels.items():
        for names in (others, (*others, "merged_projections")):
            config = fx.EncoderConfig(mode=mode, packing="greedy", token_budgets=(1024,), passes=names)
            manager = fx.EncoderCudaGraphManager(fx.wrap(copy.deepcopy(tower)), config)
            manager.capture()
            found = manager.programs["default"].program.pass_report.get("merged_projections", 0)
            assert found == (blocks if names != others else 0)
            errors.append(relative_rms(torch.cat(manager.execute(inputs)), exact))
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                manager.execute(inputs)
                torch.cuda.synchronize()
            # cuBLAS clears a workspace before some products, which is no kernel; and where weights are merged
            # one kernel a replay compares samples of them.
            ran = [e for e in profile.key_averages() if not e.key.startswith(("Mem", "_compare"))]
            counts.append(sum(event.count for event in ran))
            manager.clear()
    assert max(errors) <= 1.1 * min(errors)
    assert all(merged <= apart - 2 * blocks for apart, merged in kernels.values()), kernels


@pytest.mark.parametrize("rows", [1, 196, 3136])
@torch.no_grad()
def test_the_epilogue_is_the_gelu_behind_the_product(rows: int) -> None:
    x = torch.randn(rows, 1152, device="cuda").bfloat16()
    weight = (torch.randn(4304, 1152, device="cuda") * 1152**-0.5).bfloat16()
    bias = torch.randn(4304, device="cuda").bfloat16()
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    separate = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    fused = torch.ops.fxsplit.addmm_gelu(bias, x, weight.t())
    assert relative_rms(fused, exact) <= 1.05 * relative_rms(separate, exact)
