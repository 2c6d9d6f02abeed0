"""Runs that a manager recorded, read again; malformed ones are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.plan import Item
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.tuning.trace import Request, read_run, read_trace, trace_demands, traced_paths

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
        dict(items=[0], output_tokens=50, paths={"default": {"tokens": 50, "budget": 64, "result": "hit"}})
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
    assert [[item.output_tokens for item in each.items] for each in read_trace(path).requests] == [[50], [50]]


def test_a_run_says_what_it_cost_and_captured(tmp_path: Path) -> None:
    (run,), _ = read_trace(
        write(tmp_path / "run.jsonl", {"run": with_costs({**COSTS, "not_kept_from": 128})})
    )
    costs = run.costs()
    assert costs is not None
    assert (costs["default"].not_kept_from, costs["default"].unit) == (128, "ms")
    assert (run.ladders(), run.packing) == ({"default": (64,)}, "cost")


def test_what_was_not_measured_is_not_known(tmp_path: Path) -> None:
    (on_cpu,), _ = read_trace(write(tmp_path / "cpu.jsonl", {"run": with_costs(None)}))
    assert (on_cpu.costs(), on_cpu.ladders()) == (None, {"default": (64,)})
    nothing = {**RUN, "config": {"packing": "greedy"}, "paths": {"default": {"budgets": [64]}}}
    (empty,), _ = read_trace(write(tmp_path / "nothing.jsonl", {"run": nothing}))
    assert (empty.costs(), empty.ladders(), empty.packing) == (None, None, "greedy")


BAD: dict[str, tuple[list[Any], str]] = {
    "sizes alone": ([{"items": REQUEST["items"]}], "expected a run .* this file holds sizes alone"),
    "a run that is none": ([{"run": 3}], "line 1, run.run: Input should be an object"),
    "a batch without paths": (
        [{"run": RUN}, {**REQUEST, "batches": [{"items": [0], "output_tokens": 1}]}],
        "line 2, request.batches.0.paths: Field required",
    ),
    "costs without times": (
        [{"run": with_costs({"replay_ms": {"64": 1}})}],
        "default.costs.exact_ms: Field required",
    ),
    "no costs": ([{"run": with_costs({**COSTS, "exact_ms": {}})}], "exact_ms: .* at least 1 item"),
    "costs that are none": ([{"run": with_costs({**COSTS, "exact_ms": {"6": True}})}], "6: .* valid number"),
}


@pytest.mark.parametrize(("lines", "message"), BAD.values(), ids=BAD)
def test_what_is_no_run_is_named(lines: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_run(write(tmp_path / "bad.jsonl", *lines))


def request(*tokens: int) -> Request:
    return tuple(Item(EncoderItemSpec(4 * n, n)) for n in tokens)


def two_path_request(*tokens: tuple[int, int]) -> Request:
    return tuple(Item(EncoderItemSpec(4 * (a + b), a + b, {"global": a, "local": b})) for a, b in tokens)


GOOD = '{"items": [{"input_size": 4, "output_tokens": 1}]}'
BAD_LINES = {
    "{": "Invalid JSON",
    "{}": "request.items: Field required; got {}",
    '{"items": [], "time": 3}': "request.time: Extra inputs are not permitted; got 3",
    '{"items": [{"input_size": 4}]}': "request.items.0.output_tokens: Field required",
    '{"items": [{"input_size": 4, "output_tokens": 1, "segment": 2}]}': (
        "request.items.0.segment: Extra inputs are not permitted"
    ),
    '{"items": [{"input_size": 4, "output_tokens": 1, "path_output_tokens": {"a": 1.5}}]}': (
        "request.items.0.path_output_tokens.a: Input should be a valid integer"
    ),
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 3")
    assert BAD_LINES[line] in str(caught.value)


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InputError, match=r"trace\.jsonl: cannot be read: No such file"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(InputError, match=r"trace\.jsonl: expected UTF-8 text"):
        read_trace(path)
    path.write_bytes(b"")
    assert read_trace(path) == ((), ())


def test_larger_requests_are_cut_by_ascending_size() -> None:
    demands = trace_demands([request(300, 50, 100, 1000, 200)], maximum=400, max_items_per_batch=8)
    assert demands == {"default": [350, 300, 1000]}
    demands = trace_demands([request(300, 50, 100, 1000, 200)], maximum=400, max_items_per_batch=1)
    assert demands == {"default": [50, 100, 200, 300, 1000]}


def test_paths_have_demands_of_their_own_and_none_where_they_are_skipped() -> None:
    requests = [two_path_request((10, 0), (10, 90)), two_path_request((20, 0))]
    assert traced_paths(requests) == ["global", "local"]
    assert trace_demands(requests, maximum=100, max_items_per_batch=8) == {"global": [20, 20], "local": [90]}
    # An item that is too large on one path is alone on the other path too.
    assert trace_demands(requests, maximum=50, max_items_per_batch=8) == {
        "global": [10, 10, 20],
        "local": [90],
    }
