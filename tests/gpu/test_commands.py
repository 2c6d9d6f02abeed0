"""Commands that measure: `bench` by every way, and `tune` with costs of this GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from fxsplit_encoder.cli.main import app
from fxsplit_encoder.cli.ways import WAYS
from fxsplit_encoder.manager.manager import trace_line
from fxsplit_encoder.planning.plan import Item
from fxsplit_encoder.protocol import EncoderItemSpec

pytestmark = pytest.mark.gpu


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{side}.png" for side in (224, 448)]
    for path in paths:
        Image.effect_noise((int(path.stem), int(path.stem)), 60).convert("RGB").save(path)
    return paths


@pytest.mark.parametrize("model", ["qwen3-vl-8b", "internvl3-8b", "deepseek-ocr"])
def test_every_way_is_right_and_timed(model: str, images: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "plot.png"
    result = run("bench", model, *images, "--blocks", 2, "--json", "-o", output)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.get("notes", []) == []
    for row in found["rows"]:
        assert all(row[f"{name}_ms".replace("-", "_")] > 0 for name in WAYS), row
        assert row["gain"] > 0
    assert found["advice"].startswith(("Use the manager", "Nothing to gain"))
    assert output.stat().st_size > 0


def test_tune_measures_and_uses_the_costs_of_this_gpu(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (trace_line([Item(EncoderItemSpec(4 * n, n))]) for n in (64, 200, 300) * 5)
    trace.write_text("".join(lines), encoding="utf-8")
    result = run("tune", trace, "--model", "qwen3-vl-8b", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["costs"], found["tuning"]["unit"]) == ("measured on this GPU", "ms")
    assert set(found["config"]["token_budgets"]) <= {64, 200, 300}


def test_demo_shows_times(images: list[Path]) -> None:
    result = run("demo", "--blocks", 2, "--json", *(each for path in images for each in ("--images", path)))
    assert result.exit_code == 0, result.output
    assert all(row["ratio"] > 0 for row in json.loads(result.stdout)["items"])
