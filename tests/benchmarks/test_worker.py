from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
import worker
from models import PackedModel
from timing import measure, summarize
from variants import Eager
from worker import FLOOR, Job, relative_error, run_job
from workloads import Request

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

JOB = Job("tiny", "eager", ("small", "pair"), True, "cpu", "float32", samples=3)
WORKLOADS = {
    "small": (Request(images=((64, 64),)),),
    "pair": (Request(images=((64, 64), (96, 64))), Request(images=((64, 32),))),
}


def run(contest: Callable[[Job], Iterator[Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a job in a process of its own sends, and why it failed; the process inherits the replacement."""
    monkeypatch.setattr(worker, "contest", contest)
    rows: list[Any] = []
    return rows, run_job(JOB, 60, rows.append, "fork")


def test_rows_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest(job: Job) -> Iterator[Any]:
        yield {"workload": "start", "cache": os.environ["TORCHINDUCTOR_CACHE_DIR"]}
        yield {"workload": job.workloads[0]}

    (start, row), failure = run(contest, monkeypatch)
    assert failure is None
    assert row == {"tower": "tiny", "variant": "eager", "workload": "small"}
    assert not os.path.exists(start["cache"])


def fails(job: Job) -> Iterator[Any]:
    yield {"workload": "small"}
    raise RuntimeError("no memory\nand much more")


def dies(job: Job) -> Iterator[Any]:
    yield {"workload": "small"}
    os._exit(3)


@pytest.mark.parametrize(
    ("contest", "why"), [(fails, "RuntimeError: no memory"), (dies, "the process ended with exit code 3")]
)
def test_a_failure_keeps_what_came_before(contest: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events, failure = run(contest, monkeypatch)
    assert (len(events), failure) == (1, why)


def environment() -> Iterator[processes.Row]:
    """What the process began with: the driver reads it once, when an import first asks for GPUs."""
    yield {
        "gpu": Path("/proc/self/environ").read_text().partition("CUDA_VISIBLE_DEVICES=")[2].partition("\0")[0]
    }


def test_a_process_sees_its_gpu_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert processes.visible_gpus() == ["4", "5"]
    rows: list[processes.Row] = []
    for gpu in ("5", None):
        assert processes.run_process(environment, (), 60, rows.append, "spawn", gpu) is None
    assert [row["gpu"] for row in rows] == ["5", "4,5"]


def test_what_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest(job: Job) -> Iterator[Any]:
        yield {"workload": "start", "pid": os.getpid()}
        time.sleep(600)

    events: list[Any] = []
    # The time is up once the event is there, however long the process took to start.
    clock = SimpleNamespace(monotonic=lambda: 60.0 * len(events))
    monkeypatch.setattr(worker, "contest", contest)
    monkeypatch.setattr(processes, "time", clock)
    assert run_job(JOB, 60, events.append, "fork") == "stopped after 60 s"
    (start,) = events
    with pytest.raises(ProcessLookupError):
        os.kill(start["pid"], 0)


@pytest.fixture
def tiny(make_model: Callable[[], PackedModel], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs get the tiny tower and its workloads, without gradients."""
    monkeypatch.setattr(worker, "make_model", lambda *_: make_model())
    monkeypatch.setattr(worker, "known_workloads", lambda *_: WORKLOADS)
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("tiny")
def test_rows_hold_every_number() -> None:
    start, small, pair = worker.contest(JOB)
    assert start["workload"] == "start"
    assert start["bytes"] == 0  # there is no device
    assert small["error"] == 0
    assert 0 < small["host"] <= small["p50"] <= small["p90"]
    assert small["device"] is None
    assert (small["samples"], pair["samples"]) == (3, 4)  # two requests in turn, twice
    assert small["first s"] > 0


@pytest.mark.usefixtures("tiny")
def test_the_floor_counts_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker._GEMM_SIDE", {"cpu": 64})
    small, pair = worker.floor(Job(**{**vars(JOB), "variant": FLOOR}))
    assert (small["patches"], pair["patches"]) == (16, 24)  # the median of requests of 40 and 8
    assert 0 < small["p50"] < pair["p50"]


@pytest.mark.usefixtures("tiny")
def test_what_differs_from_eager_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Eager, batch: Any) -> Any:
        (output,) = self.model.eager(batch)
        output.pooler_output[0] *= float("nan") if len(batch.mm_kwargs["image_grid_thw"]) > 1 else 2
        return output

    monkeypatch.setattr(Eager, "run", wrong)
    _, *rows = worker.contest(JOB)
    assert [row["failure"].startswith("ValueError: differs from eager") for row in rows] == [True, True]
    assert not any("p50" in row for row in rows)


@pytest.mark.usefixtures("tiny")
def test_a_row_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eager, "why_not", lambda self, w: "two sizes" if len(w) > 1 else None)

    def fail(self: Eager, batch: Any) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr(Eager, "run", fail)
    _, small, pair = worker.contest(JOB)
    assert small["failure"] == "RuntimeError: lost"
    assert pair["skipped"] == "two sizes"


def test_relative_error() -> None:
    exact = torch.tensor([[3.0, 4.0]])
    assert relative_error(torch.tensor([[3.0, 4.5]]), exact) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(2, 1\)"):
        relative_error(exact.T, exact)


def test_what_is_stored_of_samples() -> None:
    assert summarize([3.0, 1.0, 2.0, 10.0]) == {"p50": 2.5, "p10": 1.0, "p90": 10.0, "samples": 4}


def test_times_are_milliseconds_and_taken_in_turn() -> None:
    called: list[str] = []

    def call(name: str) -> None:
        called.append(name)
        time.sleep(0.002)

    times = measure([lambda: call("a"), lambda: call("b")], 3)
    assert 2 < times["p50"] < 200
    assert times["samples"] == 4  # two rounds, after one to warm up
    assert called == ["a", "b"] * 3
