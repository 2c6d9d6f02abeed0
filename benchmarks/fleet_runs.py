"""Runs of `encode --ray` on this machine with two actors, and what its driver costs; see the case `fleet`."""

from __future__ import annotations

import itertools
import resource
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from checkpoints import random_checkpoint
from fleet import Fleet, Shard, run_offline
from photographs import PHOTOGRAPH, photographs

from fxsplit_encoder.integrations.images import ImageEncoderSettings
from fxsplit_encoder.integrations.ray import EncodeJob, Outcome
from fxsplit_encoder.integrations.ray.outcome import ShardReport
from fxsplit_encoder.models.registry import FAMILIES

Row = dict[str, Any]

_SHARD = 32
"""Images of a shard in the runs."""

_PATHS = 128
"""Of each shard whose scheduling is timed."""


def cluster_rows(tiny: bool) -> Iterator[Row]:
    """The driver's cost, and the runs that the simulation is compared with."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield driver_row(40 if tiny else 800)
        yield check_row("preparing", depth=1, width=32, images=100 if tiny else 1600)
        yield check_row("encoding", depth=4, width=384, images=100 if tiny else 640)
    finally:
        ray.shutdown()


class _Nothing:
    def __call__(self, table: pa.Table) -> pa.Table:
        return table


def driver_row(shards: int) -> Row:
    """The driver's CPU time for a shard: what a run over many of them takes more than one over few."""
    fewer = shards // 4
    few, many = _scheduling_seconds(fewer), _scheduling_seconds(shards)
    return {"part": "driver", "shards": shards, "ms a shard": max(0.0, many - few) / (shards - fewer) * 1e3}


def _scheduling_seconds(shards: int) -> float:
    import ray.data

    stage: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
    items = [{"shard": n, "paths": [f"/images/{n}-{k}.jpg" for k in range(_PATHS)]} for n in range(shards)]
    dataset = ray.data.from_items(items, override_num_blocks=shards)
    dataset = dataset.map_batches(lambda table: table, memory=1, **stage)
    dataset = dataset.map_batches(_Nothing, compute=ray.data.ActorPoolStrategy(size=2), **stage)
    dataset = dataset.map_batches(lambda table: table, **stage)
    begin = _own_cpu_seconds()
    assert sum(1 for _ in dataset.iter_rows()) == shards
    return _own_cpu_seconds() - begin


def _own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def check_row(limit: str, depth: int, width: int, images: int) -> Row:
    """A real run with two actors, and the same simulated from its shards' times."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        settings = ImageEncoderSettings(
            model=str(checkpoint(directory / "model", depth, width)),
            config={"enabled": False},
            pooling="mean",
        )
        _run(directory / "first", settings, 64)  # so that the processes that prepare are there
        outcome = _run(directory / "second", settings, images)
    measured, ready_s = measured_seconds(outcome.shards)
    ordered = sorted(outcome.shards, key=lambda each: each.spans["prepare"])
    cpus, gap_s = preparing([shard.spans["prepare"] for shard in ordered])
    simulated = run_offline(
        [as_shard(each, gap_s) for each in ordered], Fleet(gpus=2, cpus=cpus, ready_s=ready_s)
    )
    return {
        "part": "check",
        "limit": limit,
        "images": images,
        "shards": len(outcome.shards),
        **{f"{stage} s": seconds for stage, seconds in outcome.seconds.items()},
        "preparing at once": cpus,
        "between tasks s": gap_s,
        "measured s": measured,
        "simulated s": simulated.seconds,
        "measured share": outcome.encoding_share,
        "simulated share": simulated.busy["GPUs"],
    }


def preparing(spans: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """How many shards were prepared at once at most, and the median time in which a CPU had none, between
    two of them: Ray's own.

    Args:
        spans: by begin.
    """
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = max(itertools.accumulate(change for _, change in changes))
    ends = sorted(end for _, end in spans)
    gaps = [begin - end for (begin, _), end in zip(spans[most:], ends, strict=False)]
    return most, max(0.0, statistics.median(gaps)) if gaps else 0.0


def _run(directory: Path, settings: ImageEncoderSettings, images: int) -> Outcome:
    directory.mkdir()
    for number, data in zip(range(images), itertools.cycle(photographs(PHOTOGRAPH)), strict=False):
        (directory / f"{number:05}.jpg").write_bytes(data)
    job = EncodeJob([str(directory)], directory / "out.parquet", settings, shard_size=_SHARD, workers=2)
    return job.run()


def checkpoint(directory: Path, depth: int, width: int) -> Path:
    """A SigLIP of any size, with random weights."""
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "intermediate_size": 4 * width}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 224, "patch_size": 14}
    return random_checkpoint(directory, FAMILIES["siglip"], {"model_type": "siglip", "vision_config": vision})


def as_shard(report: ShardReport, gap_s: float) -> Shard:
    """What a shard took in a run, and a CPU before it could prepare the next."""
    prepare, encode, write = (
        end - begin for begin, end in (report.spans[stage] for stage in ("prepare", "encode", "write"))
    )
    return Shard(prepare + gap_s, encode, write)


def measured_seconds(shards: Sequence[ShardReport]) -> tuple[float, float]:
    """From the first shard encoded to the last written; and before that, from the first one prepared."""
    begin = min(shard.spans["encode"][0] for shard in shards)
    first = min(shard.spans["prepare"][0] for shard in shards)
    return max(shard.spans["write"][1] for shard in shards) - begin, begin - first
