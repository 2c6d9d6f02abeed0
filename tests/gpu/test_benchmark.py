"""The benchmark's variants on a GPU: right, with the memory that they reserve."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import worker
from variants import VARIANTS
from worker import FLOOR, START, Job

pytestmark = pytest.mark.gpu

CONFIG = {"token_budgets": (4, 16), "max_items_per_batch": 4, "max_frames_per_batch": 0}
JOB = Job("qwen3-vl-8b", "", ("1x64", "1x128", "mixed3"), True, "cuda", "bfloat16", 2, 5, CONFIG)
OURS = ("ours-auto", "ours-full")
GRAPHS = ("graph-exact", "compile-reduce-overhead")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("variant", ["eager", "compile", *GRAPHS, *OURS])
@torch.no_grad()
def test_a_variant_is_right_and_timed(variant: str) -> None:
    assert VARIANTS[variant].unavailable(JOB.tower, "cuda") is None
    start, *rows = worker.contest(dataclasses.replace(JOB, variant=variant))
    assert start["seconds"] >= 0
    assert [row["workload"] for row in rows] == list(JOB.workloads)
    for row in rows:
        assert "failure" not in row
        assert row["device"] > 0
        assert row["samples"] >= 5


@torch.no_grad()
def test_the_floor_is_below_what_a_gpu_can_do() -> None:
    rows = list(worker.floor(dataclasses.replace(JOB, variant=FLOOR)))
    assert [row["workload"] for row in rows] == list(JOB.workloads)
    assert all(1e13 < row["flops per second"] < 5e15 for row in rows)


def test_jobs_run_in_processes_of_their_own() -> None:
    rows: list[worker.Row] = []
    job = dataclasses.replace(JOB, variant="graph-exact", workloads=("1x128",))
    assert worker.run_job(job, 300, rows.append, worker.start_method()) is None
    assert [row["workload"] for row in rows] == [START, "1x128"]
    assert rows[-1]["bytes"] > 0
