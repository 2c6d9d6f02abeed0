"""The simulated fleet against what can be said of one without simulating it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("simpy", reason="a development tool")

from fleet import Fleet, Shard, run_fleet, varied


@pytest.mark.parametrize(
    ("shard", "fleet", "limit", "seconds"),
    [
        (Shard(0.1, 1.0), Fleet(4, 8), "GPUs", 100 * 1.0 / 4),
        (Shard(1.0, 0.1), Fleet(4, 8), "CPUs", 100 * 1.0 / 8),
        (Shard(1.0, 0.1, 1.0), Fleet(4, 8), "CPUs", 100 * 2.0 / 8),
        (Shard(0.1, 0.1), Fleet(4, 8, driver_s=0.5), "driver", 100 * 0.5),
        (
            Shard(0.1, 0.1, 0.0, 50.0),
            Fleet(4, 8, gpus_per_node=2, link_bytes_s=100.0),
            "network",
            100 * 0.5 / 2,
        ),
        (
            Shard(0.1, 0.1, 0.0, 0.0, 50.0),
            Fleet(4, 8, gpus_per_node=4, link_bytes_s=100.0),
            "network",
            100 * 0.5,
        ),
    ],
)
def test_the_slowest_part_is_the_limit(shard: Shard, fleet: Fleet, limit: str, seconds: float) -> None:
    outcome = run_fleet([shard] * 100, fleet)
    assert outcome.limit == limit
    assert outcome.seconds == pytest.approx(seconds, rel=0.1)
    assert outcome.busy[limit] > 0.85


times = st.floats(0.01, 1.0)


@settings(max_examples=20)
@given(
    st.lists(st.builds(Shard, times, times, times), min_size=5, max_size=40),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_no_run_is_faster_than_any_of_its_parts(shards: list[Shard], gpus: int, cpus: int) -> None:
    outcome = run_fleet(shards, Fleet(gpus, cpus, gpus_per_node=2))
    assert outcome.seconds >= sum(shard.encode_s for shard in shards) / gpus - 1e-9
    assert outcome.seconds >= max(shard.encode_s + shard.write_s for shard in shards) - 1e-9
    assert all(share <= 1 + 1e-9 for share in outcome.busy.values())


def test_no_more_is_prepared_than_memory_holds() -> None:
    """With room for two shards an actor cannot work while the next one is prepared for it alone."""
    shard = Shard(1.0, 1.0, in_bytes=10.0)
    roomy, narrow = (Fleet(1, 8, store_bytes=store) for store in (1000.0, 20.0))
    assert narrow.most_under_way(10.0) == 1
    assert run_fleet([shard] * 20, roomy).busy["GPUs"] > 0.9
    assert run_fleet([shard] * 20, narrow).busy["GPUs"] < 0.6


def test_shards_vary_around_what_was_measured() -> None:
    shards = varied(Shard(1.0, 2.0, 0.5, 7.0), 4000, spread=0.2)
    assert sum(shard.encode_s for shard in shards) / 4000 == pytest.approx(2.0, rel=0.02)
    assert {shard.in_bytes for shard in shards} == {7.0}
    assert varied(Shard(1.0, 2.0), 3, spread=0.0) == [Shard(1.0, 2.0)] * 3
