"""Runs that a manager recorded, read again; malformed ones are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.tuning.recording import read_run, recorded_costs
from fxsplit_encoder.tuning.trace import read_trace

COSTS = {"replay_ms": {"64": 1.0}, "exact_ms": {"64": 6.0}}
RUN: dict[str, Any] = {
    "tower": "Tower",
    "device": "GPU",
    "dtype": "bfloat16",
    "versions": {"torch": "2"},
    "config": {},
    "max_items_per_batch": 2,
    "max_frames_per_batch": 0,
    "notes": ["a note"],
    "paths": {
        "default": {
            "budgets": [64, 128],
            "captures": [{"budget": 64, "mode": "full", "num_bytes": 10}],
            "not_kept": [128],
            "costs": COSTS,
        }
    },
}
REQUEST: dict[str, Any] = {
    "items": [{"input_size": 200, "output_tokens": 50}],
    "batches": [
        {
            "items": [0],
            "output_tokens": 50,
            "paths": {"default": {"tokens": 50, "budget": 64, "result": "hit"}},
        }
    ],
    "host_ms": 0.25,
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def with_costs(costs: Any) -> dict[str, Any]:
    return {**RUN, "paths": {"default": {**RUN["paths"]["default"], "costs": costs}}}


def test_a_run_is_read_and_is_a_trace_too(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", {"run": RUN}, REQUEST, {"run": {**RUN, "tower": "Other"}}, REQUEST)
    recorded = read_run(path)
    assert [run.tower for run in recorded.runs] == ["Tower", "Other"]
    assert len(recorded.requests) == 2
    served = recorded.requests[0]
    assert served.host_ms == 0.25
    assert served.batches[0].paths["default"].budget == 64
    assert [[item.spec.output_tokens for item in request] for request in read_trace(path)] == [[50], [50]]


def test_the_last_run_says_what_it_cost(tmp_path: Path) -> None:
    later = {
        **RUN,
        "paths": {"default": {**RUN["paths"]["default"], "costs": {**COSTS, "not_kept_from": 128}}},
    }
    costs, current = recorded_costs(write(tmp_path / "run.jsonl", {"run": RUN}, REQUEST, {"run": later}))
    assert costs is not None
    assert costs["default"].not_kept_from == 128
    assert current == {"default": (64,)}


def test_what_was_not_measured_is_not_known(tmp_path: Path) -> None:
    on_cpu = write(tmp_path / "cpu.jsonl", {"run": with_costs(None)})
    assert recorded_costs(on_cpu) == (None, {"default": (64,)})
    nothing = {**RUN, "paths": {"default": {"budgets": [64]}}}
    assert recorded_costs(write(tmp_path / "nothing.jsonl", {"run": nothing})) == (None, {})
    assert recorded_costs(write(tmp_path / "sizes.jsonl", {"items": REQUEST["items"]})) == (None, {})


BAD: dict[str, tuple[list[Any], str]] = {
    "sizes alone": ([{"items": REQUEST["items"]}], "expected a run .* this file holds sizes alone"),
    "no request": ([{"run": RUN}], "this file holds no request"),
    "a run of nothing": ([{"run": {}}], "line 1, tower: Field required"),
    "a run that is none": ([{"run": 3}], "line 1, : Input should be a valid dictionary"),
    "a batch without paths": (
        [{"run": RUN}, {**REQUEST, "batches": [{"items": [0], "output_tokens": 1}]}],
        "line 2, paths: Field required",
    ),
    "batches that are none": ([{"run": RUN}, {**REQUEST, "batches": 3}], "line 2, batches: expected a list"),
    "a time that is none": (
        [{"run": RUN}, {**REQUEST, "host_ms": "x"}],
        "line 2, host_ms: expected milliseconds",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_run_is_named(name: str, tmp_path: Path) -> None:
    lines, message = BAD[name]
    with pytest.raises(InputError, match=message):
        read_run(write(tmp_path / "bad.jsonl", *lines))


def test_costs_that_are_malformed_are_named(tmp_path: Path) -> None:
    bad = with_costs({"replay_ms": {}})
    with pytest.raises(InputError, match="line 1, default: expected an object with replay_ms and exact_ms"):
        recorded_costs(write(tmp_path / "bad.jsonl", {"run": bad}))
