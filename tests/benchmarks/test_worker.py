from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worker
from contenders import Eager
from records import FLOOR
from subjects import PackedSubject
from worker import Job, relative_error, run_job
from workloads import Request, Workload

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

JOB = Job("tiny", "eager", ("small", "pair"), True, "cpu", "float32", None, 3)
WORKLOADS = {
    "small": Workload("small", (Request(images=((64, 64),)),)),
    "pair": Workload("pair", (Request(images=((64, 64), (96, 64))), Request(images=((64, 32),)))),
}


def run(contest: Callable[[Job], Iterator[Any]], timeout: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a job in a process of its own sends, and why it failed; the process inherits the replacement."""
    monkeypatch.setattr(worker, "_contest", contest)
    events: list[Any] = []
    return events, run_job(JOB, timeout, events.append, "fork")


def test_events_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest(job: Job) -> Iterator[Any]:
        yield {"event": "start", "cache": os.environ["TORCHINDUCTOR_CACHE_DIR"]}
        yield {"event": "row", "workload": job.workloads[0]}

    (start, row), failure = run(contest, 60, monkeypatch)
    assert failure is None
    assert row == {"event": "row", "workload": "small"}
    assert not os.path.exists(start["cache"])


def test_a_failure_keeps_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest(job: Job) -> Iterator[Any]:
        yield {"event": "row", "workload": "small"}
        raise RuntimeError("no memory\nand much more")

    events, failure = run(contest, 60, monkeypatch)
    assert (len(events), failure) == (1, "RuntimeError: no memory")


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest(job: Job) -> Iterator[Any]:
        yield {"event": "row", "workload": "small"}
        os._exit(3)

    events, failure = run(contest, 60, monkeypatch)
    assert (len(events), failure) == (1, "the process ended with exit code 3")


def test_what_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest(job: Job) -> Iterator[Any]:
        yield {"event": "start", "pid": os.getpid()}
        time.sleep(600)

    events: list[Any] = []
    # The time is up once the event is there, however long the process took to start.
    clock = SimpleNamespace(monotonic=lambda: 60.0 * len(events))
    monkeypatch.setattr(worker, "_contest", contest)
    monkeypatch.setattr(worker, "time", clock)
    assert run_job(JOB, 60, events.append, "fork") == "stopped after 60 s"
    (start,) = events
    with pytest.raises(ProcessLookupError):
        os.kill(start["pid"], 0)


@pytest.fixture
def tiny(make_subject: Callable[[], PackedSubject], monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs get the tiny tower and its workloads."""
    monkeypatch.setattr(worker, "make_subject", lambda *_: make_subject())
    monkeypatch.setattr(worker, "known_workloads", lambda *_: WORKLOADS)


@pytest.mark.usefixtures("tiny")
@torch.no_grad()
def test_rows_hold_every_number() -> None:
    start, small, pair = worker._contest(JOB)
    assert start["event"] == "start"
    assert start["bytes"] is None  # there is no device
    assert small["error"] == 0
    assert 0 < small["cpu"] <= small["p50"] <= small["p99"]
    assert small["gpu"] is None
    assert (small["samples"], pair["samples"]) == (3, 4)  # two requests in turn, twice
    assert small["prepare_seconds"] > 0


@pytest.mark.usefixtures("tiny")
@torch.no_grad()
def test_the_floor_counts_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arithmetic._GEMM_SIDE", {"cpu": 64})
    rate, small, pair = worker._floor(Job(**{**vars(JOB), "contender": FLOOR}))
    assert rate["gemm_flops_per_second"] > 0
    assert (small["patches"], small["items"], small["series"]) == ([16], [1], True)
    assert (pair["patches"], pair["items"], pair["series"]) == ([40, 8], [2, 1], False)
    assert pair["flops"][0] > pair["flops"][1] > 0


@pytest.mark.usefixtures("tiny")
@torch.no_grad()
def test_what_differs_from_eager_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Eager, batch: Any) -> Any:
        (output,) = self.subject.eager(batch)
        output.pooler_output[0] *= float("nan") if len(batch.mm_kwargs["image_grid_thw"]) > 1 else 2
        return output

    monkeypatch.setattr(Eager, "run", wrong)
    _, *rows = worker._contest(JOB)
    assert [row["failure"].startswith("wrong: differs from eager") for row in rows] == [True, True]
    assert not any("p50" in row for row in rows)


@pytest.mark.usefixtures("tiny")
@torch.no_grad()
def test_a_row_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eager, "why_not", lambda self, w: "two sizes" if len(w.requests) > 1 else None)

    def fail(self: Eager, batch: Any) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr(Eager, "run", fail)
    _, small, pair = worker._contest(JOB)
    assert small["failure"] == "RuntimeError: lost"
    assert pair["skipped"] == "two sizes"


def test_relative_error() -> None:
    exact = torch.tensor([[3.0, 4.0]])
    assert relative_error(torch.tensor([[3.0, 4.5]]), exact) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(2, 1\)"):
        relative_error(exact.T, exact)
