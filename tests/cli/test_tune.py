"""`encoder-cg tune` of traces, and `encoder-cg report` of a run that a manager recorded."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.manager.manager import trace_line
from fxsplit_encoder.planning.plan import Item
from fxsplit_encoder.protocol import EncoderItemSpec

from ..models.checkpoints import save
from .conftest import run, succeed

EXAMPLE = Path(__file__).parents[2] / "examples" / "traces" / "chat_images.jsonl"


def write_trace(path: Path, *requests: list[EncoderItemSpec]) -> Path:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(trace_line([*map(Item, specs)]) for specs in requests)
    return path


def test_the_example_becomes_a_configuration(tmp_path: Path) -> None:
    output = tmp_path / "tuned.yaml"
    result = succeed(
        "tune", EXAMPLE, "--max-graphs", 8, "--max-budget", 4096, "--granularity", 32, "-o", output
    )
    config = EncoderConfig.from_yaml(output)
    assert len(config.token_budgets) == 8
    assert config.token_budgets[-1] <= 4096
    assert "without costs it is open which budgets a GPU keeps" in result.stdout
    assert "Nothing to gain but memory: the default ladder (" in result.stdout
    assert all(budget % 32 == 0 for budget in config.token_budgets)
    assert config.max_items_per_batch == 16
    assert config.model_fields_set == {"token_budgets", "max_items_per_batch"}
    first = output.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# Tuned for chat_images.jsonl: 200 requests, 1759 items; at most 8 graphs of each path."
    assert f"wrote {output}" in result.stdout.replace("\n", "")
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("default")]
    assert [row[1] for row in rows] == ["tuned", "default"]
    assert 0.98 < float(rows[0][-1]) < 1.02


def test_limits_costs_and_paths_end_up_in_the_configuration(tmp_path: Path) -> None:
    specs = [EncoderItemSpec(4 * n, n, {"global": 272, "local": n - 272}) for n in (372, 472, 672)]
    trace = write_trace(tmp_path / "trace.jsonl", *([spec] for spec in specs))
    measured = {"replay_ms": {"64": 1, "1024": 10}, "exact_ms": {"64": 6, "1024": 16}}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"global": measured, "local": measured}), encoding="utf-8")
    output = tmp_path / "tuned.yaml"
    result = succeed("tune", trace, "--max-graphs", 2, "--costs", costs, "--max-bytes", "2GiB", "-o", output)
    assert f"costs    {costs}" in result.stdout
    assert "in ms" in result.stdout
    config = EncoderConfig.from_yaml(output)
    assert {name: path.token_budgets for name, path in config.paths.items()} == {
        "global": (272,),
        "local": (200, 400),
    }
    assert (config.max_items_per_batch, config.max_graph_bytes) == (1, 2 * 2**30)


def test_ladders_are_judged_under_the_packing_that_is_asked_for(tmp_path: Path) -> None:
    output = tmp_path / "tuned.yaml"
    trace = write_trace(tmp_path / "trace.jsonl", *([EncoderItemSpec(400, 100)] * n for n in (1, 3, 5)))
    costs = {}
    for packing in get_args(Packing):
        result = succeed(
            "tune", trace, "--max-graphs", 1, "--max-budget", 300, "--packing", packing, "-o", output
        )
        assert f"packing  {packing}" in result.stdout
        assert EncoderConfig.from_yaml(output).packing == packing
        (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("default  tuned"))
        costs[packing] = float(row[-2])
    assert costs["cost"] < costs["greedy"]
    assert run("tune", trace, "--max-graphs", 1, "--max-bytes", 2**30, "-o", output).exit_code == 0
    written = EncoderConfig.from_yaml(output)
    assert (written.packing, written.max_graph_bytes) == (EncoderConfig().packing, 2**30)
    assert run("tune", trace, "--max-graphs", 1, "--packing", "best", "-o", output).exit_code == 2


def test_wrong_inputs_are_a_line_and_exit_code_2(tmp_path: Path) -> None:
    good = write_trace(tmp_path / "good.jsonl", [EncoderItemSpec(400, 100)])
    empty = write_trace(tmp_path / "empty.jsonl")
    without_items = write_trace(tmp_path / "without.jsonl", [])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"items": []}\n{"items": 3}\n', encoding="utf-8")
    nothing_pays = tmp_path / "nothing_pays.json"
    nothing_pays.write_text('{"replay_ms": {"64": 1}, "exact_ms": {"64": 1}}', encoding="utf-8")
    output = tmp_path / "tuned.yaml"
    cases = {
        (tmp_path / "absent.jsonl",): "absent.jsonl: cannot be read: No such file",
        (empty,): "empty.jsonl: expected one request per line; got an empty trace",
        (without_items,): "expected a trace with at least one item that has output tokens",
        (broken,): "broken.jsonl, line 2, items: expected a list; got 3",
        (good, "--max-bytes", "much"): "--max-bytes much: max_graph_bytes: not a size",
        (good, "--max-bytes", "1KiB"): "max_bytes: expected enough for",
        (good, "--max-budget", "50"): "maximum: expected at least 100 output tokens",
        (good, "--costs", tmp_path / "absent.json"): "absent.json: cannot be read",
        (good, "-o", tmp_path / "absent" / "x.yaml"): "x.yaml: no such directory",
        (good, "-o", tmp_path): "a directory; expected the file to write",
        (good, "--model", "absent"): "--model absent: no such directory or name",
        (good, "--costs", nothing_pays): "nothing to gain: of 1 sizes",
    }
    for arguments, message in cases.items():
        result = run("tune", "--max-graphs", 2, "-o", output, *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stderr.startswith("encoder-cg: error: ")
        assert len(result.stderr.splitlines()) == 1
    assert not output.exists()


def test_as_json_the_configuration_is_printed(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", *([EncoderItemSpec(400, n)] for n in (100, 300)))
    result = run("tune", trace, "--json")
    found = json.loads(result.stdout)
    assert found["config"] == {"token_budgets": [100, 300], "max_items_per_batch": 1}
    assert found["tuning"]["paths"]["default"]["tuned"]["padding_fraction"] == 0
    assert found["tuning"]["advice"].startswith("Nothing to gain but memory")
    text = run("tune", trace).stdout
    assert "token_budgets: [100, 300]" in text and "wrote" not in text


RECORDED = {
    "run": {
        "tower": "Tower",
        "device": "GPU",
        "dtype": "bfloat16",
        "versions": {},
        "config": {},
        "max_items_per_batch": 1,
        "max_frames_per_batch": 0,
        "paths": {
            "default": {
                "budgets": [64, 512, 1024],
                "captures": [{"budget": b, "mode": "full", "num_bytes": 1} for b in (64, 512)],
                "not_kept": [1024],
                "costs": {
                    "replay_ms": {"64": 1.0, "512": 4.5},
                    "exact_ms": {"64": 6.0, "512": 6.0, "1024": 9.0},
                    "not_kept_from": 1024,
                },
            }
        },
    }
}


def test_a_recorded_run_brings_its_costs_and_its_captures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(RECORDED) + "\n", encoding="utf-8")
    write_trace(trace, *([EncoderItemSpec(n, n)] for n in (100, 300, 2000) * 5))
    found = json.loads(run("tune", trace, "--json").stdout)
    assert found["costs"] == "measured by the recorded run"
    assert found["tuning"]["unit"] == "ms" and "notes" not in found
    (path,) = found["tuning"]["paths"].values()
    assert path["tuned"]["budgets"] == [100, 300]  # 2000 would not be kept
    assert (found["tuning"]["baseline"], path["baseline"]["budgets"]) == ("current", [64, 512])
    assert "less than the current ladder (2 graphs)" in found["tuning"]["advice"]


def test_costs_are_measured_on_a_gpu_alone(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [EncoderItemSpec(400, 100)])
    result = run("tune", trace, "--model", save(tmp_path / "qwen", "qwen2_vl")[1], "--device", "cpu")
    assert result.exit_code == 2
    assert "--model: costs are measured on a GPU; expected --device cuda; got cpu" in result.stderr


def test_measured_costs_are_written_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU measures is stood in for; the file, and what is made of it, are real."""
    measured = RECORDED["run"]["paths"]["default"]["costs"]
    monkeypatch.setattr(
        "fxsplit_encoder.cli.tune.measure_costs",
        lambda chosen, file: file.write_text(json.dumps({"default": measured}), encoding="utf-8"),
    )
    trace = write_trace(tmp_path / "trace.jsonl", *([EncoderItemSpec(n, n)] for n in (100, 2000)))
    model = save(tmp_path / "qwen", "qwen2_vl")[1]
    result = succeed("tune", trace, "--model", model, "--device", "cpu", "--json")
    found = json.loads(result.stdout)
    assert found["costs"] == str(tmp_path / "trace.costs.json")
    assert found["config"]["token_budgets"] == [100]


@pytest.mark.parametrize("arguments", [[], ["x"], ["x", "-o", "y"], ["x", "--max-graphs", "0"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run("tune", *arguments).exit_code == 2


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
    succeed("report", trace, "-o", output)
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
    result = succeed("report", trace)
    assert trace.with_suffix(".html").is_file()
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["default", "4", "breakable"] == rows[[row[:2] for row in rows].index(["default", "4"])][:3]
    assert "over_largest_budget      1  add a larger budget" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 110


def test_as_json(trace: Path) -> None:
    found = json.loads(run("report", trace, "--json").stdout)
    assert found["summary"]["misses"] == {"over_largest_budget": 1}
    assert [use["budget"] for use in found["summary"]["budgets"]] == [4, 16]
    assert found["places"][0] == {"place": "replays, for items", "cost": 18, "share": pytest.approx(18 / 84)}


def test_a_page_shows_milliseconds_where_they_were_measured(trace: Path) -> None:
    first, *rest = map(json.loads, trace.read_text(encoding="utf-8").splitlines())
    costs = {"replay_ms": {"4": 1.0, "16": 2.5}, "exact_ms": {"4": 6.0, "64": 9.0}, "not_kept_from": 64}
    first["run"]["paths"]["default"] |= {"costs": costs, "not_kept": [64]}
    first["run"]["notes"] = ["budget 8 <is> dropped"]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in [first, *rest]), encoding="utf-8")
    result = run("report", trace)
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
        result = run("report", *arguments)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
        assert message in result.stderr
