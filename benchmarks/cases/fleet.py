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
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from fleet_runs import cluster_rows
from fleet_simulated import SCENARIOS, offline_row, online_rows
from photographs import PHOTOGRAPH, photographs
from storage import RESULTS, load, new_result, store

from fxsplit_encoder.integrations.images import ImageEncoderSettings, ImagePreparer
from fxsplit_encoder.integrations.ray.columns import with_embeddings
from fxsplit_encoder.integrations.ray.parts import write_part
from fxsplit_encoder.models.registry import architecture

Row = dict[str, Any]

SHARD = 128
SIMULATED = "siglip-so400m-384"
MEASURED = ("prepare", "driver", "check")


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
    parser.add_argument("--parts", type=Path, metavar="JSON", help="simulate anew from this result's parts")


def run(arguments: argparse.Namespace) -> int:
    if arguments.parts is not None:
        result = load(arguments.parts)
        result["rows"] = [row for row in result["rows"] if row["part"] in MEASURED]
    else:
        result = new_result("fleet", cpu=cpu_name(), photograph=list(PHOTOGRAPH), shard=SHARD)
        names = list(ENCODINGS)[:2] if arguments.tiny else list(ENCODINGS)
        result["rows"] += [prepare_row(name) for name in names]
        store(arguments.output, result)
        result["rows"] += cluster_rows(arguments.tiny)
        store(arguments.output, result)
    driver_s = next(row["ms a shard"] for row in result["rows"] if row["part"] == "driver") / 1e3
    simulated = next(row for row in result["rows"] if row["tower"] == SIMULATED)
    scenarios = SCENARIOS[:3] if arguments.tiny else SCENARIOS
    result["rows"] += [offline_row(simulated, driver_s, scenario) for scenario in scenarios]
    result["rows"] += online_rows(simulated, 2000 if arguments.tiny else 40000)
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
