"""A fleet is as fast as its slowest stage."""

from __future__ import annotations

import pytest
from fleet import parse, rates

ONE = ["--prepare-ms", "10", "--encode-ms", "1"]


@pytest.mark.parametrize(
    ("options", "stage", "rate"),
    [
        ("--gpus 4 --cpus-per-gpu 100", "GPUs", 4000),
        ("--gpus 4 --cpus-per-gpu 2", "CPUs", 800),
        ("--gpus 4 --cpus-per-gpu 2 --write-ms 10", "CPUs", 400),
        ("--gpus 12 --cpus-per-gpu 100 --image-kb 1000 --link-gbit 1", "network", 2 * 125),
        ("--gpus 4 --cpus-per-gpu 100 --driver-ms 500 --shard-size 100", "driver", 200),
    ],
)
def test_the_slowest_stage_is_the_limit(options: str, stage: str, rate: float) -> None:
    by_stage = rates(parse([*ONE, *options.split()]))
    assert min(by_stage.items(), key=lambda each: each[1]) == (stage, pytest.approx(rate))
