"""A long video in slices: images pass between them, an engine gets its share, and rows are the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.connector.books.encoding import Worker
from fxsplit_encoder.connector.books.tickets import Account
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder

from . import tiny_vision
from .scenes import (
    PATIENCE_S,
    SlowCopies,
    Stage,
    assert_nothing_is_left,
    connector,
    encode_behind,
    image,
    kind_of,
    names_of,
    ready,
    request,
    rows_in,
    rows_of,
    wait,
    wait_until,
    wait_until_queued,
)


class Slicing(FakeEncoder):
    """Cuts what has a number of rows by rows, whose values do not depend on that."""

    def __init__(self, on_encode: Any = lambda items: None) -> None:
        super().__init__(on_encode=on_encode)

    def slices(self, item: PreparedItem, most_cost: float) -> list[PreparedItem]:
        most, first = int(most_cost), 0
        made = []
        while first < item.num_tokens:
            count = min(most, item.num_tokens - first)
            facts = {**item.metadata, "first": first}
            made.append(replace(item, num_tokens=count, metadata=facts))
            first += count
        return made

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        features = super().encode(items)
        firsts: list[Any] = [item.metadata.get("first", 0) for item in items]
        return [rows + first for rows, first in zip(features, firsts, strict=True)]


class Seen:
    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []

    def __call__(self, items: Sequence[PreparedItem]) -> None:
        tokens = [item.num_tokens for item in items]
        self.batches.append(list(zip(names_of(items), tokens, strict=True)))


@pytest.mark.parametrize("encoder", [FakeEncoder, Slicing])
def test_nothing_is_cut_unless_asked_for(encoder: Any) -> None:
    seen = Seen()
    settings = {} if encoder is Slicing else {"max_slice_cost": 4.0}
    with connector([lambda: encoder(on_encode=seen)], **settings) as each:
        ready(each, image("long", 10))
        assert seen.batches == [[("long", 10)]]


def test_items_that_are_not_cut_are_encoded_together() -> None:
    stage = Stage(is_open=False)
    with connector([lambda: Slicing(stage)], stage=stage, max_slice_cost=4.0, max_batch_items=3) as each:
        items = [image("a", 2), image("long", 6), image("b", 3)]
        told = encode_behind(each, stage, *map(request, items))
        assert told == ["ready"] * 4
        assert stage.batches == [["first"], ["a", "b"], ["long"], ["long"]]
        for item in items:
            assert torch.equal(rows_in(each, ready(each, item)), rows_of(item))


def test_a_device_has_no_more_than_two_slices_and_images_pass_between_them() -> None:
    copies, seen = SlowCopies(), Seen()
    copies.marks_wait = True
    with connector([lambda: Slicing(seen)], copies=copies, max_slice_cost=4.0) as each:
        video = each.submit(request(image("video", 20)))
        wait_until(lambda: len(copies.marks) == 2)
        assert len(seen.batches) == 2
        small = each.submit(request(image("image", 2)))
        large = each.submit(request(image("large", 6)))
        wait_until_queued(small, large)
        assert len(seen.batches) == 2
        copies.marks[0].come_to_pass()
        wait_until(lambda: len(copies.marks) == 4)  # the image's, and that of the third slice
        assert [batch[0] for batch in seen.batches[2:]] == [("image", 2), ("video", 4)]
        assert each.audit() == []
        copies.marks[2].come_to_pass()
        assert wait(small) == "ready", "while the video is encoded"
        assert video.availability == large.availability == "deferred"
        finisher = threading.Thread(target=_pass_all, args=(copies, each), daemon=True)
        finisher.start()
        assert (wait(video), wait(large)) == ("ready", "ready")
        copies.marks_wait = False
        assert torch.equal(rows_in(each, video), rows_of(image("video", 20)))
        for ticket in (video, small, large):
            each.release(ticket)
        finisher.join(PATIENCE_S)
        assert_nothing_is_left(each)


def _pass_all(copies: SlowCopies, each: Connector) -> None:
    def nothing_waits() -> bool:
        for mark in list(copies.marks):
            mark.come_to_pass()
        return each.stats().waiting_items == 0

    wait_until(nothing_waits)


def test_a_slice_that_fails_fails_its_item_alone() -> None:
    def fail(items: Sequence[PreparedItem]) -> None:
        if any(item.metadata.get("first") == 4 for item in items):
            raise ValueError("the second slice")

    with connector([lambda: Slicing(fail)], max_slice_cost=4.0) as each:
        long, short = each.submit(request(image("long", 10))), each.submit(request(image("short", 3)))
        assert (kind_of(long), wait(short)) == (("encoder", False), "ready")
        each.release(short)
        assert each.stats().lost_workers == 0
        assert_nothing_is_left(each)


def test_a_device_that_is_lost_between_slices_is_no_items_fault() -> None:
    copies = SlowCopies()
    copies.marks_wait = True
    with connector([lambda: Slicing()], copies=copies, max_slice_cost=4.0) as each:
        ticket = each.submit(request(image("long", 12)))
        wait_until(lambda: len(copies.marks) == 2)
        copies.marks_wait = False
        copies.marks[0].fail(RuntimeError("an illegal memory access was encountered"))
        assert wait(ticket) == "ready", "by another worker"
        assert each.stats().lost_workers == 1
        assert torch.equal(rows_in(each, ticket), rows_of(image("long", 12)))
        each.release(ticket)
        assert_nothing_is_left(each)


# --- shares


def test_a_worker_rests_after_every_slice_and_not_again_at_the_end() -> None:
    worker = Worker("w", frozenset(), Account("staging", 0))
    worker.finish(0.0, 1.0, 0.25, is_slice=True)
    assert worker.rests_until == 4.0
    worker.finish(4.0, 6.0, 0.25, is_slice=True)
    assert worker.rests_until == 12.0
    worker.finish(0.0, 13.0, 0.25)
    assert worker.rests_until == 16.0, "of the last slice alone"


def test_a_worker_that_rests_between_slices_ends_when_it_is_told_to() -> None:
    seen = Seen()
    with connector([lambda: Slicing(seen)], max_slice_cost=4.0, max_busy_share=1e-9) as each:
        ticket = each.submit(request(image("long", 12)))
        wait_until(lambda: len(seen.batches) == 1)
        assert ticket.wait(0.05) == "deferred"
        assert len(seen.batches) == 1
    assert len(seen.batches) == 3, "what it has in hand it finishes, without a rest"


# --- a real tower


@pytest.fixture(scope="module")
def tiny() -> ManagerEncoder:
    return tiny_vision.encoder()


@pytest.mark.parametrize("normalize_later", [False, True])
@pytest.mark.parametrize("num_slices", [2, 3, 5, 99])
def test_a_video_is_cut_by_frames(tiny: ManagerEncoder, num_slices: int, normalize_later: bool) -> None:
    frames = [tiny_vision.crop(number).resize((64, 64)) for number in range(10)]
    processor = tiny_vision.processor(normalize_later=normalize_later)
    item = tiny.stage(processor.prepare(MediaItem("video", frames, {"do_sample_frames": False})))
    num_frames = int(item.inputs["video_grid_thw"][0, 0])
    assert num_frames == 5
    cut = tiny.slices(item, tiny.predict_cost(item) / num_slices * 1.001)
    counts = [int(each.inputs["video_grid_thw"][0, 0]) for each in cut]
    assert len(cut) == min(num_slices, num_frames) and max(counts) - min(counts) <= 1
    assert sum(each.num_tokens for each in cut) == item.num_tokens
    with torch.no_grad():
        (whole,) = tiny.encode([item])
        parts = [tiny.encode([each])[0] for each in cut]
    assert [len(rows) for rows in parts] == [each.num_tokens for each in cut]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)


def test_what_cannot_be_cut_is_not(tiny: ManagerEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    photograph = tiny_vision.processor().prepare(MediaItem("image", tiny_vision.crop(0)))
    assert tiny.slices(photograph, 1e-6) == [photograph]
    clip = tiny_vision.processor().prepare(MediaItem("video", tiny_vision.clip(3)))
    assert tiny.slices(clip, 1e6) == [clip], "it is short enough"
    more = replace(clip, inputs={**clip.inputs, "seconds": torch.ones(1)})
    assert tiny.slices(more, 1e-6) == [more], "who knows what the input says of the frames"
    monkeypatch.setattr(type(tiny.manager.tower), "frames_are_independent", False)
    assert tiny.slices(clip, 1e-6) == [clip]
