import json
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner, Result

from fxsplit_encoder.cli.main import app
from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.planning import Item
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.tuning.trace import TraceWriter, read_trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "traces" / "chat_images.jsonl"


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def write_trace(path: Path, *requests: list[EncoderItemSpec]) -> Path:
    with TraceWriter(path) as writer:
        for specs in requests:
            writer.write(list(map(Item, specs)))
    return path


def test_the_example_becomes_a_configuration(tmp_path: Path) -> None:
    output = tmp_path / "tuned.yaml"
    result = tune(EXAMPLE, "--max-graphs", 8, "--max-budget", 4096, "--granularity", 32, "-o", output)
    assert result.exit_code == 0, result.output
    config = EncoderConfig.from_yaml(output)
    assert len(config.token_budgets) == 8
    assert config.token_budgets[-1] <= 4096
    assert all(budget % 32 == 0 for budget in config.token_budgets)
    assert config.max_items_per_batch == 16
    assert config.model_fields_set == {"token_budgets", "max_items_per_batch"}
    first = output.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# Tuned for chat_images.jsonl: 200 requests, 1759 items; at most 8 graphs of each path."
    assert f"wrote {output}" in result.stdout.replace("\n", "")
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("default")]
    ratios = [float(row[-1]) for row in rows]
    assert ratios[0] < ratios[1] == 1


def test_limits_costs_and_paths_end_up_in_the_configuration(tmp_path: Path) -> None:
    specs = [EncoderItemSpec(4 * n, n, {"global": 272, "local": n - 272}) for n in (372, 472, 672)]
    trace = write_trace(tmp_path / "trace.jsonl", *([spec] for spec in specs))
    measured = {"replay_ms": {"64": 1, "1024": 10}, "exact_ms": {"64": 6, "1024": 16}}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"global": measured, "local": measured}), encoding="utf-8")
    output = tmp_path / "tuned.yaml"
    result = tune(trace, "--max-graphs", 2, "--costs", costs, "--max-bytes", "2GiB", "-o", output)
    assert result.exit_code == 0, result.output
    assert f"costs    {costs}" in result.stdout
    assert "in ms" in result.stdout
    config = EncoderConfig.from_yaml(output)
    assert {name: path.token_budgets for name, path in config.paths.items()} == {
        "global": (272,),
        "local": (200, 400),
    }
    assert (config.max_items_per_batch, config.max_graph_bytes) == (1, 2 * 2**30)


def test_bytes_may_be_a_plain_number(tmp_path: Path) -> None:
    output = tmp_path / "tuned.yaml"
    trace = write_trace(tmp_path / "trace.jsonl", [EncoderItemSpec(400, 100)])
    assert tune(trace, "--max-graphs", 1, "--max-bytes", 2**30, "-o", output).exit_code == 0
    assert EncoderConfig.from_yaml(output).max_graph_bytes == 2**30


def test_ladders_are_judged_under_the_packing_that_is_asked_for(tmp_path: Path) -> None:
    output = tmp_path / "tuned.yaml"
    trace = write_trace(tmp_path / "trace.jsonl", *([EncoderItemSpec(400, 100)] * n for n in (1, 3, 5)))
    costs = {}
    for packing in get_args(Packing):
        result = tune(trace, "--max-graphs", 1, "--max-budget", 300, "--packing", packing, "-o", output)
        assert result.exit_code == 0, result.output
        assert f"packing  {packing}" in result.stdout
        assert EncoderConfig.from_yaml(output).packing == packing
        (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("default  tuned"))
        costs[packing] = float(row[-2])
    assert costs["cost"] < costs["greedy"]
    assert tune(trace, "--max-graphs", 1, "-o", output).exit_code == 0
    assert EncoderConfig.from_yaml(output).packing == EncoderConfig().packing
    assert tune(trace, "--max-graphs", 1, "--packing", "best", "-o", output).exit_code == 2


def test_wrong_inputs_are_a_line_and_exit_code_2(tmp_path: Path) -> None:
    good = write_trace(tmp_path / "good.jsonl", [EncoderItemSpec(400, 100)])
    empty = write_trace(tmp_path / "empty.jsonl")
    without_items = write_trace(tmp_path / "without.jsonl", [])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"items": []}\n{"items": 3}\n', encoding="utf-8")
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
    }
    for arguments, message in cases.items():
        result = tune("--max-graphs", 2, "-o", output, *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stderr.startswith("encoder-cg: error: ")
        assert len(result.stderr.splitlines()) == 1
    assert not output.exists()


@pytest.mark.parametrize("arguments", [[], ["x"], ["x", "-o", "y"], ["x", "-o", "y", "--max-graphs", "0"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert tune(*arguments).exit_code == 2


def test_help() -> None:
    result = tune("--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_the_example_trace_is_what_its_description_says() -> None:
    requests = read_trace(EXAMPLE)
    counts = [len(request) for request in requests]
    assert (len(requests), min(counts), max(counts)) == (200, 1, 16)
    for request in requests:
        for spec in (item.spec for item in request):
            # 16 x 16 pixel patches, 2 x 2 of them a token, images from 256 x 256 pixels on.
            assert spec.input_size == 4 * spec.output_tokens
            assert spec.output_tokens >= 64
