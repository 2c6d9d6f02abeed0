"""One tower by one variant in a process of its own, so that none can harm or help another."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import kernel_times
import torch
from models import Batch, Model, kind_of, make_model, rows_of
from processes import run_process
from storage import Row, failing
from timing import measure, release, synchronize, wall_ms
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from variants import Variant
from vllm_variants import CONTENDERS
from workloads import QUICK_WORKLOADS, WORKLOADS, Workload

FLOOR = "floor"
"""Operations over the rate of a large matrix product, where the name of a variant may stand."""

START = "start"
"""What a variant does before the first request, where the name of a workload may stand."""

# Above it an output is wrong and not just rounded.
_ERROR_LIMITS = {torch.bfloat16: 0.1, torch.float32: 1e-3}

_MOST_SAMPLES = 200
_GEMM_SIDE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    tower: str
    variant: str
    """`FLOOR`: it counts operations and times a matrix product."""
    workloads: tuple[str, ...]
    quick: bool
    device: str
    dtype: str
    blocks: int | None = None
    samples: int = 30
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of managers that differ from `EncoderConfig`'s own values."""
    shared_cache: bool = False
    """Whether Inductor may find what earlier processes compiled."""
    seconds: float = 1.0
    """Fast rows get more samples than asked for, as many as take so long."""
    kernels: bool = False
    """Whether rows say which kernels the first request of a workload spends its time on."""


def known_workloads(tower: str, quick: bool) -> Mapping[str, Workload]:
    """The workloads of a tower's kind, by name."""
    return (QUICK_WORKLOADS if quick else WORKLOADS)[kind_of(tower)]


def run_job(
    job: Job, timeout: float, on_row: Callable[[Row], None], method: str, gpu: str | None = None
) -> str | None:
    """Runs a job to its end and calls `on_row` for each row that it sends; returns why it failed, or None."""
    with tempfile.TemporaryDirectory(prefix="encoder_benchmark_", ignore_cleanup_errors=True) as cache:
        return run_process(
            _rows,
            (job, None if job.shared_cache else cache),
            timeout,
            lambda row: on_row({"tower": job.tower, "variant": job.variant, **row}),
            method,
            gpu,
        )


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


def _rows(job: Job, cache: str | None) -> Iterator[Row]:
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with torch.no_grad():
        yield from floor(job) if job.variant == FLOOR else contest(job)


def floor(job: Job) -> Iterator[Row]:
    """For every workload the least time that its operations need, the median of its requests."""
    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    rate = gemm_flops_per_second(device, dtype)
    model = _model(job)
    for name, workload in _workloads(job).items():
        batches = [model.batch(request) for request in workload]
        prepared = [model.prepare(batch) for batch in batches]
        flops = [count_flops(lambda each=each: model.forward(each)) for each in prepared]
        row = {"workload": name, "patches": _patches(batches)}
        yield {**row, "p50": statistics.median(flops) / rate * 1e3, "flops per second": rate}


def contest(job: Job) -> Iterator[Row]:
    """What a variant takes to start, then a row for each workload."""
    model = _model(job)
    workloads = _workloads(job)
    batches = {name: [model.batch(request) for request in each] for name, each in workloads.items()}
    expected = {name: rows_of(model.eager(each[0])).cpu() for name, each in batches.items()}
    variant = CONTENDERS[job.variant](model, job.config)
    before = _reserved_bytes()
    start = time.perf_counter()
    variant.start()
    synchronize()
    seconds = time.perf_counter() - start
    yield {"workload": START, "seconds": seconds, "bytes": _reserved_bytes() - before}
    for name, workload in workloads.items():
        row: Row = {"workload": name, "patches": _patches(batches[name])}
        if reason := variant.why_not(workload):
            yield {**row, "skipped": reason}
            continue
        with failing(row):
            row |= _measure(job, variant, batches[name], expected[name])
            row["bytes"] = _reserved_bytes() - before
        yield row
        synchronize()  # raises if the device is lost to this process, which then ends


def _measure(job: Job, variant: Variant, batches: Sequence[Batch], expected: Tensor) -> Row:
    """A variant on one workload: compared with eager, then timed."""
    start = time.perf_counter()
    for batch in batches:
        variant.prepare(batch)
    seconds = time.perf_counter() - start
    calls = [lambda batch=batch: variant.run(batch) for batch in batches]
    if not job.quick:
        settle(calls, variant.seconds_to_settle)
    own = variant.reference(batches[0])
    error = checked_error(rows_of(variant.run(batches[0])), expected if own is None else own)
    samples = job.samples
    if not job.quick:
        seconds_per_call = measure(calls, len(calls))["p50"] * 1e-3
        samples = max(samples, min(_MOST_SAMPLES, int(job.seconds / seconds_per_call)))
    times = measure(calls, samples)
    padding = statistics.fmean(variant.padding(batch) for batch in batches)
    row: Row = {**times, "error": error, "padding": padding, "note": variant.note(batches[0])}
    row["first s"] = seconds
    if variant.seconds_to_settle:
        row["settled s"] = variant.seconds_to_settle
    if job.kernels:
        row |= kernel_times.shares([kernel_times.profiled(calls[0]) for _ in range(kernel_times.SAMPLES)])
    return row


def settle(calls: Sequence[Callable[[], Any]], seconds: float) -> None:
    """Repeats calls for some seconds, each to the end of its device work."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for call in calls:
            call()
            synchronize()


def checked_error(rows: Tensor, expected: Tensor) -> float:
    """`relative_error` of eager's output.

    Raises:
        ValueError: they differ by more than rounding.
    """
    error = relative_error(rows, expected)
    if not error <= _ERROR_LIMITS[rows.dtype]:  # so written that NaN fails too
        raise ValueError(f"differs from eager by {error:.2g} of its root mean square")
    return error


def relative_error(rows: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of `expected`.

    Raises:
        ValueError: they have other shapes.
    """
    if rows.shape != expected.shape:
        raise ValueError(f"expected an output of {tuple(expected.shape)}; got {tuple(rows.shape)}")
    exact = expected.double()
    difference = rows.to(exact.device).double() - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())


def _model(job: Job) -> Model:
    return make_model(job.tower, job.blocks, torch.device(job.device), getattr(torch, job.dtype))


def _workloads(job: Job) -> dict[str, Workload]:
    return {name: known_workloads(job.tower, job.quick)[name] for name in job.workloads}


def _patches(batches: Sequence[Batch]) -> float:
    return statistics.median(batch.patches for batch in batches)


def _reserved_bytes() -> int:
    """Device memory that PyTorch reserves for what is in use; 0 on a CPU."""
    release()
    return torch.cuda.memory_reserved()


# --- the floor: operations that a forward must do, over the rate of a large matrix product


def count_flops(forward: Callable[[], Any]) -> int:
    """Floating-point operations of the matrix products, convolutions and attention of one eager run.

    A product of (m, k) and (k, n) counts 2 m k n, attention over a segment of T rows 4 T^2 D in all heads of
    D columns together. Everything else is left out: it costs memory traffic, not arithmetic.
    """
    with FlopCounterMode(
        display=False,
        custom_mapping={
            torch.ops.fxsplit.varlen_attention: _packed_attention,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _dense_attention,
        },
    ) as counter:
        forward()
    return counter.get_total_flops()


def gemm_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of a large square matrix product of normal numbers, the median of 30."""
    side = _GEMM_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / (wall_ms(lambda: left @ right) * 1e-3)


def _packed_attention(
    query_THD: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *_: Any, **__: Any
) -> int:
    columns = query_THD.shape[-2] * query_THD.shape[-1]
    return sum(4 * (end - start) ** 2 * columns for start, end in itertools.pairwise(cu_seqlens.tolist()))


_packed_attention._get_raw = True  # type: ignore[attr-defined]  # the lengths are in a tensor's values


def _dense_attention(query_shape: Any, key_shape: Any, value_shape: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query_shape, key_shape, value_shape))
