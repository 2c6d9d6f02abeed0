"""Memory that a device still uses belongs to nobody else: copies that take their time, injected."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeProcessor
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.request import media_bytes
from fxsplit_encoder.connector.states import Residence, State
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError
from fxsplit_encoder.media import AudioSamples, VideoFrames

from .scenes import (
    SlowCopies,
    Stage,
    connector,
    image,
    kind_of,
    prompt,
    ready,
    request,
    rows_in,
    rows_of,
    staged,
    wait,
    wait_until,
)

PAGE = 4096


@pytest.fixture
def copies() -> SlowCopies:
    return SlowCopies()


def host(each: Connector) -> int:
    return each.stats().bytes_used["host"]


def test_rows_are_ready_once_they_are_there(copies: SlowCopies) -> None:
    with connector(copies=copies, device_bytes=0) as each:
        ticket = each.submit(request("a"))
        copies.wait_for_copy()
        assert (ticket.state, ticket.residence(0)) == (State.ENCODING, Residence.NONE)
        copies.arrive()
        wait(ticket)
        assert ticket.residence(0) is Residence.HOST
        assert torch.equal(rows_in(each, ticket), rows_of(image("a")))


@pytest.mark.parametrize("why", ["cancelled", "too slow"])
def test_a_buffer_is_not_used_again_while_a_copy_into_it_is_under_way(copies: SlowCopies, why: str) -> None:
    with connector(copies=copies, device_bytes=0, host_bytes=PAGE) as each:
        gone = each.submit(request("a", timeout_s=0.05 if why == "too slow" else None))
        copies.wait_for_copy()
        if why == "cancelled":
            each.cancel(gone)
        assert wait(gone) == "unavailable"
        waiting = each.submit(request("b"))
        assert waiting.wait(0.05) == "deferred", "all memory is in use"
        assert (host(each), each.audit()) == (PAGE, [])
        copies.arrive()
        copies.wait_for_copy()
        copies.arrive()
        assert wait(waiting) == "ready"
        assert (host(each), each.audit()) == (PAGE, [])
        assert each.stats().discarded == 1


def test_a_fault_during_a_copy_leaves_its_buffer_alone_until_it_is_over(copies: SlowCopies) -> None:
    """The device fails while it copies: its worker is lost, another encodes again into other memory."""
    with connector(copies=copies, device_bytes=0, host_bytes=2 * PAGE) as each:
        ticket = each.submit(request("a"))
        copies.wait_for_copy()
        (event, _, target), *_ = copies.pending
        copies.pending.clear()
        event.fail(RuntimeError("an illegal memory access was encountered"))
        copies.wait_for_copy()
        assert host(each) == 2 * PAGE, "the first buffer is in quarantine"
        assert each.audit() == []
        (_, _, second), *_ = copies.pending
        assert second.data_ptr() != target.data_ptr()
        copies.arrive()
        assert wait(ticket) == "ready"
        assert (host(each), each.stats().lost_workers) == (2 * PAGE, 1)
        event.come_to_pass()
        each.release(ticket)
        each.clear_cache()
        wait_until(lambda: host(each) == 0)
        assert each.audit() == []


def test_a_copy_that_cannot_be_started_fails_its_item_alone() -> None:
    class NoMemory(SlowCopies):
        def allocate(self, num_bytes: int) -> Tensor:
            if num_bytes > PAGE:
                raise MemoryError("cannot pin so much")
            return super().allocate(num_bytes)

    copies = NoMemory()
    with connector(copies=copies, device_bytes=0) as each:
        large, small = each.submit(request(image("a", 200))), each.submit(request("b"))
        copies.wait_for_copy()
        copies.arrive()
        assert (kind_of(large), wait(small)) == (("out_of_memory", True), "ready")
        assert host(each) == PAGE


def test_what_was_released_while_it_is_read_is_freed_afterwards(copies: SlowCopies) -> None:
    copies.marks_wait = True
    with connector(copies=copies) as each:
        ticket = each.submit(request("a", placeholders=prompt(9)))
        wait_until(lambda: bool(copies.marks))
        copies.marks.pop().come_to_pass()
        wait(ticket)
        with each.read(ticket):
            each.release(ticket)
            assert each.stats().bytes_used["device cpu"] == 128, "it is being read"
        each.step()
        assert each.stats().bytes_used["device cpu"] == 128, "the device is not through with it"
        assert each.has_pending_work()
        copies.marks.pop().come_to_pass()
        wait_until(lambda: not each.stats().bytes_used["device cpu"])
        assert each.audit() == []


def test_no_further_item_is_decoded_while_too_many_wait() -> None:
    with staged(input_bytes=64, cpu_workers=1, max_batch_items=1) as (each, stage):
        tickets = [each.submit(request(f"image {number}")) for number in range(30)]
        stage.wait_for_batch()
        wait_until(lambda: each.stats().bytes_used["inputs"] >= 64)
        assert each.stats().bytes_peak["inputs"] <= 64 + 16
        stage.open()
        assert {wait(ticket) for ticket in tickets} == {"ready"}
        assert each.stats().bytes_peak["inputs"] <= 64 + 16
        assert each.stats().bytes_used["inputs"] == 0


class Arrays(FakeProcessor):
    def digest(self, item: MediaItem) -> bytes:
        return super().digest(replace(item, media=self.name(item)))

    def prepare(self, item: MediaItem) -> PreparedItem:
        return super().prepare(replace(item, media=self.name(item)))

    @staticmethod
    def name(item: MediaItem) -> str:
        return item.media.tobytes().decode() if isinstance(item.media, np.ndarray) else str(item.media)


def array(name: str) -> MediaItem:
    return MediaItem("image", np.frombuffer(name.encode(), np.uint8).copy())


def test_raw_media_are_bounded_until_they_are_encoded() -> None:
    with staged(processor=Arrays(), media_bytes=10) as (each, stage):
        waiting = each.submit(request(array("a" * 8), tenant="a"))
        stage.wait_for_batch()
        assert each.stats().bytes_used["media"] == 8
        with pytest.raises(ConnectorFullError, match="8 bytes of media wait, and media_bytes is 10"):
            each.submit(request(array("abc"), tenant="a"))
        with pytest.raises(ConnectorError, match="it has 11 bytes of media, and media_bytes is 10") as large:
            each.submit(request(array("a" * 11)))
        assert (large.value.kind, large.value.retryable) == ("too_large", False)
        other = each.submit(request(array("b" * 8), tenant="b"))
        assert each.audit() == []
        stage.open()
        assert (wait(waiting), wait(other)) == ("ready", "ready")
        assert (each.stats().bytes_used["media"], each.audit()) == (0, [])


def test_no_media_are_kept_of_features_that_are_cached_or_of_requests_that_ended() -> None:
    with connector(processor=Arrays(), stage=Stage(faults={"bad": lambda: ValueError("bad")})) as each:
        items = [array("kept"), array("bad"), array("left out")]
        seen = [weakref.ref(item.media) for item in items]  # type: ignore[type-var]
        kept = ready(each, items[0], retention="keep")
        failed = each.submit(request(items[1]))
        cancelled = each.submit(request(items[2]))
        each.cancel(cancelled)
        assert wait(failed) == "unavailable"
        items.clear()
        wait_until(lambda: [ref() is None for ref in seen] == [False, True, True])
        assert failed.request.items[0].media is None
        each.release(kept)
        assert each.hold(kept) == "ready"
        each.release(kept)
        del kept
        wait_until(lambda: seen[0]() is None)
        hits = each.stats().hits
        ready(each, array("kept"))
        assert (each.stats().hits - hits, each.stats().bytes_used["media"], each.audit()) == (1, 0, [])


@pytest.mark.parametrize(
    ("media", "expected"),
    [
        ("a path", 0),
        (None, 0),
        (b"12345", 5),
        (memoryview(np.zeros(3, np.float32)), 12),
        (torch.zeros(2, 3), 24),
        (Image.new("RGB", (4, 5)), 60),
        (VideoFrames([Image.new("L", (4, 5))] * 3), 60),
        (VideoFrames(np.zeros((2, 4, 5, 3), np.uint8)), 120),
        (AudioSamples(np.zeros(7, np.float32), 16000), 28),
        ([b"12", b"345"], 5),
    ],
)
def test_bytes_of_raw_media(media: object, expected: int) -> None:
    assert media_bytes(media) == expected
