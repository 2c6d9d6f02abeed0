"""How many images a second a fleet of encoders encodes at most, and which of its stages limits it.

    python benchmarks/fleet.py --gpus 64 --cpus-per-gpu 12 --prepare-ms 13 --encode-ms 1.42

As in `encoder-cg encode --ray` CPUs prepare images, a node's network brings them to its GPUs, and CPUs write
what comes of them; one process schedules all shards. Stages work at the same time on other shards.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

GPUS_PER_NODE = 8


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=8)
    add("--cpus-per-gpu", type=float, default=12)
    add("--prepare-ms", type=float, required=True, help="CPU time to decode and resize an image")
    add("--encode-ms", type=float, required=True, help="of a GPU, for an image among many")
    add("--write-ms", type=float, default=0.0, help="CPU time to write an image's embedding")
    add("--image-kb", type=float, default=442, help="prepared pixels of an image")
    add("--link-gbit", type=float, default=100, help=f"network of a node of {GPUS_PER_NODE} GPUs")
    add("--driver-ms", type=float, default=0.0, help="of the process that schedules, for a shard")
    add("--shard-size", type=int, default=128)
    return parser.parse_args(arguments)


def rates(fleet: argparse.Namespace) -> dict[str, float]:
    """Images a second of each stage by itself."""
    nodes = -(-fleet.gpus // GPUS_PER_NODE)
    stages = {
        "GPUs": (fleet.gpus, fleet.encode_ms),
        "CPUs": (fleet.gpus * fleet.cpus_per_gpu, fleet.prepare_ms + fleet.write_ms),
        "network": (nodes, fleet.image_kb * 8e-3 / fleet.link_gbit),
        "driver": (fleet.shard_size, fleet.driver_ms),
    }
    return {name: 1e3 * at_once / ms for name, (at_once, ms) in stages.items() if ms}


def main() -> None:
    by_stage = rates(parse())
    limit = min(by_stage, key=lambda name: by_stage[name])
    print(f"{by_stage[limit]:.0f} images a second; limit: {limit}")
    print("busy:", ", ".join(f"{name} {by_stage[limit] / rate:.0%}" for name, rate in by_stage.items()))


if __name__ == "__main__":
    main()
