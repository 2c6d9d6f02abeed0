"""The connector on a GPU: rows are right whatever stream reads them, and memory that the device uses waits.

The encoder returns long before the GPU is through, so that copies, cancellations and readers overtake it.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.interfaces import MODALITIES, MediaItem, MediaProcessor, PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import PositionMap
from fxsplit_encoder.connector.processes import EncoderProgram, ProcessEncoder, ProcessOptions
from fxsplit_encoder.connector.request import ConnectorConfig, EncodeRequest
from fxsplit_encoder.connector.states import Residence
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.models.media import family_processor
from fxsplit_encoder.models.prepare import ProcessorSettings
from fxsplit_encoder.models.registry import FAMILIES
from tests.connector.resources import nothing_left
from tests.connector.scenes import wait, wait_until
from tests.connector.tiny_vision import crop

from .cuda_encoders import SlowEncoder
from .support import errors

pytestmark = pytest.mark.gpu

DRIVERS = ("/dev/nvidia",)
"""What descriptors of the GPU's driver lead to. It opens some with the first memory of another process."""

WIDTH, ROWS = 8, 4096
SIZE = ROWS * WIDTH * 4
IMAGE = 9


class RandomRows(MediaProcessor):
    """Media are names, whose digests seed the pixels: (tokens, WIDTH)."""

    def count_tokens(self, item: MediaItem) -> int:
        tokens: Any = item.options.get("tokens", ROWS)
        return int(tokens)

    def digest(self, item: MediaItem) -> bytes:
        return hashlib.sha256(f"{item.media} {self.count_tokens(item)}".encode()).digest()

    def prepare(self, item: MediaItem) -> PreparedItem:
        digest = self.digest(item)
        seed = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        pixels = torch.randn(self.count_tokens(item), WIDTH, generator=seed)
        return PreparedItem(item.modality, digest, {"pixel_values": pixels}, self.count_tokens(item))


def image(name: str, tokens: int = ROWS) -> MediaItem:
    return MediaItem("image", name, {"tokens": tokens})


def expected(item: MediaItem) -> Tensor:
    return 2 * RandomRows().prepare(item).inputs["pixel_values"]


def request(*items: MediaItem, **settings: Any) -> EncodeRequest:
    prompt = PositionMap([1, *[IMAGE] * len(items), 1], ["image"] * len(items), {"image": IMAGE})
    return EncodeRequest("r", items, prompt, **settings)


class WatchedCopies(Copies):
    """Sees a buffer that is written to while an earlier copy into it is under way."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._events: dict[int, Any] = {}
        self.num_copies = 0
        self.num_early = 0

    def to_host(self, rows: Tensor, buffer: Tensor) -> Any:
        assert buffer.is_pinned()
        with self._lock:
            before = self._events.get(buffer.data_ptr())
            self.num_early += before is not None and not before.query()
        target, event = super().to_host(rows, buffer)
        with self._lock:
            self._events[buffer.data_ptr()] = event
            self.num_copies += 1
        return target, event

    @property
    def num_pending(self) -> int:
        """Copies that are under way."""
        with self._lock:
            return sum(not event.query() for event in self._events.values())


def make(encoders: Sequence[Callable[[], Any]], copies: Copies | None = None, **settings: Any) -> Connector:
    config = ConnectorConfig(**{"cpu_workers": 2, "timeout_s": None, **settings})
    return Connector(RandomRows(), encoders, config, copies=copies)


def is_empty(each: Connector) -> bool:
    each.clear_cache()
    return not any(each.stats().bytes_used.values())


@pytest.fixture
def busy_stream() -> Iterator[torch.cuda.Stream]:
    """A stream that is busy for a while with every `keep_busy`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()


def keep_busy(products: int = 10) -> None:
    load = torch.ones(4096, 4096, device="cuda")
    for _ in range(products):
        load = load @ load * 1e-5


def test_a_worker_computes_on_its_own_stream() -> None:
    encoders = [SlowEncoder("cuda:0", WIDTH, 1) for _ in range(2)]
    with make([lambda: encoders[0], lambda: encoders[1]], max_batch_items=1) as each:
        for ticket in [each.submit(request(image(str(number)))) for number in range(20)]:
            assert wait(ticket) == "ready"
    streams = [stream for encoder in encoders for stream in encoder.streams]
    assert len(streams) == len(set(streams)) == sum(len(encoder.streams) > 0 for encoder in encoders)
    assert torch.cuda.default_stream() not in streams


@pytest.mark.parametrize("device_bytes", [0, 3 * SIZE, 1 << 30])
def test_rows_that_are_merged_late_are_whole(device_bytes: int, busy_stream: torch.cuda.Stream) -> None:
    """The reader's stream is behind, requests are released at once, and others take their memory."""
    copies = WatchedCopies()
    with make(
        [lambda: SlowEncoder("cuda:0", WIDTH, 2)],
        copies,
        device_bytes=device_bytes,
        host_bytes=8 * SIZE,
        max_batch_items=4,
    ) as each:
        merged = []
        for start in range(0, 60, 4):
            items = [image(f"image {number}") for number in range(start, start + 4)]
            tickets = [each.submit(request(item)) for item in items]
            for item, ticket in zip(items, tickets, strict=True):
                assert wait(ticket) == "ready"
                if device_bytes in (0, 1 << 30):
                    assert ticket.residence(0) is (Residence.DEVICE if device_bytes else Residence.HOST)
                keep_busy()
                out = torch.zeros(ROWS + 2, WIDTH, device="cuda")
                each.merge(ticket, (0, ROWS + 2), out)
                each.release(ticket)
                merged.append((item, out))
        assert each.audit() == []
        busy_stream.synchronize()
        for item, out in merged:
            assert torch.equal(out[1:-1].cpu(), expected(item))
            assert not out[[0, -1]].any()
        wait_until(lambda: is_empty(each))
        assert each.audit() == []


def test_chunks_may_be_merged_on_several_streams() -> None:
    with make([lambda: SlowEncoder("cuda:0", WIDTH, 10)]) as each:
        items = [image("a", 1000), image("b", 500), image("a", 1000)]
        ticket = each.submit(request(*items))
        assert wait(ticket) == "ready"
        out = torch.zeros(2502, WIDTH, device="cuda")
        torch.cuda.synchronize()
        for start in range(0, 2502, 700):
            stop = min(start + 700, 2502)
            with torch.cuda.stream(torch.cuda.Stream()):
                each.merge(ticket, (start, stop), out[start:stop])
        each.release(ticket)
        torch.cuda.synchronize()
        assert torch.equal(out[1:-1].cpu(), torch.cat([expected(item) for item in items]))


@pytest.mark.parametrize("why", ["cancelled", "too slow"])
def test_a_pinned_buffer_waits_for_its_copy(why: str) -> None:
    """There is room for one: another is encoded once the copy of the one that is gone has arrived."""
    copies = WatchedCopies()
    with make([lambda: SlowEncoder("cuda:0", WIDTH, 300)], copies, device_bytes=0, host_bytes=SIZE) as each:
        warm = each.submit(request(image("warm", 10)))
        assert wait(warm) == "ready"
        each.release(warm)
        wait_until(lambda: is_empty(each))
        before = copies.num_copies
        gone = each.submit(request(image("a"), timeout_s=0.2 if why == "too slow" else None))
        wait_until(lambda: copies.num_copies == before + 1)
        if why == "cancelled":
            each.cancel(gone)
        assert wait(gone) == "unavailable"
        assert copies.num_pending == 1, "the GPU is too fast for this test: let it compute longer"
        assert (each.stats().bytes_used["host"], each.audit()) == (SIZE, [])
        item = image("b")
        ticket = each.submit(request(item))
        assert wait(ticket) == "ready"
        assert (copies.num_copies, copies.num_early) == (before + 2, 0)
        with each.read(ticket) as rows:
            assert torch.equal(rows[0].rows, expected(item))
        each.release(ticket)
        wait_until(lambda: is_empty(each))


def test_no_history_of_cancellations_mixes_rows() -> None:
    draw, copies = random.Random(0), WatchedCopies()
    torch.cuda.synchronize()
    with make(
        [lambda: SlowEncoder("cuda:0", WIDTH, 3)] * 2,
        copies,
        device_bytes=2 * SIZE,
        host_bytes=12 * SIZE,
        max_batch_items=3,
    ) as each:
        live: list[tuple[MediaItem, Any]] = []
        merged, left = [], 300
        while left or live:
            while left and len(live) < 10:
                item = image(f"image {draw.randrange(60)}")
                retention, timeout = draw.choice(["discard", "keep"]), draw.choice([None] * 5 + [0.01])
                live.append((item, each.submit(request(item, retention=retention, timeout_s=timeout))))
                left -= 1
            item, ticket = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.3:
                each.cancel(ticket)
            elif wait(ticket) == "ready":
                out = torch.zeros(ROWS + 2, WIDTH, device="cuda")
                each.merge(ticket, (0, ROWS + 2), out)
                each.release(ticket)
                merged.append((item, out))
            assert each.audit() == []
        torch.cuda.synchronize()
        assert len(merged) > 100
        for item, out in merged:
            assert torch.equal(out[1:-1].cpu(), expected(item))
        stats = each.stats()
        assert stats.discarded and copies.num_copies
        assert copies.num_early == 0
        wait_until(lambda: is_empty(each))
    assert not any(each.stats().bytes_used.values())


def test_a_process_hands_features_over() -> None:
    """One process is killed in between: the connector starts another, and nothing is left."""
    made: list[ProcessEncoder] = []

    def process() -> ProcessEncoder:
        options = ProcessOptions(max_bytes=1 << 24)
        program = EncoderProgram("tests.gpu.cuda_encoders:slow", {"device": "cuda:0"})
        made.append(ProcessEncoder(program, dict.fromkeys(MODALITIES, 4 * WIDTH), options))
        return made[-1]

    first = process()
    first.start()
    first.encode([RandomRows().prepare(image("first"))])
    first.close()
    made.clear()
    with nothing_left(DRIVERS), make([process]) as each:
        for number in range(12):
            items = [image(f"image {number}"), image(f"other {number}", 100)]
            ticket = each.submit(request(*items))
            if number == 6:
                pid = made[-1].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            assert wait(ticket) == "ready"
            assert [ticket.residence(index) for index in (0, 1)] == [Residence.DEVICE] * 2
            out = torch.zeros(ROWS + 102, WIDTH, device="cuda")
            each.merge(ticket, (0, len(out)), out)
            each.release(ticket)
            assert torch.equal(out[1:-1].cpu(), torch.cat([expected(item) for item in items]))
        assert each.stats().lost_workers == 1
        wait_until(lambda: is_empty(each))
        assert each.audit() == []


class Kept(ManagerEncoder):
    def close(self) -> None:
        """The captures are other tests' too."""


def processors(towers: Any, **sizes: Any) -> list[Any]:
    """One that normalizes pixels on the host, and one that leaves it to the device."""
    settings = {"model_type": "qwen3_vl", "vision_config": towers[0].config.to_dict()}
    given = (towers[2], FAMILIES["qwen3_vl"], settings, ProcessorSettings(**sizes))
    return [
        family_processor(*given, hash_name="sha256", normalize_later=is_later) for is_later in (False, True)
    ]


@torch.no_grad()
def eager_rows(towers: Any, prepared: PreparedItem) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of an item by the eager tower in bfloat16, and in float32."""
    pixels, grid = (
        next(value.cuda() for name, value in prepared.inputs.items() if kind in name)
        for kind in ("pixel_values", "grid_thw")
    )
    half, full = towers[0](pixels.to(torch.bfloat16), grid), towers[1](pixels, grid)
    known, exact = ([torch.cat([o.pooler_output, *o.deepstack_features], dim=1)] for o in (half, full))
    return known, exact


def test_a_captured_tower_serves_two_workers_as_eager(towers: Any, managers: dict[str, Any]) -> None:
    """Both replay the same captures, from threads and streams of their own."""
    plain, processor = processors(towers, image={"min_pixels": 32 * 32, "max_pixels": 256 * 256})
    config = ConnectorConfig(timeout_s=None, device_bytes=1 << 24)
    with Connector(processor, [lambda: Kept(managers["full"])] * 2, config) as each:
        items = [MediaItem("image", crop(number)) for number in range(40)]
        tickets = [each.submit(EncodeRequest("r", [item])) for item in items]
        for item, ticket in zip(items, tickets, strict=True):
            assert wait(ticket) == "ready"
            known, exact = eager_rows(towers, plain.prepare(item))
            with each.read(ticket, device="cuda:0") as rows:
                assert errors([rows[0].rows.cuda()], exact) <= 2 * errors(known, exact)
            each.release(ticket)
        assert each.audit() == []
        wait_until(lambda: is_empty(each))


def test_a_video_in_slices_is_the_video(towers: Any, managers: dict[str, Any]) -> None:
    """Images pass between the slices, and the rows are those of frames that know nothing of each other."""
    plain, processor = processors(towers, video={"min_pixels": 32 * 32, "max_pixels": 16 * 64 * 64})

    class Sliced(Kept):
        sizes: ClassVar[list[int]] = []

        def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
            self.sizes.extend(item.num_tokens for item in items)
            return super().encode(items)

    frames = [crop(number).resize((64, 64)) for number in range(16)]
    video = MediaItem("video", frames, {"do_sample_frames": False})
    encoder = Sliced(managers["full"])
    most = encoder.predict_cost(processor.prepare(video)) / 3
    config = ConnectorConfig(timeout_s=None, device_bytes=1 << 24, max_slice_cost=most, max_busy_share=0.5)
    with Connector(processor, [lambda: encoder], config) as each:
        tickets = [each.submit(EncodeRequest("r", [item])) for item in (video, MediaItem("image", crop(0)))]
        assert [wait(ticket) for ticket in tickets] == ["ready", "ready"]
        known, exact = eager_rows(towers, plain.prepare(video))
        with each.read(tickets[0], device="cuda:0") as rows:
            assert errors([rows[0].rows.cuda()], exact) <= 2 * errors(known, exact)
        assert len(encoder.sizes) >= 4 and max(encoder.sizes) < tickets[0].token_counts[0]
        assert each.audit() == []


def test_pixels_are_normalized_on_the_device_to_the_same_rows(towers: Any) -> None:
    manager = fx.EncoderCudaGraphManager(towers[2], fx.EncoderConfig(mode="none"), log_interval=0)
    encoder = ManagerEncoder(manager)
    made = []
    for processor in processors(towers, image={"min_pixels": 32 * 32, "max_pixels": 256 * 256}):
        items = [encoder.stage(processor.prepare(MediaItem("image", crop(number)))) for number in range(5)]
        pixels = [item.inputs["pixel_values"] for item in items]
        assert all(each.is_pinned() and each.dtype != torch.float32 for each in pixels)
        made.append(encoder.encode(items))
    for now, later in zip(*made, strict=True):
        assert torch.equal(now, later)


def test_a_tower_computes_at_its_priority(towers: Any) -> None:
    """Its captures, and what its worker computes besides."""
    config = fx.EncoderConfig(token_budgets=(64,), mode="full", stream_priority=-1)
    manager = fx.EncoderCudaGraphManager(towers[2], config, log_interval=0)
    assert manager.pool.stream.priority == -1
    encoder = ManagerEncoder(manager)
    streams = []
    with WatchedCopies().own_stream(encoder.device, encoder.stream_priority):
        streams.append(torch.cuda.current_stream())
    assert [stream.priority for stream in streams] == [-1]
    assert torch.cuda.current_stream().priority == 0
