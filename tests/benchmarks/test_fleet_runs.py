"""What is read off real runs on Ray."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="has an environment of its own: make test-ray")

from cases.map_batches import second_half
from fleet_runs import as_shard, measured_seconds, preparing

from fxsplit_encoder.integrations.ray.outcome import ShardReport


def test_a_cpu_prepares_one_shard_after_another() -> None:
    assert preparing([(0.0, 1.0), (1.5, 2.0), (2.5, 4.0)]) == (1, 0.5)
    # Two at once; a shard begins 0.25 after the end that makes room for it.
    assert preparing([(0.0, 1.0), (0.5, 2.0), (1.25, 3.0), (2.25, 4.0)]) == (2, 0.25)
    assert preparing([(0.0, 1.0), (0.5, 2.0)]) == (2, 0.0)


def test_the_times_of_a_run_are_those_of_its_spans() -> None:
    spans = {"prepare": (10.0, 12.0), "encode": (15.0, 16.0), "write": (16.5, 17.0)}
    later = {"prepare": (12.0, 13.0), "encode": (16.0, 18.0), "write": (19.0, 19.5)}
    shards = [ShardReport(0, 8, 0, spans), ShardReport(1, 8, 0, later)]
    assert measured_seconds(shards) == (4.5, 5.0)
    shard = as_shard(shards[0], gap_s=0.25)
    assert (shard.prepare_s, shard.encode_s, shard.write_s) == (2.25, 1.0, 0.5)


def test_a_rate_is_that_of_the_second_half() -> None:
    arrived = [(0.0, 10), (100.0, 10), (101.0, 10), (102.0, 10)]
    assert second_half(arrived) == 10.0
    with pytest.raises(SystemExit, match="more --images"):
        second_half([(0.0, 10)])
