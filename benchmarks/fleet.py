"""A fleet of encoders, simulated from times of its parts: how fast it is, and what limits it.

    python benchmarks/fleet.py --gpus 64 --cpus-per-gpu 12 --prepare-ms 13 --encode-ms 1.42

As in `encoder-cg encode --ray` shards are prepared by CPUs, sent to a node, encoded by one of its GPUs, and
written by CPUs again, as many under way as Ray's shared memory holds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]

_WRITE, _PREPARE = 0, 1
"""Priorities: Ray drains what is further down first."""


@dataclass(frozen=True)
class Shard:
    """What one shard costs."""

    prepare_s: float
    """Of one CPU."""
    encode_s: float
    """Of one GPU."""
    write_s: float = 0.0
    """Of one CPU."""
    in_bytes: float = 0.0
    """Prepared images, which travel to the GPU's node."""
    out_bytes: float = 0.0
    """Embeddings, which travel from there."""


@dataclass(frozen=True)
class Fleet:
    """What encodes."""

    gpus: int
    cpus: int
    """That prepare and write, of all nodes."""
    gpus_per_node: int = 8
    link_bytes_s: float = float("inf")
    """Of a node's network, each way."""
    driver_s: float = 0.0
    """Of the process that schedules all shards, for each."""
    store_bytes: float = 200e9
    """Of a node's shared memory, half of which Ray fills with what is prepared, will be, or is being encoded.
    This is the most that Ray takes by itself."""

    def most_under_way(self, in_bytes: float) -> int:
        """Shards between the beginning of their preparation and the end of their encoding, at most."""
        nodes = -(-self.gpus // self.gpus_per_node)
        room = self.store_bytes * nodes / 2
        return max(self.gpus, int(room / in_bytes)) if in_bytes else 1 << 30


@dataclass
class Outcome:
    """What came of a simulated run."""

    seconds: float = 0.0
    """From the first shard encoded to the last written."""
    busy: dict[str, float] = field(default_factory=dict)
    """The share of that time in which GPUs, CPUs, the busiest node's network and the driver worked."""

    @property
    def limit(self) -> str:
        """What worked most."""
        return max(self.busy, key=lambda name: self.busy[name])


class _Node:
    def __init__(self, env: simpy.Environment, gpus: int) -> None:
        self.gpus = simpy.Resource(env, gpus)
        self.arriving = simpy.Resource(env)
        self.leaving = simpy.Resource(env)
        self.load = 0
        self.link_s = {self.arriving: 0.0, self.leaving: 0.0}


class _Run:
    def __init__(self, fleet: Fleet, in_bytes: float) -> None:
        self.env = simpy.Environment()
        self.fleet = fleet
        counts = [min(fleet.gpus_per_node, fleet.gpus - n) for n in range(0, fleet.gpus, fleet.gpus_per_node)]
        self.nodes = [_Node(self.env, count) for count in counts]
        self.cpus = simpy.PriorityResource(self.env, fleet.cpus)
        self.driver = simpy.Resource(self.env)
        self.under_way = simpy.Resource(self.env, fleet.most_under_way(in_bytes))
        self.worked = {"GPUs": 0.0, "CPUs": 0.0, "driver": 0.0}
        self.first = float("inf")
        self.last = 0.0

    def source(self, shards: Iterable[Shard]) -> Process:
        for shard in shards:
            slot = self.under_way.request()
            yield slot
            self.env.process(self.shard(shard, slot))

    def shard(self, shard: Shard, slot: simpy.Event) -> Process:
        yield from self.use("driver", self.driver, self.fleet.driver_s)
        yield from self.use("CPUs", self.cpus, shard.prepare_s, _PREPARE)
        node = min(self.nodes, key=lambda each: each.load / each.gpus.capacity)
        node.load += 1
        yield from self.send(node, node.arriving, shard.in_bytes)
        with node.gpus.request() as gpu:
            yield gpu
            self.first = min(self.first, self.env.now)
            yield self.env.timeout(shard.encode_s)
            self.worked["GPUs"] += shard.encode_s
        node.load -= 1
        self.under_way.release(slot)
        yield from self.send(node, node.leaving, shard.out_bytes)
        yield from self.use("CPUs", self.cpus, shard.write_s, _WRITE)
        self.last = self.env.now

    def use(self, name: str, resource: simpy.Resource, seconds: float, *priority: int) -> Process:
        with resource.request(*priority) as turn:
            yield turn
            begin = self.env.now
            yield self.env.timeout(seconds)
            self.worked[name] += self.env.now - max(begin, min(self.first, self.env.now))

    def send(self, node: _Node, way: simpy.Resource, num_bytes: float) -> Process:
        seconds = num_bytes / self.fleet.link_bytes_s
        with way.request() as turn:
            yield turn
            yield self.env.timeout(seconds)
            node.link_s[way] += seconds


def run_fleet(shards: Sequence[Shard], fleet: Fleet) -> Outcome:
    """All shards through a fleet, in the order given."""
    run = _Run(fleet, max(shard.in_bytes for shard in shards))
    run.env.process(run.source(shards))
    run.env.run()
    seconds = run.last - run.first
    link_s = max(max(node.link_s.values()) for node in run.nodes)
    busy = {"GPUs": run.worked["GPUs"] / fleet.gpus, "CPUs": run.worked["CPUs"] / fleet.cpus}
    busy |= {"network": link_s, "driver": run.worked["driver"]}
    return Outcome(seconds, {name: worked / seconds for name, worked in busy.items()})


def varied(shard: Shard, count: int, spread: float = 0.1, seed: int = 0) -> list[Shard]:
    """Shards whose times vary, by this relative standard deviation, around one's."""
    draw = random.Random(seed)

    def times(seconds: float) -> float:
        return seconds * draw.gammavariate(spread**-2, spread**2) if spread else seconds

    seconds = (shard.prepare_s, shard.encode_s, shard.write_s)
    return [Shard(*map(times, seconds), shard.in_bytes, shard.out_bytes) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--cpus-per-gpu", type=float, default=12)
    parser.add_argument(
        "--prepare-ms", type=float, required=True, help="CPU time to decode and resize an image"
    )
    parser.add_argument("--encode-ms", type=float, required=True, help="of a GPU, for an image among many")
    parser.add_argument("--write-ms", type=float, default=0.0, help="CPU time to write an image's embedding")
    parser.add_argument("--image-kb", type=float, default=442, help="prepared pixels of an image")
    parser.add_argument("--link-gbit", type=float, default=100, help="network of a node of 8 GPUs, each way")
    parser.add_argument("--driver-ms", type=float, default=0.0, help="of the driver, for a shard")
    parser.add_argument("--shard-size", type=int, default=128)
    given = parser.parse_args()
    images, cpus = given.shard_size, max(1, round(given.gpus * given.cpus_per_gpu))
    link_bytes_s, driver_s = given.link_gbit * 1e9 / 8, given.driver_ms / 1e3
    fleet = Fleet(given.gpus, cpus, link_bytes_s=link_bytes_s, driver_s=driver_s)
    seconds = (ms * images / 1e3 for ms in (given.prepare_ms, given.encode_ms, given.write_ms))
    shard = Shard(*seconds, in_bytes=given.image_kb * 1e3 * images)
    count = 40 * given.gpus
    outcome = run_fleet(varied(shard, count), fleet)
    print(f"{count * images / outcome.seconds:.0f} images a second; limit: {outcome.limit}")
    print(", ".join(f"{name} {share:.0%}" for name, share in outcome.busy.items()))


if __name__ == "__main__":
    main()
