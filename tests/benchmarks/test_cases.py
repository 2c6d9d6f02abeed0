"""The cases run on a CPU, and compare with eager what they time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import serving
import torch
from bench import parse
from cases import encoder, requests, towers
from decoder import TINY, Decoder
from storage import new_result
from worker import FLOOR

from fxsplit_encoder.models.registry import ARCHITECTURES

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "encoder": ["--quick", "--variants", "ours-auto", "--workloads", "1x64"],
    "requests": ["--tiny", "--repeats", "1"],
    "towers": ["--tiny", "--models", "kimi-vl-a3b"],
    "products": ["--tiny", "--rows", "4", "12"],
    "passes": ["--tiny", "--only", "default", "no passes"],
    "host": ["--tiny", "--samples", "2"],
    "accelerate": ["--tiny", "--samples", "1"],
    "start": ["--tiny", "--budgets", "[4, 16]"],
    "connector": ["--tiny", "--seconds", "0.2"],
    "data_parallel": ["--tiny", "--ranks", "1", "2", "--repeats", "2", "--images", "2"],
}
QUICK = ("encoder", "products")
MOST_ERROR = {"passes": 0.1, "products": 0.01, "towers": towers.ALLOWED_ERROR}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in OPTIONS],
)
def test_a_case_runs_on_a_cpu(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_dynamo: None
) -> None:
    output = tmp_path / f"{case}.json"
    arguments = parse([case, *OPTIONS[case], "--output", str(output)])
    assert not arguments.run(arguments)
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert (stored["case"], stored["gpu"]) == (case, None)
    assert stored["rows"] and not any("failure" in row for row in stored["rows"])
    errors = [row[name] for row in stored["rows"] for name in ("error", "rms error") if name in row]
    assert all(error <= MOST_ERROR.get(case, 1e-3) for error in errors)
    assert errors or case in ("host", "start", "connector")
    assert "|" in capsys.readouterr().out  # its table


@pytest.mark.exhaustive
def test_the_command_runs_a_case() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "host", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--samples" in done.stdout


def test_results_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "encoder.json"
    stored: list[int] = []

    def run_job(job: Any, timeout: float, on_row: Any, method: str) -> str | None:
        on_row({"tower": job.tower, "variant": job.variant, "workload": job.workloads[0], "p50": 1.0})
        stored.append(len(json.loads(path.read_text("utf-8"))["rows"]))
        return "stopped after 7 s" if job.variant == "eager" else None

    monkeypatch.setattr(encoder, "run_job", run_job)
    monkeypatch.setattr(encoder, "start_method", lambda: "")
    jobs = encoder.make_jobs(_parsed("--quick", "--variants", FLOOR, "graph-exact", "eager"), "cpu")
    result = new_result("encoder")
    encoder.measure(jobs, 7, result, path)
    assert stored == [1, 2]  # graph-exact needs CUDA
    assert result["rows"][-1]["failure"] == "stopped after 7 s"
    assert json.loads(path.read_text("utf-8"))["rows"] == result["rows"]


def test_results_name_the_versions_of_what_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.importlib.metadata.version", lambda name: f"1 of {name}")
    named = new_result("encoder")["attention packages"]
    assert named["nvidia-cutlass-dsl"] == "1 of nvidia-cutlass-dsl"
    assert {"flash-attn-4", "quack-kernels", "apache-tvm-ffi", "torch-c-dlpack-ext"} <= named.keys()
    pinned = (ROOT / "constraints.txt").read_text()
    for name in named.keys() - {"vllm"}:
        assert f"\n{name}==" in pinned


def test_requests_come_as_often_and_as_mixed_as_asked() -> None:
    media: Any = {"image": ["an image"], "video": ["a video"]}
    load = serving.arrivals({"image": 0.3, "video": 0.2}, media, 100.0, 20.0, 8, 3)
    assert load == serving.arrivals({"image": 0.3, "video": 0.2}, media, 100.0, 20.0, 8, 3)
    kinds = Counter(arrival.medium for arrival in load)
    assert len(load) == pytest.approx(2000, rel=0.1)
    assert kinds["an image"] == pytest.approx(600, rel=0.15)
    assert kinds["a video"] == pytest.approx(400, rel=0.15)
    assert [arrival.at for arrival in load] == sorted(arrival.at for arrival in load)


def test_an_engine_computes_every_token_once() -> None:
    load = serving.arrivals({}, {}, 1000.0, 0.05, 30, 5)
    decoder = Decoder(TINY, torch.device("cpu"), torch.float32)
    rows: list[int] = []
    step = decoder.step
    decoder.step = lambda count: (rows.append(count), step(count))[1]  # type: ignore[method-assign]
    run = serving.Engine(decoder, serving.Ready()).run(load)
    assert len(run.served) == len(load) > 20
    assert sum(count - TINY.slots for count in rows) == 30 * len(load)  # of the prompts
    assert all(request.came < request.first < request.last for request in run.served)
    assert len(run.step_seconds) == len(rows)


def test_what_is_chosen_is_measured() -> None:
    options = ["--towers", "internvl3-8b", "glm-4.1v-9b", "--workloads", "1x448", "tiles4"]
    jobs = encoder.make_jobs(_parsed(*options, "--variants", "eager", "--config", '{"mode": "full"}'), "cuda")
    assert [(job.tower, job.workloads) for job in jobs] == [
        ("internvl3-8b", ("tiles4",)),
        ("glm-4.1v-9b", ("1x448",)),
    ]
    assert {(job.dtype, job.samples, job.config["mode"]) for job in jobs} == {("bfloat16", 30, "full")}
    assert not encoder.make_jobs(_parsed("--towers", "deepseek-ocr", "--workloads", "1x448"), "cuda")


def test_every_family_is_measured_with_its_configuration() -> None:
    measured = {ARCHITECTURES[name].model_type for name in towers.MODELS}
    assert {known.model_type for known in ARCHITECTURES.values()} - measured == {"glm46v"}
    for name, file in towers.MODELS.items():
        assert file is None or towers.chosen_config(name, tiny=False).model_fields_set


def test_a_tower_that_fails_leaves_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, tiny: bool) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(towers, "Bench", fail)
    result = towers.measure(["clip-l-336", "step3p7"], tmp_path / "out.json", tiny=True)
    failures = [row["failure"] for row in result["rows"]]
    assert failures == ["RuntimeError: no clip-l-336", "RuntimeError: no step3p7"]


def test_a_summary_compares_request_by_request() -> None:
    eager, ours = requests.summary({"eager": [4.0, 1.0, 9.0], "ours": [1.0, 2.0, 3.0]})
    assert (eager["p50"], ours["mean"], ours["p99"]) == (4.0, 2.0, 3.0)
    assert ours["slowest / eager"] == 2.0


def _parsed(*options: str) -> Any:
    return parse(["encoder", *options])
