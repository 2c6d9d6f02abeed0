"""What the code of a page of docs/ takes as given: a model that the reader has, requests, a process group."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.kernels.attention import varlen_attention

ROOT = Path(__file__).parents[1]
Names = dict[str, Any]


def nothing() -> Names:
    """The page's code stands by itself."""
    return {}


def loaded_model() -> Names:
    """A model with a vision tower, and the inputs of two images."""
    from tests.document_checkpoints import small_model

    pixels, grid = torch.randn(48, 1536), torch.tensor([[1, 4, 8], [1, 4, 4]])
    return {"fx": fx, "torch": torch, "model": small_model(), "pixel_values": pixels, "grid_thw": grid}


def wrapped_tower() -> Names:
    """A tower of this library's, and a manager of it."""
    names = loaded_model()
    tower = fx.wrap(names["model"].model.visual)
    config = fx.EncoderConfig(token_budgets=[4, 16])
    images = {"pixel_values": names["pixel_values"], "image_grid_thw": names["grid_thw"]}
    manager = fx.EncoderCudaGraphManager(tower, config)
    return {**names, "images": images, "tower": tower, "config": config, "manager": manager}


def manager_in_a_folder() -> Names:
    """`wrapped_tower`; few budgets, nothing compiled."""
    names = wrapped_tower()
    config = fx.EncoderConfig(token_budgets=[4], compile=False)
    return {**names, "config": config, "manager": fx.EncoderCudaGraphManager(names["tower"], config)}


def one_rank() -> Names:
    """`wrapped_tower` where no ranks share its weights."""
    return {**wrapped_tower(), "tensor_parallel_group": None}


def model_of_transformers() -> Names:
    """A model as transformers makes it, and the inputs of a prompt with an image."""
    from tests.document_checkpoints import image_prompt, small_model

    return {"model": small_model(), "inputs": image_prompt()}


class PackedAttention(nn.Module):
    """Attention over packed patches, of which four make a row of the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(4 * width, width)

    def forward(self, patches: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(patches).view(len(patches), 3, self.heads, -1).unbind(1)
        attended = varlen_attention(q, k, v, cu_seqlens, patches.shape[0], q.shape[-1] ** -0.5)
        return self.merge((patches + attended.flatten(1)).view(-1, 4 * self.width))


class PackedAdapter(fx.PackedTower):
    metadata_columns: ClassVar[dict[str, Any]] = {}

    def __init__(self, tower: PackedAttention) -> None:
        super().__init__(tower, merge_size=2, patch_features=tower.width, out_hidden_size=tower.width)

    def metadata(self, grids: Any) -> dict[str, Any]:
        return {}

    def core(self, pixel_values: torch.Tensor, cu_seqlens: torch.Tensor, metadata: Any) -> Any:
        return self.tower(pixel_values, cu_seqlens)

    def packed_output(self, output: Any) -> torch.Tensor:
        return cast(torch.Tensor, output)


def recorded_on_a_cpu() -> Names:
    """A tower and a batch of three images, and the `real` embeddings of the library's own capture."""
    tower, patches = PackedAttention(48, heads=2).eval().requires_grad_(False), torch.randn(40, 48)
    config = fx.EncoderConfig(mode="full", compile=False, token_budgets=[16], packing="greedy")
    manager = fx.EncoderCudaGraphManager(PackedAdapter(tower), config)
    manager.capture()
    grids = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 4, 4]])
    real = torch.cat(manager.execute({"pixel_values": patches, "image_grid_thw": grids}))
    assert sum(budget.replays for budget in manager.stats().budgets.values()) == 1
    return {
        "BreakableCUDAGraphCapture": fx.BreakableCUDAGraphCapture,
        "tower": tower,
        "patches": patches,
        "cu_seqlens": torch.tensor([0, 8, 24, 40], dtype=torch.int32),
        "real": real,
    }


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route: Callable[..., Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.route is not None
        return x * 2 + self.route(x)


def routed_module() -> Names:
    """A module that reads a value on the host."""
    names = loaded_model()
    pixels, grid = names["pixel_values"], names["grid_thw"]
    x, another = torch.randn(4), torch.randn(4)
    return {
        "torch": torch,
        "table": torch.arange(4.0),
        "module": _Routed(),
        "x": x,
        "another": another,
        "model": names["model"],
        "pixels": pixels,
        "grid": grid,
    }


LOADING = frozenset({"quick_start"})
"""Pages whose code loads checkpoints; see tests/document_checkpoints.py."""

SETUPS: dict[str, Callable[[], Names]] = {
    "backend": loaded_model,
    "breakable": routed_module,
    "capture": recorded_on_a_cpu,
    "data_parallel": wrapped_tower,
    "hugging_face": model_of_transformers,
    "manager": one_rank,
    "start": manager_in_a_folder,
}
"""By the name of the page; a page without one stands by itself."""

FEW = '"mode": "full", "token_budgets": [16, 32]'
REPLACED: dict[str, dict[str, str]] = {
    "backend": {'"mode": "full"': FEW},
    "capture": {
        'device="cuda"': 'device="cpu"',
        "dtype=torch.bfloat16": "dtype=torch.float32",
        "stream = torch.cuda.Stream()": "stream = None",
        "        stream.wait_stream(torch.cuda.current_stream())\n": "",
        "        torch.cuda.current_stream().wait_stream(stream)\n": "",
        "torch.cuda.CUDAGraph()": "BreakableCUDAGraphCapture()",
        "torch.cuda.graph(self.graph, stream=stream)": "self.graph",
        "embeddings = capture(patches, cu_seqlens)": "embeddings = capture(patches, cu_seqlens)\n"
        "torch.testing.assert_close(embeddings, tower(patches, cu_seqlens))\n"
        "torch.testing.assert_close(embeddings, real)",
    },
    "data_parallel": {
        'init_process_group("nccl")': 'init_process_group("gloo", rank=0, world_size=1)',
        "data_parallel=True": "data_parallel=True, token_budgets=[4, 16]",
        '{"pixel_values": pixels, "image_grid_thw": grid}': "images",
    },
    "hugging_face": {"fx.accelerate(adapted)": 'fx.accelerate(adapted, {"mode": "breakable"})'},
}
"""What of a page's code a machine without GPUs runs otherwise: another transport, few budgets, no traces."""


def working_directory(path: Path) -> Path:
    """`path` as the examples expect a checkout to be: configurations, and a recorded run."""
    (path / "configs").symlink_to(ROOT / "configs")
    (path / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "examples" / "traces" / "chat_images.jsonl", path / "requests.jsonl")
    return path
