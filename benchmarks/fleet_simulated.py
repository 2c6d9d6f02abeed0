"""Fleets and services simulated from measured parts, as rows of a result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fleet import Fleet, Service, Shard, batch_time, run_offline, run_online, varied

Row = dict[str, Any]

NODE_LINK = 100e9 / 8
"""Bytes a second of a node's network, each way."""

LOADS = (0.5, 0.7, 0.8, 0.9)


class Scenario(NamedTuple):
    """One run over many images."""

    gpus: int
    cpus: int
    """For each GPU."""
    shard: int
    """Images."""
    embedding: str = "mean"
    """Or rows: all of them are kept."""


SCENARIOS = (
    Scenario(8, 2, 128),
    Scenario(8, 4, 128),
    Scenario(8, 8, 128),
    Scenario(8, 24, 128, "rows"),
    Scenario(64, 8, 128),
    Scenario(64, 8, 1024),
    Scenario(64, 24, 1024, "rows"),
    Scenario(256, 8, 1024),
    Scenario(256, 8, 4096),
    Scenario(1000, 8, 1024),
    Scenario(1000, 8, 4096),
    Scenario(1000, 24, 4096, "rows"),
)


def offline_row(row: Mapping[str, Any], driver_s: float, scenario: Scenario) -> Row:
    """One fleet.

    Args:
        row: the parts of a tower.
        driver_s: of the driver for a shard.
        scenario: its sizes.
    """
    gpus, cpus, size, embedding = scenario
    seconds = (row[name] * size / 1e3 for name in ("prepare ms", "encode ms", f"write {embedding} ms"))
    shard = Shard(*seconds, row["prepared KB"] * size * 1e3, row[f"{embedding} KB"] * size * 1e3)
    count = 20 * gpus
    fleet = Fleet(gpus, gpus * cpus, link_bytes_s=NODE_LINK, driver_s=driver_s)
    outcome = run_offline(varied(shard, count), fleet)
    return {
        "part": "offline",
        "tower": row["tower"],
        "embedding": embedding,
        "GPUs": gpus,
        "CPUs a GPU": cpus,
        "shard": size,
        "images/s": count * size / outcome.seconds,
        **{f"{name} busy": share for name, share in outcome.busy.items()},
        "limit": outcome.limit,
    }


def online_rows(row: Mapping[str, Any], requests: int) -> Iterator[Row]:
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
