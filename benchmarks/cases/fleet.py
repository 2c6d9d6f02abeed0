"""What it takes to keep encoders busy: times of a fleet's parts, and a fleet simulated from them.

    .venv-ray/bin/python benchmarks/bench.py fleet --output out/fleet.json

Needs the extra `ray`, and no GPU. The parts of the result:

* `prepare`: CPU time to decode and resize a photograph to a tower's pixels as uint8, and to write its
  embedding, beside what an H200 took to encode it, from benchmarks/results. CPU time, so that other work on
  the machine counts little.
* `driver`: CPU time of the process that schedules a run, for each shard, over stages that do nothing.
* `check`: runs of `encode --ray` on this machine with two actors, whose spans give the simulation its times;
  what it then says of the whole run, beside what the run took.
* `offline`, `online`: simulated, from these times.

`--tiny` takes two towers and short runs, to try the case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from fleet import Fleet, Service, Shard, batch_time, run_offline, run_online, varied
from fleet_runs import cluster_rows
from photographs import PHOTOGRAPH, photographs
from storage import RESULTS, load, new_result, store

from fxsplit_encoder.integrations.images import ImageEncoderSettings, ImagePreparer
from fxsplit_encoder.integrations.ray.columns import with_embeddings
from fxsplit_encoder.integrations.ray.parts import write_part
from fxsplit_encoder.models.registry import architecture

Row = dict[str, Any]

SHARD = 128
GPUS = (8, 64, 256, 1000)
CPUS_PER_GPU = (4, 8, 16, 24)
LOADS = (0.5, 0.7, 0.8, 0.9)
NODE_LINK = 100e9 / 8
"""Bytes a second of a node's network, each way."""


class Encoding(NamedTuple):
    """A tower over images of one size, as benchmarks/results has it."""

    size: tuple[int, int]
    """(width, height) of what is decoded."""
    shape: tuple[int, int]
    """Rows and columns of an embedding."""
    file: str
    points: dict[str, int]
    """By workload: its images."""
    tower: str = ""
    """Whose times these are; "": that of the same name."""


ENCODINGS = {
    "clip-l-336": Encoding(
        PHOTOGRAPH, (576, 1024), "towers.json", {"small": 1, "medium": 4, "batch of 8": 24}
    ),
    "siglip-so400m-384": Encoding(
        PHOTOGRAPH, (729, 1152), "towers.json", {"small": 1, "medium": 4, "batch of 8": 24}
    ),
    "dinov2-l-518": Encoding(
        PHOTOGRAPH, (1369, 1024), "towers.json", {"small": 1, "medium": 4, "batch of 8": 24}
    ),
    "qwen3-vl-8b": Encoding((336, 336), (100, 16384), "encoder.json", {"1x448": 2, "20x336": 20}),
    **{
        f"qwen3-vl-8b {side}": Encoding(
            (side, side), (patches // 4, 16384), "encoder.json", {f"1x{side}": 1}, "qwen3-vl-8b"
        )
        for side, patches in ((224, 196), (448, 784), (896, 3136), (1344, 7056))
    },
}
"""In workloads of several sizes an image counts as so many of this one as it has as many patches. The last
four are single images, encoded one by one: together they take less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="two towers and short runs")


def run(arguments: argparse.Namespace) -> int:
    result = new_result("fleet", cpu=cpu_name(), photograph=list(PHOTOGRAPH), shard=SHARD)
    names = list(ENCODINGS)[:2] if arguments.tiny else list(ENCODINGS)
    result["rows"] += [prepare_row(name) for name in names]
    store(arguments.output, result)
    result["rows"] += cluster_rows(arguments.tiny)
    store(arguments.output, result)
    driver_s = next(row["ms a shard"] for row in result["rows"] if row["part"] == "driver") / 1e3
    for row in [row for row in result["rows"] if row["part"] == "prepare"][1:2]:
        result["rows"] += offline_rows(row, driver_s, GPUS[:1] if arguments.tiny else GPUS)
        result["rows"] += online_rows(row, 2000 if arguments.tiny else 40000)
    store(arguments.output, result)
    for row in result["rows"]:
        print(json.dumps(row))
    return 0


def cpu_name() -> str:
    """Of this machine, in Linux' words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


# --- the parts


def prepare_row(name: str) -> Row:
    """One tower: what an image costs a CPU, and what it costs a GPU."""
    encoding = ENCODINGS[name]
    with tempfile.TemporaryDirectory() as directory:
        settings = architecture(encoding.tower or name).settings()
        (Path(directory) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        preparer = ImagePreparer(ImageEncoderSettings(model=directory))
        files = photographs(encoding.size)
        images = [preparer.load(data) for data in files]
        seconds = cpu_seconds(lambda: [preparer.load(data) for data in files]) / len(files)
        rows_s = write_seconds(Path(directory), encoding.shape)
        mean_s = write_seconds(Path(directory), (1, encoding.shape[1]))
    points = encode_points(name)
    best = min(ms / images for images, ms in points)
    return {
        "part": "prepare",
        "tower": encoding.tower or name,
        "together": max(encoding.points.values()),
        "size": f"{encoding.size[0]} x {encoding.size[1]}",
        "prepare ms": seconds * 1e3,
        "file KB": sum(map(len, files)) / len(files) / 1e3,
        "prepared KB": sum(image.num_bytes for image in images) / len(images) / 1e3,
        "rows KB": 4 * encoding.shape[0] * encoding.shape[1] / 1e3,
        "mean KB": 4 * encoding.shape[1] / 1e3,
        "write rows ms": rows_s * 1e3,
        "write mean ms": mean_s * 1e3,
        "encode ms": best,
        "points": points,
        "images/s": 1e3 / best,
        "CPUs a GPU": (seconds + mean_s) * 1e3 / best,
        "CPUs a GPU, rows": (seconds + rows_s) * 1e3 / best,
        "MB/s files": sum(map(len, files)) / len(files) / best / 1e3,
        "MB/s in": sum(image.num_bytes for image in images) / len(images) / best / 1e3,
        "MB/s out": 4 * encoding.shape[1] / best / 1e3,
        "MB/s out, rows": 4 * encoding.shape[0] * encoding.shape[1] / best / 1e3,
    }


def encode_points(name: str) -> list[tuple[int, float]]:
    """Images that were encoded together, and the milliseconds that this took."""
    encoding = ENCODINGS[name]
    rows = load(RESULTS / encoding.file)["rows"]
    of = {
        row["workload"]: row
        for row in rows
        if row["tower"] == (encoding.tower or name) and row.get("variant", "ours-auto") == "ours-auto"
    }
    return [(count, of[work].get("p50") or of[work]["ours"]) for work, count in encoding.points.items()]


def cpu_seconds(call: Any, samples: int = 7) -> float:
    """CPU time of this thread, the least of several: what disturbs only adds."""
    times = []
    for _ in range(samples):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return min(times)


def write_seconds(directory: Path, shape: tuple[int, int]) -> float:
    """CPU time to write the embedding of one image, of a bfloat16 tower, as one of a shard."""
    images = max(1, min(SHARD, int(1e8 // (4 * shape[0] * shape[1]))))
    draw = np.random.default_rng(0)
    values = draw.standard_normal((images, *shape)).astype(np.float32)
    values.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
    paths = {"path": [f"{n}.jpg" for n in range(images)], "layout": ["{}"] * images}
    table = with_embeddings(pa.table(paths), list(values), "float32")
    times = []
    for _ in range(3):
        begin = time.process_time()  # Arrow has threads of its own
        write_part(directory, 0, table)
        times.append(time.process_time() - begin)
    return min(times) / images


# --- simulated


def offline_rows(row: Row, driver_s: float, fleets: Sequence[int]) -> Iterator[Row]:
    """Fleets of several sizes over many images; embeddings are means, and once all rows."""
    for gpus in fleets:
        sizes = (SHARD, 8 * SHARD) if gpus >= 256 else (SHARD,)
        for cpus, size in itertools.product(CPUS_PER_GPU, sizes):
            yield offline_row(row, driver_s, gpus, cpus, size)
        yield offline_row(row, driver_s, gpus, 2 * CPUS_PER_GPU[-1], SHARD, has_rows=True)


def offline_row(row: Row, driver_s: float, gpus: int, cpus: int, size: int, has_rows: bool = False) -> Row:
    """One fleet."""
    write_ms, out_kb = (
        (row["write rows ms"], row["rows KB"]) if has_rows else (row["write mean ms"], row["mean KB"])
    )
    seconds = (ms * size / 1e3 for ms in (row["prepare ms"], row["encode ms"], write_ms))
    shard = Shard(*seconds, row["prepared KB"] * size * 1e3, out_kb * size * 1e3)
    count = 20 * gpus
    fleet = Fleet(gpus, gpus * cpus, link_bytes_s=NODE_LINK, driver_s=driver_s)
    outcome = run_offline(varied(shard, count), fleet)
    return {
        "part": "offline",
        "tower": row["tower"],
        "embedding": "rows" if has_rows else "mean",
        "GPUs": gpus,
        "CPUs a GPU": cpus,
        "shard": size,
        "images/s": count * size / outcome.seconds,
        **{f"{name} busy": share for name, share in outcome.busy.items()},
        "limit": outcome.limit,
    }


def online_rows(row: Row, requests: int) -> Iterator[Row]:
    """Encoders under load, each with as many CPUs as it needs."""
    most = max(count for count, _ in row["points"])
    seconds = batch_time([(count, ms / 1e3) for count, ms in row["points"]])
    for encoders, share in itertools.product((1, 4, 16), LOADS):
        for is_random in (False, True) if encoders > 1 else (False,):
            rate = share * encoders * most / seconds(most)
            cpus = max(2, int(1.5 * rate * row["prepare ms"] / 1e3) + 1)
            service = Service(encoders, cpus, row["prepare ms"] / 1e3, seconds, most, is_random=is_random)
            online = run_online(service, rate, requests)
            yield {
                "part": "online",
                "tower": row["tower"],
                "encoders": encoders,
                "load": share,
                "images/s": rate,
                "router": "random" if is_random else "least",
                "p50 ms": online.quantile(0.5) * 1e3,
                "p95 ms": online.quantile(0.95) * 1e3,
                "p99 ms": online.quantile(0.99) * 1e3,
                "images a batch": sum(online.batches) / len(online.batches),
            }
