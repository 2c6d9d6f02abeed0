"""A packed tower of nobody's family: the example in docs/towers.md."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .conformance import Case, assert_compiled_once, assert_modes_agree
from .tiny_inputs import PackedInputs

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


@pytest.fixture(scope="module")
def case(example: Any) -> Case:
    return Case("Tower", example.Adapter(example.Tower()), PackedInputs((48,), videos=()))


@torch.no_grad()
def test_rows_are_those_of_the_tower_frame_by_frame(case: Case) -> None:
    patches = torch.randn(sum(t * h * w for t, h, w in GRIDS), 48)
    wanted = torch.cat(expected(case.tower.tower, patches, GRIDS))
    got = case.tower.encoder_eager_forward({"pixel_values": patches, "image_grid_thw": GRIDS})
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_it_computes_the_same_in_every_mode(case: Case) -> None:
    assert_modes_agree(case)
    program = case.manager.programs["default"]
    assert program is not None
    assert len(program.program.splits) == 1
    assert str(program.program.padding) == "proved"


def test_it_compiles_once(case: Case) -> None:
    assert_compiled_once(case)
