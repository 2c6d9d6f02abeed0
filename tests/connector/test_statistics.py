"""States, what is counted, and the scheduler in examples/ from an arrival to the end of a prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from request_scheduler import RequestScheduler
from torch import nn

from fxsplit_encoder.connector.request import TEXT_ONLY, EncodeRequest
from fxsplit_encoder.connector.statistics import BOUNDS, Durations

from .scenes import Stage, connector, image, prompt, request, rows_of, wait


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_durations_are_counted_up_to_the_next_bound(seconds: list[float]) -> None:
    durations = Durations()
    for each in seconds:
        durations.add(each)
    for number, bound in enumerate(BOUNDS):
        assert sum(durations.counts[: number + 1]) == sum(each <= bound for each in seconds)
    assert durations.count == len(seconds) and durations.mean == pytest.approx(sum(seconds) / len(seconds))


def test_what_requests_came_to_is_counted() -> None:
    stage = Stage(faults={"broken": lambda: ValueError("bad pixels")})
    with connector(stage=stage, max_batch_items=4) as each:
        tickets = [
            each.submit(request("a")),
            each.submit(request("a", "b")),
            each.submit(request("broken")),
            each.submit(request("broken", failure=TEXT_ONLY)),
        ]
        for ticket in tickets:
            wait(ticket)
            each.release(ticket)
        stats = each.stats()
    assert (stats.submitted, stats.items, stats.text_only) == (4, 5, 1)
    assert stats.outcomes == {"released": 3, "failed": 1}
    assert stats.failures == {"encoder": 2}
    assert stats.hits + stats.joins == 2 and stats.misses == 3
    assert stats.ready.count == 3
    assert 0 < stats.batch_fill <= 1
    assert set(stats.bytes_peak) >= {"host", "inputs", "staging worker 0"}


def test_a_request_from_its_arrival_to_the_end_of_its_prefill() -> None:
    table = nn.Embedding(10, 8)
    items = [image("a", 3), image("b", 2)]
    with connector() as each:
        scheduler = RequestScheduler(each, table)
        ticket = scheduler.submit(EncodeRequest("r1", items, prompt(1, 9, 2, 9, 3)))
        assert ticket.token_counts == (3, 2)
        wait(ticket)
        assert scheduler.poll() == (["r1"], {})
        text, rows = table(torch.tensor([1, 2, 3])).detach(), [rows_of(item) for item in items]
        expected = torch.cat([text[:1], rows[0], text[1:2], rows[1], text[2:]])
        assert torch.equal(scheduler.embeddings("r1", "cpu"), expected)
        scheduler.prefilled("r1", keep=True)
        assert each.stats().outcomes == {"released": 1}
        wait(scheduler.submit(EncodeRequest("r2", items, prompt(9, 9))))
        assert each.stats().hits == 2


def test_a_request_that_fails_is_reported_with_its_reason() -> None:
    with connector(stage=Stage(faults={"bad": lambda: ValueError("bad pixels")})) as each:
        scheduler = RequestScheduler(each, nn.Embedding(10, 8))
        ticket = scheduler.submit(EncodeRequest("r", [image("bad")], prompt(9)))
        wait(ticket)
        ready, failed = scheduler.poll()
        assert ready == [] and failed == {"r": ticket.error} and ticket.error is not None
