"""The scheduler's interface of the specification, under its own names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxsplit_encoder.connector.request import TEXT_ONLY, EncodeRequest
from fxsplit_encoder.connector.specification import FeatureState, OmniConnector
from fxsplit_encoder.errors import InputError

from .scenes import Stage, connector, image, prompt, rows_of, wait


@pytest.fixture
def table() -> nn.Embedding:
    return nn.Embedding(10, 8)


def test_a_request_from_arrival_to_the_end_of_prefill(table: nn.Embedding) -> None:
    stage = Stage(is_open=False)
    with connector(stage=stage) as each:
        omni = OmniConnector(each, table)
        items = [image("a", 3), image("b", 2)]
        ticket = omni.on_new_request(EncodeRequest("req_001", items, prompt(1, 9, 2, 9, 3)))
        assert ticket.token_counts == (3, 2)
        assert (omni.poll(), omni.waiting_for_encoding) == ([], ["req_001"])
        assert omni.feature_state("req_001", 0) is FeatureState.ENCODING
        stage.open()
        wait(ticket)
        assert (omni.poll(), omni.ready_to_prefill, omni.poll()) == ([("req_001", None)], ["req_001"], [])
        assert omni.feature_state("req_001", 0) is FeatureState.STAGED_GPU
        (merged,), lengths = omni.prepare_prefill_batch(["req_001"], "cpu")
        assert lengths == [8]
        text = table(torch.tensor([1, 2, 3])).detach()
        rows = [rows_of(item) for item in items]
        assert torch.equal(merged, torch.cat([text[:1], rows[0], text[1:2], rows[1], text[2:]]))
        assert omni.deepstack("req_001").positions.tolist() == [1, 2, 3, 5, 6]
        assert omni.feature_state("req_001", 0) is FeatureState.MERGED
        omni.on_prefill_done("req_001", media_ids=[0])
        assert omni.ready_to_prefill == ["req_001"]
        omni.on_prefill_done("req_001", cache=True)
        states = [omni.feature_state("req_001", index) for index in range(2)]
        assert states == [FeatureState.DISCARDED, FeatureState.PREFILLED]
        assert (omni.ready_to_prefill, omni.get_stats().outcomes) == ([], {"released": 1})
        wait(omni.on_new_request(EncodeRequest("req_001", items, prompt(9, 9))))
        assert each.stats().hits == 1
        omni.abort("req_001")
        omni.abort("req_001")
        assert each.stats().live_tickets == 0


def test_what_waits_on_the_host_is_encoded_on_the_cpu(table: nn.Embedding) -> None:
    with connector(device_bytes=0) as each:
        omni = OmniConnector(each, table)
        wait(omni.on_new_request(EncodeRequest("r", [image("a")], prompt(9))))
        assert omni.feature_state("r", 0) is FeatureState.ENCODED_CPU


def test_failures_end_requests_or_their_media(table: nn.Embedding) -> None:
    stage = Stage()
    stage.faults["bad"] = lambda: ValueError("bad pixels")
    with connector(stage=stage) as each:
        omni = OmniConnector(each, table)
        fails = omni.on_new_request(EncodeRequest("fails", [image("bad")], prompt(1, 9)))
        goes_on = omni.on_new_request(EncodeRequest("on", [image("bad")], prompt(1, 9, 2), TEXT_ONLY))
        wait(fails), wait(goes_on)
        assert omni.poll() == [("on", None), ("fails", fails.error)]
        assert fails.error is not None and fails.error.kind == "encoder"
        assert omni.feature_state("fails", 0) is FeatureState.DISCARDED
        (merged,), lengths = omni.prepare_prefill_batch(["on"], "cpu")
        assert lengths == [2] and torch.equal(merged, table(torch.tensor([1, 2])))
        omni.on_prefill_done("on")
        assert omni.feature_state("on", 0) is FeatureState.DISCARDED
        assert not any(each.stats().bytes_used.values())


def test_what_cannot_be_is_said(table: nn.Embedding) -> None:
    with connector() as each:
        omni = OmniConnector(each, table)
        with pytest.raises(InputError, match="expected a PositionMap of request r's prompt"):
            omni.on_new_request(EncodeRequest("r", [image("a")]))
        omni.on_new_request(EncodeRequest("r", [image("a")], prompt(9)))
        with pytest.raises(InputError, match="id: expected one that is not in use; got r again"):
            omni.on_new_request(EncodeRequest("r", [image("a")], prompt(9)))
        for call in (
            lambda: omni.prepare_prefill_batch(["unknown"], "cpu"),
            lambda: omni.on_prefill_done("unknown"),
            lambda: omni.deepstack("r"),
        ):
            with pytest.raises(InputError, match="expected one that was"):
                call()
