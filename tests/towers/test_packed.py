"""A packed tower of nobody's family: the example in docs/towers.md."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fxsplit_encoder as fx

ROOT = Path(__file__).parents[2]
GRIDS = [(1, 4, 8), (2, 4, 4), (1, 8, 8)]
"""In patches; the tower makes a token of 2 x 2."""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (source,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "towers.md").read_text("utf-8"), re.DOTALL
    )
    path = tmp_path_factory.mktemp("docs") / "packed_tower.py"
    path.write_text(source, encoding="utf-8")
    return SimpleNamespace(**runpy.run_path(str(path)))


def inputs(seed: int, grids: list[tuple[int, int, int]]) -> dict[str, Any]:
    rows = sum(t * h * w for t, h, w in grids)
    patches = torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": patches, "image_grid_thw": grids}


def expected(tower: Any, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Frame by frame, with torch's own attention; a frame's patches come in blocks of 2 x 2."""
    items, start = [], 0
    for frames, height, width in grids:
        tokens = [(row, column) for row in range(0, height, 2) for column in range(0, width, 2)]
        places = [(row + y, column + x) for row, column in tokens for y in (0, 1) for x in (0, 1)]
        rows = []
        for _ in range(frames):
            frame = patches[start : start + height * width]
            x = tower.embed(frame) + tower.place(torch.tensor(places, dtype=torch.float32))
            q, k, v = tower.qkv(x).view(-1, 3, 2, 8).permute(1, 2, 0, 3)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            rows.append(tower.merge((x + attended.transpose(0, 1).flatten(1)).view(-1, 64)))
            start += height * width
        items.append(torch.cat(rows))
    return items


def test_the_example_runs(example: Any) -> None:
    assert (example.first.shape, example.second.shape) == ((8, 32), (16, 32))
    assert [
        spec.output_tokens for spec in example.manager.tower.get_encoder_cudagraph_item_specs(example.images)
    ] == [8, 16]


@pytest.mark.parametrize("mode", ["auto", "full", "piecewise", "none"])
@torch.no_grad()
def test_it_computes_the_same_in_every_mode(example: Any, mode: str, fresh_dynamo: None) -> None:
    tower = example.Tower()
    config = fx.EncoderConfig(
        mode=mode, token_budgets=[16, 64], max_items_per_batch=4, piece_compiler="eager"
    )
    manager = fx.EncoderCudaGraphManager(example.Adapter(tower), config, log_interval=0)
    manager.capture()
    program = manager.programs["default"]
    assert program is not None
    assert len(program.program.splits) == 1
    assert str(program.program.padding) == "proved"
    counters.clear()
    for seed, grids in enumerate((GRIDS, GRIDS[:1], [(1, 24, 24)])):
        batch = inputs(seed, grids)
        for item, wanted in zip(
            manager.execute(batch), expected(tower, batch["pixel_values"], grids), strict=True
        ):
            torch.testing.assert_close(item, wanted, rtol=1e-5, atol=1e-5)
    assert not counters["stats"]
    assert not counters["graph_break"]


@torch.no_grad()
def test_it_compiles_once(example: Any, fresh_dynamo: None) -> None:
    tower = example.Tower()
    options = {"token_budgets": [16, 64]}
    compiled = torch.compile(example.Adapter(tower), backend="encoder_cg", fullgraph=True, options=options)
    for seed, grids in enumerate((GRIDS, GRIDS[:1], [(1, 24, 24)])):
        patches = inputs(seed, grids)["pixel_values"]
        wanted = torch.cat(expected(tower, patches, grids))
        torch.testing.assert_close(compiled(patches, torch.tensor(grids)), wanted, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.exhaustive
def test_the_class_and_the_example_need_no_transformers(example: Any) -> None:
    code = "import sys; sys.modules['transformers'] = None; exec(open(sys.argv[1]).read())"
    path = example.Tower.forward.__code__.co_filename
    subprocess.run([sys.executable, "-c", code, path], check=True, cwd=ROOT)
