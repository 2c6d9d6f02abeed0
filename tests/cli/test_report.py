"""`encoder-cg report`, of a run that a manager recorded."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from typer.testing import CliRunner, Result

import fxsplit_encoder as fx
from fxsplit_encoder.cli.main import app


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def trace(tiny_tower: Qwen3VLVisionModel, tmp_path: Path) -> Path:
    """Requests of one to three images, some replayed, some too large."""
    config = fx.EncoderConfig(token_budgets=(4, 16), max_items_per_batch=4, mode="breakable")
    manager = fx.EncoderCudaGraphManager(fx.wrap(tiny_tower), config)
    manager.record_trace(tmp_path / "run.jsonl")
    manager.capture()
    for grids in ([(1, 4, 4)], [(1, 4, 4), (1, 4, 6), (1, 4, 4)], [(1, 16, 16)]):
        patches = sum(height * width for _, height, width in grids)
        pixels = torch.randn(patches, 1536)
        manager.execute({"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)})
    return tmp_path / "run.jsonl"


class Page(HTMLParser):
    """The text of a page, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += [data.strip()] if data.strip() else []


def test_the_page_shows_the_run_and_needs_no_other_file(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    result = report(trace, "-o", output)
    assert result.exit_code == 0, result.output
    page = Page(output.read_text(encoding="utf-8"))
    assert page.open == [] and page.fetched == []
    assert "http" not in output.read_text(encoding="utf-8")
    text = " ".join(page.text)
    assert "Qwen3VLVisionModel, float32, on CPU" in text
    assert "3 requests 5 images and videos 80.0% served by replays" in text
    assert "Nothing was measured in this run, so output tokens stand in for time" in text
    assert "over_largest_budget 1 20.0% add a larger budget" in text
    assert "asked for 4, 16" in text
    assert "64 to 127 1" in text, "the sizes of items"


def test_the_tables_of_the_terminal(trace: Path) -> None:
    result = report(trace)
    assert result.exit_code == 0, result.output
    assert trace.with_suffix(".html").is_file()
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["default", "4", "breakable"] == rows[[row[:2] for row in rows].index(["default", "4"])][:3]
    assert "over_largest_budget      1  add a larger budget" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 110


def test_as_json(trace: Path) -> None:
    found = json.loads(report(trace, "--json").stdout)
    assert found["summary"]["misses"] == {"over_largest_budget": 1}
    assert [use["budget"] for use in found["summary"]["budgets"]] == [4, 16]
    assert found["places"][0] == {"place": "replays, for items", "cost": 18, "share": pytest.approx(18 / 84)}


def test_a_page_shows_milliseconds_where_they_were_measured(trace: Path) -> None:
    first, *rest = map(json.loads, trace.read_text(encoding="utf-8").splitlines())
    costs = {"replay_ms": {"4": 1.0, "16": 2.5}, "exact_ms": {"4": 6.0, "64": 9.0}, "not_kept_from": 64}
    first["run"]["paths"]["default"] |= {"costs": costs, "not_kept": [64]}
    first["run"]["notes"] = ["budget 8 <is> dropped"]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in [first, *rest]), encoding="utf-8")
    result = report(trace)
    assert "cost, ms" in result.stdout
    text = " ".join(Page(trace.with_suffix(".html").read_text(encoding="utf-8")).text)
    assert "On the device, predicted from what was measured at capture: 12.50 ms in all." in text
    assert "as fast at the exact shape, so not kept: 64" in text
    assert "budget 8 <is> dropped" in text


def test_mistakes_are_a_line(tmp_path: Path, trace: Path) -> None:
    sizes = tmp_path / "sizes.jsonl"
    sizes.write_text('{"items": [{"input_size": 4, "output_tokens": 1}]}\n', encoding="utf-8")
    cases = {
        (sizes,): "expected a run that EncoderCudaGraphManager.record_trace wrote",
        (tmp_path / "absent.jsonl",): "absent.jsonl: cannot be read",
        (trace, "-o", tmp_path): "a directory; expected the file to write",
        (trace, "-o", tmp_path / "page.txt"): "expected a name that ends in .html",
    }
    for arguments, message in cases.items():
        result = report(*arguments)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
        assert message in result.stderr
