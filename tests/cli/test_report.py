"""What a recorded run comes to, and `encoder-cg report`, which shows it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.cli.report import (
    AT_EXACT_SHAPE,
    EAGERLY,
    IN_PADDING,
    IN_REPLAYS,
    WHAT_TO_DO,
    RunSummary,
    advice,
    summarize,
)
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.tuning.trace import RecordedRun, RunRecord, TracedRequest

from ..tuning.test_recording import RUN
from .conftest import refuse, run, succeed

COSTS = {"replay_ms": {"64": 1.0, "128": 2.0}, "exact_ms": {"64": 6.0, "128": 8.0}}


def recorded(costs: Any = None) -> RunRecord:
    captures = [{"budget": budget, "mode": "full", "num_bytes": 2**20} for budget in (64, 128)]
    path = {"budgets": [64, 128], "captures": captures, "costs": costs}
    return RunRecord.model_validate({**RUN, "paths": {"default": path}})


def served(*batches: dict[str, Any], host_ms: float = 1.0) -> TracedRequest:
    """A request; of each batch the path "default", an item each."""
    made = [
        {"items": [n], "output_tokens": path["tokens"], "paths": {"default": path}}
        for n, path in enumerate(batches)
    ]
    items = [{"input_size": 4 * path["tokens"], "output_tokens": path["tokens"]} for path in batches]
    return TracedRequest.model_validate({"items": items, "batches": made, "host_ms": host_ms})


def hit(tokens: int, budget: int, milliseconds: float | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "budget": budget, "result": "hit", "milliseconds": milliseconds}


def miss(tokens: int, reason: str, *, eager: bool = False) -> dict[str, Any]:
    return {"tokens": tokens, "result": reason, "eager": eager}


REQUESTS = (
    served(hit(48, 64), hit(128, 128), host_ms=2.0),
    served(hit(32, 64)),
    served(miss(200, "over_largest_budget"), host_ms=3.0),
    served(miss(100, "not_captured", eager=True), miss(100, "not_captured", eager=True)),
)


def summary(requests: tuple[TracedRequest, ...] = REQUESTS, costs: Any = None) -> RunSummary:
    return summarize(RecordedRun((recorded(costs),), requests))


def test_without_measured_costs_tokens_are_counted() -> None:
    found = summary()
    assert found.unit == "tokens"
    assert found.places == pytest.approx(
        {IN_REPLAYS: 48 + 32 + 128, IN_PADDING: 16 + 32, AT_EXACT_SHAPE: 200, EAGERLY: 200}
    )
    small, large = found.budgets
    assert (small.budget, small.replays, small.tokens, small.cost) == (64, 2, 80, 128)
    assert (small.padding_fraction, large.padding_fraction) == (48 / 128, 0)
    assert (found.requests, found.items, found.hit_fraction) == (4, 6, 0.5)
    assert found.misses == {"not_captured": 2, "over_largest_budget": 1}
    assert found.padding_fraction == pytest.approx(48 / 256)
    assert found.host_ms == {"median": 1.5, "p90": 3.0, "total": 7.0}


def test_measured_costs_are_milliseconds_also_where_none_was_predicted() -> None:
    found = summary((served(hit(32, 64, 1.5), hit(96, 128)), served(miss(128, "disabled"))), COSTS)
    assert found.unit == "ms"
    assert found.places == pytest.approx(
        {IN_REPLAYS: 0.75 + 1.5, IN_PADDING: 0.75 + 0.5, AT_EXACT_SHAPE: 8.0, EAGERLY: 0}
    )
    assert [(use.budget, use.cost) for use in found.budgets] == [(64, 1.5), (128, 2.0)]


def test_a_path_that_is_skipped_costs_nothing_and_misses_nothing() -> None:
    found = summary((served(hit(64, 64), {"tokens": 0, "result": "skipped"}),))
    assert sum(found.places.values()) == 64
    assert (found.misses, found.hit_fraction) == ({}, 1.0)


def test_captures_of_recurring_sizes_are_listed_too() -> None:
    found = summary((served(hit(100, 100)), served(hit(100, 100))))
    (exact,) = [use for use in found.budgets if not use.mode]
    assert (exact.budget, exact.replays, exact.num_bytes, exact.padding_fraction) == (100, 2, None, 0)


def test_advice_names_what_stands_out() -> None:
    missed, over = advice(summary())
    assert missed.startswith("33% of the items missed as not_captured: call capture()")
    assert over.startswith("17% of the items missed as over_largest_budget: add a larger budget")
    (unused,) = advice(summary((served(hit(64, 64)),)))
    assert unused == "1 of 2 budgets served nothing (1.0 MiB)."
    assert not [*advice(summary((served(hit(64, 64), hit(128, 128)),)))]
    (padding,) = advice(summary((served(hit(32, 64), hit(128, 128)),)))
    assert padding.startswith("17% of the work is padding")


def test_every_reason_has_a_remedy() -> None:
    assert all(WHAT_TO_DO[reason] for reason in MissReason)


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


def test_a_run_is_a_page_that_needs_no_other_file_tables_and_json(trace: Path) -> None:
    out = succeed("report", trace).stdout
    content = trace.with_suffix(".html").read_text(encoding="utf-8")
    page = Page(content)
    assert page.open == [] and page.fetched == [] and "http" not in content
    text = " ".join(page.text)
    assert "Qwen3VLVisionModel, float32, on CPU" in text
    assert "3 requests 5 images and videos 80.0% served by replays" in text
    assert "Nothing was measured in this run, so output tokens stand in for time" in text
    assert "over_largest_budget 1 20.0% add a larger budget" in text
    assert "asked for 4, 16" in text
    rows = [line.split() for line in out.splitlines()]
    assert ["default", "4", "breakable"] in [row[:3] for row in rows]
    assert "over_largest_budget      1  add a larger budget" in out
    assert max(map(len, out.splitlines()[:-1])) <= 110
    found = json.loads(run("report", trace, "--json").stdout)
    uses = [(use["budget"], use["padding_fraction"]) for use in found["summary"]["budgets"]]
    assert uses == [(4, 0), (16, pytest.approx(2 / 16))]
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
        (trace, "-o", tmp_path): "a directory; expected the file to write",
        (trace, "-o", tmp_path / "page.txt"): "expected a name that ends in .html",
    }
    for arguments, message in cases.items():
        refuse(message, "report", *arguments)
