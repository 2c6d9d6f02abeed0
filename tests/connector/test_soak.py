"""The connector under load and faults, for a while: none lost, none hung, nothing left."""

from __future__ import annotations

import itertools
import random

import pytest

from fxsplit_encoder.connector import ConnectorStats

from . import tiny_vision
from .resources import nothing_left
from .soak import Engine, KilledProcess, make_connector, make_references, resident_bytes, shared_memory_files


def serve(engine: Engine, num_requests: int) -> None:
    engine.serve(num_requests)
    connector = engine.connector
    assert sum(engine.ends[end] for end in ("released", "failed", "cancelled")) == num_requests
    assert connector.audit() == []
    assert connector.stats().live_tickets == connector.stats().waiting_items == 0


def has_met(stats: ConnectorStats) -> list[int]:
    """What the load is to bring about."""
    return [stats.lost_workers, stats.split_batches, stats.retries, stats.hits, stats.evictions]


def test_some_requests_with_faults() -> None:
    files, references = shared_memory_files(), make_references(60)
    tiny_vision.manager()  # what compiling leaves behind stays
    with nothing_left():
        with make_connector(rate=0.1) as connector:
            engine = Engine(connector, random.Random(0), 60, references)
            serve(engine, 400)
            # Which faults are met depends on how requests fall into batches, and that on the machine.
            for _ in range(9):
                if all(has_met(connector.stats())):
                    break
                serve_more(engine, 200)
            stats = connector.stats()
        assert connector.audit() == []
        assert not any(connector.stats().bytes_used.values())
    assert engine.checked > 50
    assert all(has_met(stats)), stats
    assert shared_memory_files() <= files


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_with_faults() -> None:
    files, references = shared_memory_files(), make_references(600)
    tiny_vision.manager()
    with nothing_left():
        seeds = itertools.count()
        with make_connector(0.05, [lambda: KilledProcess(0.01, next(seeds))]) as connector:
            engine = Engine(connector, random.Random(1), 600, references)
            serve(engine, 2_000)
            before = resident_bytes()
            serve_more(engine, 8_000)
            grown = resident_bytes() - before
            stats = connector.stats()
        assert connector.audit() == []
        assert not any(connector.stats().bytes_used.values())
    # The second is of an encoder that was started again, since its process had been killed.
    assert next(seeds) > 1
    print(f"\n{stats}\n{engine.ends}, {engine.checked} checked, {grown / 2**20:.1f} MiB more")
    assert grown < 64 << 20
    assert shared_memory_files() <= files


def serve_more(engine: Engine, num_requests: int) -> None:
    engine.ends.clear()
    serve(engine, num_requests)
