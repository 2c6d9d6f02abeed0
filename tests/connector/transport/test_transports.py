"""What a transport between two processes promises."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from fxsplit_encoder.connector.transport.blocks import Block, HeldBlocks
from fxsplit_encoder.connector.transport.layout import DTYPES, Handle, TensorLayout
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.connector.transport.wire import (
    connected_sockets,
)
from fxsplit_encoder.errors import InputError, TransportError, TransportFullError
from tests.connector.resources import eventually, nothing_left


def connect(first: Any, second: Any, timeout: float = 60.0) -> None:
    ours, theirs = connected_sockets()
    other = threading.Thread(target=second.connect, args=(theirs, timeout))
    other.start()
    first.connect(ours, timeout)
    other.join()


def shared_memory_ends(
    max_bytes: int = 1 << 20, **options: Any
) -> tuple[SharedMemoryTransport, SharedMemoryTransport]:
    ends = SharedMemoryTransport(max_bytes, **options), SharedMemoryTransport(max_bytes, **options)
    connect(*ends)
    return ends


MAX_BYTES = 1 << 20
Ends = tuple[SharedMemoryTransport, SharedMemoryTransport]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Who puts, and who gets."""
    with nothing_left():
        both = shared_memory_ends(MAX_BYTES)
        yield both
        for end in both:
            end.close()


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.resolve_conj().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)


def all_kinds() -> dict[str, torch.Tensor]:
    tensors = {name: (torch.rand(3, 5) * 9).to(dtype) for name, dtype in DTYPES.items()}
    strided = {"transposed": torch.rand(4, 6).t(), "stepped": torch.arange(20)[::3]}
    expanded = {
        "expanded": torch.rand(1, 3).expand(4, 3),
        "conjugate": torch.rand(2, dtype=torch.complex64).conj(),
    }
    return {**tensors, **strided, **expanded, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 7)}


def test_tensors_of_every_kind_arrive(ends: Ends) -> None:
    put, got = ends
    buffers = all_kinds()
    meta = {"grid": (1, 4, 6), "timestamps": [0.0, 0.5], "more": torch.arange(3)}
    handle = put.put(b"key", buffers, meta)
    again = got.get(handle)
    assert again.buffers.keys() == buffers.keys()
    assert all(equal(again.buffers[name], buffers[name]) for name in buffers)
    assert {name: again.meta[name] for name in ("grid", "timestamps")} == {
        "grid": (1, 4, 6),
        "timestamps": [0.0, 0.5],
    }
    assert torch.equal(again.meta["more"], torch.arange(3))
    assert (handle.key, handle.num_bytes) == (b"key", sum(tensor.nbytes for tensor in buffers.values()))


def test_tensors_are_filled_where_the_reader_says(ends: Ends) -> None:
    put, got = ends
    handle = put.put(b"", {"x": torch.arange(6).view(2, 3)})
    into = {"x": torch.zeros(3, 2, dtype=torch.int64).t()}
    assert got.get(handle, into).buffers["x"] is into["x"]
    assert into["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(InputError, match="into"):
        got.get(handle, {"y": into["x"]})


def test_the_bound_holds(ends: Ends) -> None:
    put, got = ends
    half = torch.zeros(MAX_BYTES // 2 - 64, dtype=torch.uint8)
    handles = [put.put(b"", {"x": half}) for _ in range(2)]
    with pytest.raises(TransportFullError) as error:
        put.put(b"", {"x": half}, timeout=0.01)
    assert error.value.retryable
    with pytest.raises(InputError, match="at most max_bytes"):
        put.put(b"", {"x": torch.zeros(MAX_BYTES + 1, dtype=torch.uint8)}, timeout=60)
    got.release(handles[0])
    assert eventually(lambda: put.held_bytes <= MAX_BYTES // 2)
    put.put(b"", {"x": half})


def test_a_put_that_fails_holds_nothing(ends: Ends) -> None:
    put, _ = ends
    cases: list[tuple[Any, Any, str]] = [
        ({"x": torch.ones(1, device="meta")}, {}, "x"),
        ({"x": "text"}, {}, "x"),
        ({"x": torch.ones(1)}, {"image": object()}, r"meta\.image"),
    ]
    for buffers, meta, name in cases:
        with pytest.raises(InputError, match=name):
            put.put(b"", buffers, meta)
    assert put.held_bytes == 0


def test_a_handle_of_another_transport_is_unknown(ends: Ends) -> None:
    put, got = ends
    handle = put.put(b"", {"x": torch.ones(1)})
    for other in (dataclasses.replace(handle, owner="another"), dataclasses.replace(handle, number=99)):
        with pytest.raises(TransportError):
            got.get(other)
        got.release(other)
        put.release(other)
    assert put.held_bytes > 0


def test_a_closed_transport_says_so(ends: Ends) -> None:
    put, got = ends
    handle = put.put(b"", {"x": torch.ones(1)})
    put.close()
    put.close()
    assert put.held_bytes == 0
    with pytest.raises(TransportError, match="closed"):
        put.put(b"", {"x": torch.ones(1)})
    put.release(handle)
    got.release(handle)


def test_eight_threads_put_and_get(ends: Ends) -> None:
    put, got = ends
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for round_number in range(100):
            value = 1000 * seed + round_number
            shape = (source.randint(0, 40), source.randint(1, 16))
            try:
                handle = put.put(bytes([seed]), {"x": torch.full(shape, value)}, {"value": value})
            except TransportFullError:
                continue
            payload = got.get(handle)
            if payload.meta["value"] != value or not (payload.buffers["x"] == value).all():
                wrong.append(value)
            source.choice((put, got)).release(handle)
            put.audit()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert eventually(lambda: put.held_bytes == 0)


def test_views_show_the_memory_itself(ends: Ends) -> None:
    put, got = ends
    handle = put.put(b"", {"x": torch.ones(4)}, {"t": (1,)})
    view, meta = got.view(handle)
    assert view["x"].tolist() == [1, 1, 1, 1]
    assert meta == {"t": (1,)}
    put.view(handle).buffers["x"].fill_(2)
    assert view["x"].tolist() == [2, 2, 2, 2]


def test_a_put_waits_for_room(ends: Ends) -> None:
    put, got = ends
    large = torch.ones(MAX_BYTES - 64, dtype=torch.uint8)
    first = put.put(b"", {"x": large})
    timer = threading.Timer(0.01, got.release, [first])
    timer.start()
    second = put.put(b"", {"x": 2 * large}, timeout=60)
    timer.join()
    assert got.get(second).buffers["x"].float().mean() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -64},
        {"offset": 7},
        {"offset": 1 << 62},
        {"offset": MAX_BYTES},
        {"number": 0},
        {"tensors": (TensorLayout("x", "uint8", (1 << 40,), 64),)},
        {"tensors": (TensorLayout("x", "uint8", (4,), 0),)},
        {"tensors": (TensorLayout("x", "uint8", (129,), 64),)},
        {"checksum": b"wrong"},
    ],
    ids=str,
)
def test_a_handle_that_was_tampered_with_reads_nothing(ends: Ends, change: dict[str, Any]) -> None:
    put, got = ends
    handle = put.put(b"", {"x": torch.ones(128, dtype=torch.uint8)})
    with pytest.raises(TransportError):
        got.get(dataclasses.replace(handle, **change))


def test_what_was_overwritten_meanwhile_is_noticed(ends: Ends) -> None:
    put, got = ends
    stale = put.put(b"", {"x": torch.ones(8)})
    put.release(stale)
    fresh = put.put(b"", {"x": torch.zeros(8)})
    assert fresh.offset == stale.offset
    with pytest.raises(TransportError, match="released"):
        got.get(stale)


def test_bytes_are_checked_where_that_is_asked_for() -> None:
    put, got = shared_memory_ends(MAX_BYTES, checksums=True)
    handle = put.put(b"", {"x": torch.ones(100), "y": torch.empty(0)})
    assert len(handle.checksum) == 32
    assert got.get(handle).buffers["x"].sum() == 100
    put.view(dataclasses.replace(handle, checksum=b"")).buffers["x"][50] = 0
    with pytest.raises(TransportError, match="not those that were put"):
        got.get(handle)
    put.close()
    got.close()


def test_a_peak_gives_its_pages_back() -> None:
    put, got = shared_memory_ends(64 << 20, kept_bytes=1 << 20)
    handles = [put.put(b"", {"x": torch.ones(1 << 20)}) for _ in range(8)]
    assert put.resident_bytes >= 32 << 20
    for handle in handles:
        got.release(handle)
    assert eventually(lambda: put.held_bytes == 0)
    assert put.resident_bytes <= 2 << 20
    put.close()
    got.close()


def test_the_other_end_learns_of_a_hang_up_and_still_reads() -> None:
    gone = threading.Event()
    put, got = SharedMemoryTransport(MAX_BYTES), SharedMemoryTransport(MAX_BYTES, on_hang_up=gone.set)
    connect(put, got)
    handle = put.put(b"", {"x": torch.ones(10)})
    put._peer.close()  # type: ignore[union-attr] # as if its process had ended
    assert gone.wait(30)
    assert got.get(handle).buffers["x"].sum() == 10
    got.release(handle)
    put.close()
    assert got.put(b"", {"x": torch.ones(10)}).num_bytes == 40
    got.close()


class Transports(RuleBasedStateMachine):
    """Any history of puts, gets and releases at both ends, against a dictionary."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.guard = nothing_left()
        self.guard.__enter__()
        self.ends = shared_memory_ends(1 << 14, kept_bytes=1 << 12)
        self.held: dict[tuple[str, int], int] = {}

    @rule(target=handles, end=st.integers(0, 1), size=st.integers(0, 3000), value=st.integers(0, 255))
    def put(self, end: int, size: int, value: int) -> Any:
        buffers = {"x": torch.full((size,), value, dtype=torch.uint8), "y": torch.tensor(value)}
        try:
            handle = self.ends[end].put(b"", buffers, {"value": value})
        except TransportFullError:
            return multiple()
        self.held[handle.owner, handle.number] = value
        return handle

    @rule(handle=handles, end=st.integers(0, 1))
    def get(self, handle: Handle, end: int) -> None:
        value = self.held.get((handle.owner, handle.number))
        if value is None:
            with pytest.raises(TransportError, match=r"nothing is held|released"):
                self.ends[end].get(handle)
        else:
            payload = self.ends[end].get(handle)
            assert (payload.buffers["x"] == value).all()
            assert (payload.buffers["y"].item(), payload.meta) == (value, {"value": value})

    @rule(handle=handles, end=st.integers(0, 1))
    def release(self, handle: Handle, end: int) -> None:
        self.ends[end].release(handle)
        self.held.pop((handle.owner, handle.number), None)
        blocks = next(one._blocks for one in self.ends if one.owner == handle.owner)

        def is_free() -> bool:
            # A thread of the owner takes the block from those held first, and clears it then.
            held = sum(block.num_bytes for block in list(blocks._held.values()))
            return blocks.find(handle.number) is None and blocks.held_bytes == held

        assert eventually(is_free)

    @rule(handle=consumes(handles))
    def forget(self, handle: Handle) -> None:
        self.release(handle, 0)

    @invariant()
    def blocks_are_in_order(self) -> None:
        for end in self.ends:
            end.audit()
            numbers = [number for owner, number in self.held if owner == end.owner]
            assert end._blocks.num_held == len(numbers)
            assert end.held_bytes <= end.max_bytes

    def teardown(self) -> None:
        for end in self.ends:
            end.close()
            assert end.held_bytes == 0
        self.guard.__exit__(None, None, None)


TestTransports = Transports.TestCase
TestTransports.settings = settings(max_examples=25, stateful_step_count=30)


def test_a_block_that_cannot_be_cleared_is_free_all_the_same() -> None:
    def fail(block: Block) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    blocks = HeldBlocks(64, fail)
    block = blocks.take(64)
    with pytest.raises(RuntimeError, match="illegal"):
        blocks.give_back(block.number)
    assert blocks.held_bytes == 0
    blocks.audit()
