"""`encoder-cg tune` of traces."""

import json
from pathlib import Path

import pytest

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.manager.manager import trace_line
from fxsplit_encoder.planning.plan import Item
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.tuning.trace import RunRecord

from ..models.checkpoints import save
from ..tuning.test_recording import RUN
from .conftest import refuse, run, succeed

EXAMPLE = Path(__file__).parents[2] / "examples" / "traces" / "chat_images.jsonl"


def write_trace(path: Path, *requests: list[EncoderItemSpec]) -> Path:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(trace_line([*map(Item, specs)]) for specs in requests)
    return path


def test_the_example_becomes_a_configuration(tmp_path: Path) -> None:
    output = tmp_path / "tuned.yaml"
    result = succeed("tune", EXAMPLE, "--max-graphs", 8, "-o", output)
    config = EncoderConfig.from_yaml(output)
    assert len(config.token_budgets) == 8
    assert "without costs it is open which budgets a GPU keeps" in result.stdout
    assert "Nothing to gain but memory: the default ladder (" in result.stdout
    assert config.max_items_per_batch == 16
    assert config.model_fields_set == {"token_budgets", "max_items_per_batch"}
    first = output.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# Tuned for chat_images.jsonl: 200 requests, 1759 items; at most 8 graphs of each path."
    assert f"wrote {output}" in result.stdout.replace("\n", "")
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("default")]
    assert [row[1] for row in rows] == ["tuned", "default"]
    assert 0.98 < float(rows[0][-1]) < 1.02


def test_limits_and_paths_end_up_in_the_configuration(tmp_path: Path) -> None:
    specs = [EncoderItemSpec(4 * n, n, {"global": 272, "local": n - 272}) for n in (372, 472, 672)]
    trace = write_trace(tmp_path / "trace.jsonl", *([spec] for spec in specs))
    output = tmp_path / "tuned.yaml"
    succeed("tune", trace, "--max-graphs", 2, "--max-bytes", "2GiB", "-o", output)
    config = EncoderConfig.from_yaml(output)
    assert {name: path.token_budgets for name, path in config.paths.items()} == {
        "global": (272,),
        "local": (200, 400),
    }
    assert (config.max_items_per_batch, config.max_graph_bytes) == (1, 2 * 2**30)
    text = succeed("tune", trace).stdout
    assert "max_items_per_batch: 1" in text and "wrote" not in text


def test_wrong_inputs_are_a_line_and_exit_code_2(tmp_path: Path) -> None:
    good = write_trace(tmp_path / "good.jsonl", [EncoderItemSpec(400, 100)])
    empty = write_trace(tmp_path / "empty.jsonl")
    output = tmp_path / "tuned.yaml"
    cases = {
        (empty,): "empty.jsonl: expected one request per line; got an empty trace",
        (good, "--max-bytes", "much"): "--max-bytes much: max_graph_bytes: not a size",
        (good, "-o", tmp_path / "absent" / "x.yaml"): "x.yaml: no such directory",
        (good, "--model", "absent"): "--model absent: no such directory or name",
    }
    for arguments, message in cases.items():
        refuse(message, "tune", "--max-graphs", 2, "-o", output, *arguments)
    assert not output.exists()


MEASURED = {
    "budgets": [64, 512, 1024],
    "captures": [{"budget": b, "mode": "full", "num_bytes": 1} for b in (64, 512)],
    "not_kept": [1024],
    "costs": {
        "replay_ms": {"64": 1.0, "512": 4.5},
        "exact_ms": {"64": 6.0, "512": 6.0, "1024": 9.0},
        "not_kept_from": 1024,
    },
}
RECORDED = {**RUN, "config": {"packing": "greedy"}, "max_items_per_batch": 1, "paths": {"default": MEASURED}}


def test_a_recorded_run_brings_its_costs_and_its_captures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"run": RECORDED}) + "\n", encoding="utf-8")
    write_trace(trace, *([EncoderItemSpec(n, n)] for n in (100, 300, 2000) * 5))
    found = json.loads(run("tune", trace, "--json").stdout)
    assert found["costs"] == "measured by the recorded run"
    assert found["tuning"]["unit"] == "ms" and "notes" not in found
    tuned, current = found["tuning"]["ladders"]
    assert tuned["budgets"] == [100, 300]  # 2000 would not be kept
    assert (current["ladder"], current["budgets"]) == ("current", [64, 512])
    assert found["config"] == {"token_budgets": [100, 300], "max_items_per_batch": 1, "packing": "greedy"}
    assert "less than the current ladder (2 graphs)" in found["tuning"]["advice"]


def test_costs_are_measured_on_a_gpu_alone(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [EncoderItemSpec(400, 100)])
    model = save(tmp_path / "qwen", "qwen2_vl")[1]
    message = "--model: costs are measured on a GPU; expected --device cuda; got cpu"
    refuse(message, "tune", trace, "--model", model, "--device", "cpu")


def test_costs_of_this_gpu_go_before_the_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU measures is stood in for; what is made of it is real."""
    costs = RunRecord.model_validate(RECORDED).costs()
    monkeypatch.setattr("fxsplit_encoder.cli.tune.measure_costs", lambda chosen: costs)
    trace = write_trace(tmp_path / "trace.jsonl", *([EncoderItemSpec(n, n)] for n in (100, 2000)))
    model = save(tmp_path / "qwen", "qwen2_vl")[1]
    result = succeed("tune", trace, "--model", model, "--device", "cpu", "--json")
    found = json.loads(result.stdout)
    assert found["costs"] == "measured on this GPU"
    assert found["config"]["token_budgets"] == [100]
