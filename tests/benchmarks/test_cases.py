"""The cases run on a CPU, and compare with eager what they time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import serving
import torch
from bench import parse
from cases import encoder, towers
from cases.vllm_serving import AT_ONCE, _row, plugin_problem
from decoder import TINY, Decoder
from kernel_times import Kernel, kind_of, shares
from storage import Record, load, new_result
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
    "backend": ["--tiny"],
    "start": ["--tiny"],
    "connector": ["--tiny", "--seconds", "0.2"],
    "serve": ["--tiny"],
    "data_parallel": ["--tiny", "--ranks", "1", "2", "--repeats", "2", "--images", "2"],
}
QUICK = ("products",)
MOST_ERROR = {"passes": 0.1, "products": 0.01, "towers": towers.ALLOWED_ERROR}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in OPTIONS]
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
    assert not any("error" in row.get("reason", "") for row in stored["rows"])  # of a server
    errors = [row[name] for row in stored["rows"] for name in ("error", "rms error") if name in row]
    assert all(error <= MOST_ERROR.get(case, 1e-3) for error in errors)
    assert errors or case in ("host", "start", "connector", "serve")
    assert "|" in capsys.readouterr().out  # its table


def test_results_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "encoder.json"
    stored: list[int] = []

    def run_job(job: Any, timeout: float, on_row: Any, method: str, gpu: str | None) -> str | None:
        on_row({"tower": job.tower, "variant": job.variant, "workload": job.workloads[0], "p50": 1.0})
        stored.append(len(load(path)["rows"]))
        return "stopped after 7 s" if job.variant == "eager" else None

    monkeypatch.setattr(encoder, "run_job", run_job)
    monkeypatch.setattr(encoder, "start_method", lambda: "")
    jobs = encoder.make_jobs(_parsed("--quick", "--variants", FLOOR, "graph-exact", "eager"), "cpu")
    record = Record("encoder", path)
    encoder.measure([jobs], 7, record)
    assert stored == [1, 2]  # graph-exact needs CUDA
    assert record.rows[-1]["failure"] == "stopped after 7 s"
    assert load(path)["rows"] == record.rows


def test_a_row_of_several_starts_is_the_median_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def run_job(job: Any, timeout: float, on_row: Any, method: str, gpu: str | None) -> None:
        seen.append(gpu)
        row = {"tower": job.tower, "variant": job.variant}
        on_row({**row, "workload": "1x64", "p50": {"a": 3.0, "c": 1.0}.get(str(gpu), 2.0), "gpu": gpu})
        on_row({**row, "workload": "2x64", **({"failure": "lost"} if gpu == "b" else {"p50": 1.0})})

    monkeypatch.setattr(encoder, "run_job", run_job)
    monkeypatch.setattr(encoder, "start_method", lambda: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d")
    jobs = encoder.make_jobs(_parsed("--quick", "--variants", "eager"), "cpu")
    record = Record("encoder", None)
    encoder.measure([jobs] * 3, 7, record)
    assert sorted(map(str, seen)) == ["a", "b", "c"]
    median, failed = record.rows
    assert (median["p50"], median["gpu"], median["starts"]) == (2.0, "b", [1.0, 2.0, 3.0])
    assert failed["failure"] == "lost"


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
    run = serving.Engine(decoder, serving.Source()).run(load)
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


def _parsed(*options: str) -> Any:
    return parse(["encoder", *options])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNT", "products"),
        ("void cutlass::device_kernel<GemmUniversal>(Params)", "products"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "attention"),
        ("_attend_tile", "attention"),
        ("triton_red_fused_native_layer_norm_3", "norms and pointwise"),
        ("triton_tem_fused_addmm_7", "products"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_side_by_side_are_no_gap() -> None:
    run = [
        Kernel("void gemm<1>(float)", 1000.0, 4000.0),
        Kernel("triton_norm", 2000.0, 5000.0),
        Kernel("void gemm<2>(float)", 6000.0, 8000.0),
    ]
    row = shares([run, run])
    assert (row["span"], row["products"], row["norms and pointwise"], row["gaps"]) == (7.0, 5.0, 3.0, 1.0)
    assert (row["attention"], row["copies"], row["calls"]) == (0.0, 0.0, 3)


def test_an_engine_whose_encoder_is_not_the_plugins_is_no_measurement_of_it() -> None:
    serves = "INFO 11-24 [adapter.py:9] encoder CUDA graphs by fxsplit_encoder (...): compile=False\n"
    assert plugin_problem(serves) is None
    left = "vLLM's own manager captures the encoder, since fxsplit_encoder could not: CaptureError: no"
    assert plugin_problem(f"{serves}WARNING 11-24 {left}\n") == left
    assert plugin_problem("INFO all is well\n") == "the plugin made no manager"


def test_rounds_are_told_as_one_row() -> None:
    rounds = [
        {"answers": [[1, 2], [3, 4]], "first": [10.0, 30.0], "seconds": 0.5},
        {"answers": [[5, 6], [7, 8]], "first": [20.0, 40.0], "seconds": 1.5},
    ]
    rounds[0] |= {"encoder host": [1.0]}
    rounds[1] |= {"encoder host": [3.0, 2.0]}
    rounds = [{**each, "turn": turn, "engine": 0} for turn, each in enumerate(rounds)]
    row = _row("ours", "4 images", rounds, {0: [[1, 2], [3, 4]], 1: [[5, 6], [7, 9]]})
    told = {
        **dict(variant="ours", requests="4 images", count=4, rate=5.0, same=0.75, p50=20.0, p99=40.0),
        "encoder host": 2.0,
    }
    assert row == told
    expected = {each["turn"]: each["answers"] for each in rounds}
    assert _row("ours", AT_ONCE, rounds, expected)["requests per second"] == 2.0
    rounds[1]["engine"] = 1
    assert _row("ours", "4 images", rounds, expected) == {**told, "same": 1.0, "p50 by engine": [10.0, 20.0]}
