"""Which stage was the limit."""

from __future__ import annotations

import pytest

from fxsplit_encoder.integrations.ray.parts import Outcome, ShardReport


def report(shard: int, prepare: float, begin: float, end: float) -> ShardReport:
    row = {"shard": shard, "images": 10, "failed": shard, "prepare": [0, prepare], "encode": [begin, end]}
    return ShardReport.of({**row, "write": [end, end + 0.5]})


def test_workers_that_wait_are_seen() -> None:
    outcome = Outcome(40, 10, (report(0, 6, 6, 8), report(1, 6, 6, 8), report(2, 8, 14, 16)), workers=2)
    assert outcome.failed == 3
    assert outcome.seconds == {"prepare": 20, "encode": 6, "write": 1.5}
    assert outcome.encoding_share == pytest.approx(6 / (10 * 2))
    assert outcome.cpus_per_worker == pytest.approx(21.5 / 6)


def test_a_run_with_nothing_left_to_do_has_no_limit() -> None:
    outcome = Outcome(40, 40, (), workers=2)
    assert (outcome.failed, outcome.encoding_share, outcome.cpus_per_worker) == (0, 0.0, 0.0)
