from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import encoder
import pytest
from encoder import make_jobs, parse, run
from our_contenders import CONTENDERS
from records import FLOOR, Key, Records, merge
from subjects import DEFAULT_TOWERS
from worker import Job


def test_every_tower_meets_every_contender_after_its_floor() -> None:
    jobs = make_jobs(parse([]), "cuda")
    assert [(job.tower, job.contender) for job in jobs] == [
        (tower, contender) for tower in DEFAULT_TOWERS for contender in (FLOOR, *CONTENDERS)
    ]
    assert {(job.blocks, job.dtype, job.samples) for job in jobs} == {(None, "bfloat16", 30)}


def test_a_choice_of_towers_workloads_and_contenders(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("token_budgets: [64]\n")
    options = ["--towers", "internvl3-8b", "glm-4.1v-9b", "--workloads", "1x448", "tiles4", "--contenders"]
    jobs = make_jobs(parse([*options, "eager", "--config", str(config), "--blocks", "3"]), "cuda")
    assert [(job.tower, job.contender, job.workloads) for job in jobs] == [
        ("internvl3-8b", FLOOR, ("tiles4",)),
        ("internvl3-8b", "eager", ("tiles4",)),
        ("glm-4.1v-9b", FLOOR, ("1x448",)),
        ("glm-4.1v-9b", "eager", ("1x448",)),
    ]
    assert (jobs[0].config, jobs[0].blocks) == ({"token_budgets": [64]}, 3)
    assert not make_jobs(parse(["--towers", "deepseek-ocr", "--workloads", "1x448"]), "cuda")


def test_a_quick_run_is_small() -> None:
    jobs = make_jobs(parse(["--quick"]), "cpu")
    assert {job.tower for job in jobs} == {DEFAULT_TOWERS[0]}
    assert {(job.blocks, job.dtype, job.samples) for job in jobs} == {(2, "float32", 3)}
    assert max(jobs[0].config["token_budgets"]) <= 16


def test_results_are_written_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "encoder.json"
    stored: list[int] = []

    def run_job(job: Job, timeout: float, on_event: Any, method: str) -> str | None:
        for name in job.workloads:
            on_event({"event": "row", "workload": name, "p50": 1.0})
            stored.append(len(Records.load(path).rows))
        return "stopped after 7 s" if job.contender == "compile" else None

    monkeypatch.setattr(encoder, "run_job", run_job)
    monkeypatch.setattr(encoder, "start_method", lambda: "")
    options = ["--quick", "--contenders", "eager", "graph-exact", "compile", "--workloads", "1x64", "1x128"]
    jobs = [job for job in make_jobs(parse(options), "cpu") if job.contender != FLOOR]
    records = run(jobs, 7, path)
    assert stored == [1, 2, 3, 4]
    assert Records.load(path) == records
    tower = DEFAULT_TOWERS[0]
    assert Key(tower, "eager", "1x128") in records.rows
    assert records.starts[f"{tower} graph-exact"] == {"skipped": "needs CUDA graphs"}
    assert records.failures == [f"{tower} compile: stopped after 7 s"]


def test_merging_writes_results_and_says_what_is_slower(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "part.json"
    records.rows = {key: row for key, row in records.rows.items() if "failure" not in row}
    records.towers["qwen3-vl-8b"]["workloads"] = dict(
        reversed(records.towers["qwen3-vl-8b"]["workloads"].items())
    )
    records.save(part)
    monkeypatch.setattr("sys.argv", ["encoder.py", "--merge", str(part), "--output", str(tmp_path / "out")])
    monkeypatch.setitem(sys.modules, "plots", None)  # as without matplotlib
    assert encoder.main() == 0
    written = Records.load(tmp_path / "out" / encoder.RESULT)
    assert written == merge([records])
    assert written.workloads("qwen3-vl-8b")[:2] == ["1x224", "1x448"]
    printed = capsys.readouterr().out
    assert "slower than eager: qwen3-vl-8b, 1x448" in printed
    assert "no plots" in printed
