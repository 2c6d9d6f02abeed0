"""Ray's `map_batches` on every GPU of a host, beside what `manager.execute` alone reaches on them.

    python benchmarks/bench.py map_batches --gpus 2 --output out/map_batches.json

Photographs of 448 x 448 pixels, a Qwen3-VL-8B tower with random weights in bfloat16, one actor a GPU. Each
actor first times `manager.execute` alone, on pixels that lie on its GPU, all actors at once. Then images go
through the pipeline of `encode_images`, once from JPEG files and once prepared before. Rates are of the
second half of the images, when what was prepared while actors started is used up.

`--tiny` runs one block of SigLIP in two actors on the CPU: it shows that the script works, and no rate.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from models import make_checkpoint, photographs
from storage import Record, Row
from timing import timed

from fxsplit_encoder.service.encoder import ImageEncoder, Preparer, upload
from fxsplit_encoder.service.ray import EncodeImages, prepare_images
from fxsplit_encoder.service.ray.encode_images import PREPARING, encode_batches
from fxsplit_encoder.service.settings import ImageEncoderSettings

SIDE = 448
BATCH, TINY_BATCH = 128, 8
STORE_BYTES = 4 << 30
"""Of Ray's shared memory, for each actor: some batches ahead, and far less than half of a run."""
_PREPARED = 32
"""Images of a task, as in `encode_images`."""


class Measured(EncodeImages):
    """As `EncodeImages`, and tells with every row what `manager.execute` alone reaches here."""

    def __init__(self, batch: int, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._alone = alone_rate(self.encoder.first, batch, seconds)

    def __call__(self, table: pa.Table) -> pa.Table:
        encoded = super().__call__(table)
        told = {"actor": os.getpid(), "alone": self._alone}
        for name, value in told.items():
            encoded = encoded.append_column(name, pa.array([value] * encoded.num_rows))
        return encoded.drop_columns(["embedding"])  # which the driver would fetch


def alone_rate(encoder: ImageEncoder, batch: int, seconds: float) -> float:
    """Images a second through `manager.execute`, their pixels on the device; the median of calls."""
    files = itertools.islice(itertools.cycle(photographs((SIDE, SIDE))), batch)
    images = [encoder.preparer.load(data) for data in files]
    inputs = upload(images, encoder.values, encoder.device, encoder.preparer.steps.on_host)
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        times.append(timed(lambda: encoder.manager.execute(inputs))[0] / 1e3)
    return len(images) / sorted(times)[len(times) // 2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=1, help="actors, each with a GPU")
    parser.add_argument("--model", default="qwen3-vl-8b", help="a published model's tower")


def run(arguments: argparse.Namespace, record: Record) -> None:
    import ray

    tiny: bool = arguments.tiny
    actors = 2 if tiny else arguments.gpus
    if not tiny and torch.cuda.device_count() < actors:
        raise SystemExit(f"{actors} actors need as many GPUs; there are {torch.cuda.device_count()}")
    batch = TINY_BATCH if tiny else BATCH
    images = 50 * batch * (1 if tiny else actors)
    record.settings.update(tower=arguments.model, side=SIDE, images=images, batch=batch)
    record.settings.update(tiny=tiny, pooling="mean")
    ray.init(
        num_cpus=4 if tiny else None,
        object_store_memory=actors * STORE_BYTES,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        with tempfile.TemporaryDirectory() as temporary:
            name, blocks = ("siglip-so400m-384", 1) if tiny else (arguments.model, None)
            model = make_checkpoint(Path(temporary) / "model", name, blocks)
            settings: dict[str, Any] = {"model": str(model), "pooling": "mean"}
            settings |= {"config": {"enabled": False}} if tiny else {}
            record(prepare_row(settings, int(ray.cluster_resources()["CPU"])))
            for way in ("files", "prepared"):
                record(run_row(way, actors, images, batch, settings))
    finally:
        ray.shutdown()
    first, *runs = record.rows
    first["CPUs needed"] = max(row["execute alone"] for row in runs) / first["images/s"]
    record.store()


def prepare_row(settings: dict[str, Any], cpus: int) -> Row:
    """CPU time of an image, and the CPUs that are there."""
    preparer = Preparer(ImageEncoderSettings(**settings))
    files = photographs((SIDE, SIDE))
    times = []
    for _ in range(7):
        begin = time.thread_time()
        for data in files:
            preparer.load(data)
        times.append(time.thread_time() - begin)
    seconds = min(times) / len(files)  # of several: what disturbs only adds
    return {"way": "prepare, one CPU", "images/s": 1 / seconds, "CPUs here": cpus}


def run_row(way: str, actors: int, images: int, batch: int, settings: dict[str, Any]) -> Row:
    """One run of the pipeline."""
    import ray.data

    count, tiny = images // batch, batch == TINY_BATCH
    block = ray.put(block_of(settings, batch, way == "prepared"))
    dataset = ray.data.from_arrow_refs([block] * count)
    if way == "files":
        dataset = dataset.map_batches(
            prepare_images, fn_kwargs=settings, batch_size=_PREPARED, batch_format="pyarrow", **PREPARING
        )
    given = {"batch": batch, "seconds": 0.5 if tiny else 3.0, **settings}
    dataset = encode_batches(dataset, Measured, given, actors, 0 if tiny else 1, batch)
    arrived: list[tuple[float, int]] = []
    alone: dict[int, float] = {}
    for done in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        arrived.append((time.monotonic(), done.num_rows))
        assert done["error"].null_count == done.num_rows
        alone |= dict(zip(done["actor"].to_pylist(), done["alone"].to_pylist(), strict=True))
    assert sum(count for _, count in arrived) == count * batch
    # Of a short run an actor may have got nothing; it still had its GPU.
    rate, sum_alone = second_half(arrived), sum(alone.values()) / len(alone) * actors
    return {
        "way": way,
        "actors": actors,
        "images/s": rate,
        "execute alone": sum_alone,
        "share": rate / sum_alone,
    }


def block_of(settings: dict[str, Any], batch: int, is_prepared: bool) -> pa.Table:
    """One batch, which all batches of a run share: memory holds it once."""
    files = itertools.islice(itertools.cycle(photographs((SIDE, SIDE))), batch)
    table = pa.table({"bytes": list(files)})
    return prepare_images(table, **settings) if is_prepared else table


def second_half(arrived: Sequence[tuple[float, int]]) -> float:
    """Images a second after the first half has arrived."""
    total, seen = sum(count for _, count in arrived), 0
    for number, (when, count) in enumerate(arrived):
        seen += count
        if seen >= total / 2 and number + 1 < len(arrived):
            return (total - seen) / (arrived[-1][0] - when)
    raise SystemExit("expected more than two batches")
