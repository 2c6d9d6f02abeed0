"""One tower with one contender in a process of its own, so that none can harm or help another.

`run_job` starts the process and hands on what it sends, row by row, until it ends, fails or has taken too
long: what was measured before that stays.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from arithmetic import count_flops, gemm_flops_per_second
from contenders import Contender
from our_contenders import CONTENDERS
from records import FLOOR
from storage import one_line
from subjects import Batch, Subject, kind_of, make_subject, rows_of
from timing import measure
from torch import Tensor
from workloads import QUICK_WORKLOADS, WORKLOADS, Workload

# Above it an output is wrong and not just rounded: root mean square of the difference from eager's output,
# relative to that output.
_ERROR_LIMITS = {"bfloat16": 0.1, "float32": 1e-3}

_MOST_SAMPLES = 200

_SECONDS_TO_END = 30

Event = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    tower: str
    contender: str
    """`FLOOR`: it counts operations and times a matrix product."""
    workloads: tuple[str, ...]
    quick: bool
    device: str
    dtype: str
    blocks: int | None
    samples: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of managers that differ from `EncoderConfig`'s own values."""
    shared_cache: bool = False
    """Whether Inductor may find what earlier processes compiled."""
    seconds: float = 1.0
    """Fast rows get more samples than asked for, as many as take so long."""


def known_workloads(tower: str, quick: bool) -> Mapping[str, Workload]:
    """The workloads of a tower's kind, by name."""
    return (QUICK_WORKLOADS if quick else WORKLOADS)[kind_of(tower)]


def run_job(job: Job, timeout: float, on_event: Callable[[Event], None], method: str) -> str | None:
    """Runs a job to its end and calls `on_event` for all that it sends; returns why it failed, or None."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="encoder_benchmark_", ignore_cleanup_errors=True) as cache:
        process = context.Process(target=_work, args=(job, sender, None if job.shared_cache else cache))
        process.start()
        sender.close()
        deadline = time.monotonic() + timeout
        try:
            while receiver.poll(max(0.0, deadline - time.monotonic())):
                event: Event = receiver.recv()
                if event["event"] == "end":
                    process.join(_SECONDS_TO_END)
                    failure: str | None = event["failure"]
                    return failure
                on_event(event)
            return f"stopped after {timeout:.0f} s"
        except EOFError:
            process.join()
            return f"the process ended with exit code {process.exitcode}"
        finally:
            _stop(process)


def start_method() -> str:
    """A server that has imported everything and forks; plain processes where an import touched CUDA."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fxsplit_encoder", "fxsplit_encoder.models.random"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_probe_fork, args=(sender,))
    process.start()
    usable: bool = receiver.recv()
    process.join()
    return "forkserver" if usable else "spawn"


def _probe_fork(sender: Connection) -> None:
    sender.send(not torch.cuda._is_in_bad_fork())


def _stop(process: Any) -> None:
    """Ends a process that still runs, with what it started: compilers run in processes of their own."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it had no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _work(job: Job, sender: Connection, cache: str | None) -> None:
    os.setpgrp()
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    failure = None
    try:
        with torch.no_grad():
            for event in _floor(job) if job.contender == FLOOR else _contest(job):
                sender.send(event)
    except Exception as error:
        traceback.print_exc()
        failure = one_line(error)
    sender.send({"event": "end", "failure": failure})


def _floor(job: Job) -> Iterator[Event]:
    """The rate of a matrix product, and of every workload its patches and operations."""
    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    yield {"event": "rate", "gemm_flops_per_second": gemm_flops_per_second(device, dtype)}
    subject = _subject(job)
    for workload in _workloads(job):
        batches = [subject.batch(request) for request in workload.requests]
        prepared = [subject.prepare(batch) for batch in batches]
        yield {
            "event": "workload",
            "workload": workload.name,
            "series": workload.is_series,
            "patches": [batch.patches for batch in batches],
            "items": [len(each.tokens) for each in prepared],
            "flops": [count_flops(lambda each=each: subject.forward(each)) for each in prepared],
        }


def _contest(job: Job) -> Iterator[Event]:
    """What a contender takes to start, then a row for each workload."""
    subject = _subject(job)
    batches = {w.name: [subject.batch(request) for request in w.requests] for w in _workloads(job)}
    expected = {name: rows_of(subject.eager(each[0])).cpu() for name, each in batches.items()}
    contender = CONTENDERS[job.contender](subject, job.config)
    before = _reserved_bytes(subject)
    start = time.perf_counter()
    contender.start()
    seconds = {"start": round(time.perf_counter() - start, 3), **contender.seconds}
    yield {"event": "start", "seconds": seconds, "bytes": _held(before, subject)}
    for workload in _workloads(job):
        row = {"event": "row", "workload": workload.name}
        if reason := contender.why_not(workload):
            yield {**row, "skipped": reason}
            continue
        try:
            measured = _measure(job, contender, batches[workload.name], expected[workload.name])
        except Exception as error:
            traceback.print_exc()
            yield {**row, "failure": one_line(error)}
            if subject.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost to this process, which then ends
        else:
            yield {**row, **measured, "bytes": _held(before, subject)}


def _measure(job: Job, contender: Contender, batches: Sequence[Batch], expected: Tensor) -> Event:
    """A contender on one workload: checked, then timed."""
    device = contender.subject.device
    start = time.perf_counter()
    for batch in batches:
        contender.prepare(batch)
    seconds = time.perf_counter() - start
    error = relative_error(rows_of(contender.run(batches[0])), expected)
    if not error <= _ERROR_LIMITS[job.dtype]:  # so written that NaN fails too
        return {"failure": f"wrong: differs from eager by {error:.2g} of its root mean square"}
    calls = [lambda batch=batch: contender.run(batch) for batch in batches]
    samples = job.samples
    if not job.quick:
        seconds_a_call = measure(calls, device, len(calls)).p50 * 1e-3
        samples = max(samples, min(_MOST_SAMPLES, int(job.seconds / seconds_a_call)))
    return {
        "prepare_seconds": seconds,
        "error": error,
        "padding": sum(contender.padding(batch) for batch in batches) / len(batches),
        "note": contender.note(batches[0]),
        **asdict(measure(calls, device, samples)),
    }


def relative_error(rows: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of `expected`.

    Raises:
        ValueError: they have other shapes.
    """
    if rows.shape != expected.shape:
        raise ValueError(f"expected an output of {tuple(expected.shape)}; got {tuple(rows.shape)}")
    exact = expected.double()
    difference = rows.cpu().double() - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())


def _subject(job: Job) -> Subject:
    return make_subject(job.tower, job.blocks, torch.device(job.device), getattr(torch, job.dtype))


def _workloads(job: Job) -> list[Workload]:
    return [known_workloads(job.tower, job.quick)[name] for name in job.workloads]


def _reserved_bytes(subject: Subject) -> int | None:
    """Device memory that PyTorch holds for what is in use; None on a CPU."""
    if subject.device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _held(before: int | None, subject: Subject) -> int | None:
    """What a contender holds beyond the tower and the inputs."""
    now = _reserved_bytes(subject)
    return None if now is None or before is None else now - before
