"""The scheduler in examples/, from a request's arrival to the end of its prefill."""

from __future__ import annotations

import torch
from request_scheduler import RequestScheduler
from torch import nn

from fxsplit_encoder.connector.request import EncodeRequest

from .scenes import Stage, connector, image, prompt, rows_of, wait


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
    stage = Stage()
    stage.faults["bad"] = lambda: ValueError("bad pixels")
    with connector(stage=stage) as each:
        scheduler = RequestScheduler(each, nn.Embedding(10, 8))
        ticket = scheduler.submit(EncodeRequest("r", [image("bad")], prompt(9)))
        wait(ticket)
        ready, failed = scheduler.poll()
        assert ready == [] and failed == {"r": ticket.error} and ticket.error is not None
