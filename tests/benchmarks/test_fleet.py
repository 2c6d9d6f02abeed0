"""The simulated fleet against what can be said of one without simulating it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("simpy", reason="a development tool")

from fleet import Fleet, Service, Shard, batch_time, run_offline, run_online, varied


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
    outcome = run_offline([shard] * 100, fleet)
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
    ready_s = sum(shard.prepare_s for shard in shards)  # so that preparing is done before the clock starts
    outcome = run_offline(shards, Fleet(gpus, cpus, gpus_per_node=2, ready_s=ready_s))
    assert outcome.seconds >= sum(shard.encode_s for shard in shards) / gpus - 1e-9
    assert outcome.seconds >= max(shard.encode_s + shard.write_s for shard in shards) - 1e-9
    assert all(share <= 1 + 1e-9 for share in outcome.busy.values())


def test_no_more_is_prepared_than_memory_holds() -> None:
    """With room for two shards an actor cannot work while the next one is prepared for it alone."""
    shard = Shard(1.0, 1.0, in_bytes=10.0)
    roomy, narrow = (Fleet(1, 8, store_bytes=store) for store in (1000.0, 20.0))
    assert narrow.most_under_way(10.0) == 1
    assert run_offline([shard] * 20, roomy).busy["GPUs"] > 0.9
    assert run_offline([shard] * 20, narrow).busy["GPUs"] < 0.6


def test_shards_vary_around_what_was_measured() -> None:
    shards = varied(Shard(1.0, 2.0, 0.5, 7.0), 4000, spread=0.2)
    assert sum(shard.encode_s for shard in shards) / 4000 == pytest.approx(2.0, rel=0.02)
    assert {shard.in_bytes for shard in shards} == {7.0}
    assert varied(Shard(1.0, 2.0), 3, spread=0.0) == [Shard(1.0, 2.0)] * 3


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_requests_one_by_one_wait_as_the_formula_says(load: float) -> None:
    """Pollaczek-Khinchine for one server of constant times."""
    service = Service(1, 100, 0.0, lambda images: 0.01, max_batch=1)
    online = run_online(service, load / 0.01, 6000)
    mean = sum(online.latencies) / len(online.latencies)
    assert mean == pytest.approx(0.01 + load * 0.01 / (2 * (1 - load)), rel=0.1)
    assert set(online.batches) == {1}


def test_what_waits_is_encoded_together_and_the_least_loaded_is_better() -> None:
    seconds = batch_time([(1, 0.003), (8, 0.01)])
    rate = 0.8 * 4 * 8 / seconds(8)
    waits = {}
    for is_random in (False, True):
        service = Service(4, 100, 0.0, seconds, max_batch=8, is_random=is_random)
        online = run_online(service, rate, 3000)
        waits[is_random] = online.quantile(0.95)
        assert 1 < sum(online.batches) / len(online.batches) <= 8
        assert len(online.latencies) == sum(online.batches) == 3000
    assert waits[False] < waits[True]


def test_a_service_that_is_full_refuses() -> None:
    service = Service(1, 100, 0.0, lambda images: 0.01 * images, max_batch=4, max_waiting=8)
    online = run_online(service, 1000.0, 2000)
    assert online.refused > 1000
    assert online.refused + len(online.latencies) == 2000
    # A batch under way, one that is full, and its own.
    assert max(online.latencies) <= 3 * 4 * 0.01


def test_times_between_batches_are_on_a_line() -> None:
    seconds = batch_time([(24, 0.034), (1, 0.003), (4, 0.006)])
    assert [seconds(1), seconds(4), seconds(24)] == pytest.approx([0.003, 0.006, 0.034])
    assert seconds(14) == pytest.approx(0.020)
    assert seconds(44) == pytest.approx(0.062)
