"""The tables of docs/scaling.md, of what `bench.py fleet` stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from layout import by_columns, formatted
from storage import RESULTS, Result, load

Row = Mapping[str, Any]


def parts(result: Result) -> str:
    """What an image costs CPUs and a GPU, and what travels between the stages of one GPU."""
    columns = {
        "tower": "tower",
        "image": "size",
        "together": "together",
        "GPU ms": "encode ms",
        "images/s": "images/s",
        "CPU ms": "prepare ms",
        "CPUs a GPU": "CPUs a GPU",
        "MB/s of files": "MB/s files",
        "pixels": "MB/s in",
        "means": "MB/s out",
        "rows": "MB/s out, rows",
        "CPUs a GPU that writes rows": "CPUs a GPU, rows",
    }
    return f"{by_columns(columns, _part(result, 'prepare'))}\n\n{_caption(result)}"


def decoders(result: Result, tower: str, *cpus: str) -> str:
    """How many GPUs so many CPUs keep busy, and how many images that is."""
    row = next(row for row in _part(result, "prepare") if row["tower"] == tower)
    gpus = [int(count) / row["CPUs a GPU"] for count in cpus]
    lines = [
        [int(count), int(float(count) / row["CPUs a GPU"]), each * row["images/s"]]
        for count, each in zip(cpus, gpus, strict=True)
    ]
    return formatted(["CPUs that decode", "GPUs that they keep busy", "images/s"], lines)


def check(result: Result) -> str:
    """Real runs with two actors, and the simulation of each."""
    columns = {name: name for name in ("limit", "images", "shards", "preparing at once")}
    columns |= {name: name for name in ("between tasks s", "measured s", "simulated s")}
    columns |= {"GPUs' share of the time, measured": "measured share", "simulated": "simulated share"}
    rows = [{**row, "limit": f"by {row['limit']}"} for row in _part(result, "check")]
    for row in rows:
        row["ratio"] = row["simulated s"] / row["measured s"]
    columns = {**columns, "simulated / measured s": "ratio"}
    return f"{by_columns(columns, rows)}\n\nActors on CPUs stand for GPUs. {_on_cpu(result)}"


def offline(result: Result) -> str:
    """Simulated fleets of several sizes."""
    lines = [
        [
            row["GPUs"],
            row["CPUs a GPU"],
            row["embedding"],
            row["shard"],
            row["images/s"],
            *(f"{row[f'{name} busy']:.0%}" for name in ("GPUs", "CPUs", "network", "driver")),
            row["limit"],
        ]
        for row in _part(result, "offline")
    ]
    headers = ["GPUs", "CPUs a GPU", "embeddings", "shard", "images/s", "GPUs busy", "CPUs", "network"]
    return formatted([*headers, "driver", "limit"], lines)


def online(result: Result) -> str:
    """Simulated services: how long requests wait."""
    columns = {"encoders": "encoders", "load": "load", "images/s": "images/s", "router": "router"}
    columns |= {name: name for name in ("p50 ms", "p95 ms", "p99 ms", "images a batch")}
    return by_columns(columns, _part(result, "online"))


def thousand(result: Result) -> str:
    """What a thousand GPUs of each tower take."""
    (driver,) = _part(result, "driver")
    lines = []
    for row in _part(result, "prepare"):
        if row["together"] == 1:
            continue
        a_second = 1000 * row["images/s"]
        share = a_second / result["settings"]["shard"] * driver["ms a shard"] / 1e3
        lines.append(
            [
                row["tower"],
                a_second / 1e6,
                round(1000 * row["CPUs a GPU"]),
                *(row[name] for name in ("MB/s files", "MB/s in", "MB/s out", "MB/s out, rows")),
                share,
                math.ceil(share * result["settings"]["shard"]),
                1e9 / a_second / 3600,
            ]
        )
    headers = ["tower", "million images/s", "CPUs", "files, GB/s", "pixels", "means", "rows"]
    headers += ["drivers", "images a shard for one driver", "hours for a billion images"]
    return formatted(headers, lines)


def _part(result: Result, name: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == name]


def _caption(result: Result) -> str:
    measured = [load(RESULTS / file) for file in ("towers.json", "encoder.json")]
    gpus = " and ".join(dict.fromkeys(each["gpu"] for each in measured))
    return f"GPU: {gpus}. {_on_cpu(result)}"


def _on_cpu(result: Result) -> str:
    versions = f"torch {result['torch']}, transformers {result['transformers']}, Python {result['python']}"
    return f"CPU: {result['settings']['cpu']}, {versions}, commit {(result['commit'] or 'unknown')[:9]}."
