"""The benchmark's contenders on a GPU: as eager, and with the memory that they hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import worker
from our_contenders import CONTENDERS
from records import FLOOR
from worker import Job

pytestmark = pytest.mark.gpu

CONFIG = {"token_budgets": (4, 16), "max_items_per_batch": 4, "max_frames_per_batch": 0}
JOB = Job("qwen3-vl-8b", "", ("1x64", "1x128", "mixed3"), True, "cuda", "bfloat16", 2, 5, CONFIG)
OURS = ("ours-auto", "ours-backend", "ours-full")
GRAPHS = ("graph-exact", "graph-budgets", "compile-reduce-overhead", "compile-partition")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("contender", ["eager", "compile", *GRAPHS, *OURS])
@torch.no_grad()
def test_a_contender_is_right_and_timed(contender: str) -> None:
    assert CONTENDERS[contender].unavailable("packed", True, "cuda", True) is None
    start, *rows = worker._contest(dataclasses.replace(JOB, contender=contender))
    assert start["seconds"]["start"] >= 0
    assert [row["workload"] for row in rows] == list(JOB.workloads)
    for row in rows:
        assert "failure" not in row
        assert row["gpu"] > 0
        assert row["samples"] >= 5


@torch.no_grad()
def test_the_floor_is_below_what_a_gpu_can_do() -> None:
    rate, *workloads = worker._floor(dataclasses.replace(JOB, contender=FLOOR))
    assert 1e13 < rate["gemm_flops_per_second"] < 5e15
    assert [w["workload"] for w in workloads] == list(JOB.workloads)


def test_jobs_run_in_processes_of_their_own() -> None:
    events: list[worker.Event] = []
    job = dataclasses.replace(JOB, contender="graph-exact", workloads=("1x128",))
    assert worker.run_job(job, 300, events.append, worker.start_method()) is None
    assert [event["event"] for event in events] == ["start", "row"]
    assert events[-1]["bytes"] > 0
