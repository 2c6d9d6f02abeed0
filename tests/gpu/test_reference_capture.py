"""The reference capture of docs/capture.md gives what the library's own capture gives."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from tests.document_setups import PackedAdapter, PackedAttention

pytestmark = pytest.mark.gpu

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"
WIDTH, HEADS, BUDGET, SEGMENTS = 192, 4, 64, 4
CAPACITY = 4 * BUDGET
"""Patches; a token is 2 x 2 of them."""


@pytest.fixture(scope="module")
def tower() -> PackedAttention:
    torch.manual_seed(0)
    return PackedAttention(WIDTH, HEADS).to("cuda", torch.bfloat16).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def reference(tower: PackedAttention) -> Any:
    """What the page's first lines make, over this tower."""
    (code,) = re.findall(r"```python\n(.*?)\n\n\ncapture = ", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["ReferenceCapture"](tower, CAPACITY, SEGMENTS, WIDTH)


@pytest.fixture(scope="module")
def manager(tower: PackedAttention) -> Any:
    config = fx.EncoderConfig(
        mode="full",
        compile=False,
        packing="greedy",
        token_budgets=[BUDGET],
        max_items_per_batch=SEGMENTS,
        max_frames_per_batch=SEGMENTS,
        attention="torch_flash",
    )
    manager = fx.EncoderCudaGraphManager(PackedAdapter(tower), config)
    manager.capture()
    yield manager
    manager.clear()


BATCHES = [
    [(1, 16, 16)],  # as much as the capture holds
    [(1, 4, 4)],
    [(1, 8, 8), (1, 4, 8), (1, 2, 2), (1, 6, 8)],
    [(1, 2, 2)],
]


@torch.no_grad()
def test_it_gives_what_the_real_capture_gives(tower: PackedAttention, reference: Any, manager: Any) -> None:
    for number, grids in enumerate(BATCHES, start=1):
        lengths = [frames * height * width for frames, height, width in grids]
        patches = torch.randn(sum(lengths), WIDTH, device="cuda", dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        ours = reference(patches, cu_seqlens)
        real = torch.cat(manager.execute({"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}))
        assert ours.isfinite().all()
        assert torch.equal(ours, real), grids
        torch.testing.assert_close(ours, tower(patches, cu_seqlens.cuda()))
        replays = sum(budget.replays for budget in manager.stats().budgets.values())
        assert replays == number


@torch.no_grad()
def test_results_are_not_overwritten(reference: Any) -> None:
    lengths = torch.tensor([0, 16], dtype=torch.int32)
    first = reference(torch.ones(16, WIDTH, device="cuda", dtype=torch.bfloat16), lengths)
    kept = first.clone()
    reference(torch.zeros(16, WIDTH, device="cuda", dtype=torch.bfloat16), lengths)
    assert torch.equal(first, kept)
