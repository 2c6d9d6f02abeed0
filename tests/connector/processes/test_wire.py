"""The memory and the socket that two processes share."""

from __future__ import annotations

import enum
import os
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.processes.wire import (
    DTYPES,
    Block,
    Channel,
    Encode,
    Encoded,
    FromEncoder,
    Half,
    Layout,
    Release,
    SharedMemory,
    Start,
    Started,
    Stop,
    ToEncoder,
    WireItem,
)
from fxsplit_encoder.errors import InputError, TransportError, TransportFullError
from tests.connector.resources import mapped_bytes, nothing_left

PAGE = 4096


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with nothing_left():
        made = SharedMemory(16 * PAGE)
        yield made
        made.close()
        made.close()


def floats(num_bytes: int) -> dict[str, torch.Tensor]:
    return {"x": torch.rand(num_bytes // 4)}


def test_tensors_of_every_kind_are_read_by_another_mapping(memory: SharedMemory) -> None:
    tensors = {
        name: torch.randint(0, 2, (3, 5), dtype=torch.uint8).to(dtype) for name, dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "turned": torch.rand(4, 3).t()}
    block = Half(memory, 1, 0).put(tensors)
    other = SharedMemory(16 * PAGE, os.dup(memory.descriptor))
    assert mapped_bytes() == 2 * 2 * 16 * PAGE
    again = other.read(1, msgspec.msgpack.decode(msgspec.msgpack.encode(block), type=Block))
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and again[name].shape == tensor.shape
        assert torch.equal(again[name].contiguous().view(-1).float(), tensor.reshape(-1).float())
    other.close()


def test_a_half_is_bounded_and_a_block_is_released_once(memory: SharedMemory) -> None:
    half = Half(memory, 0, 0)
    first, second = half.put(floats(10 * PAGE)), half.put(floats(6 * PAGE))
    with pytest.raises(TransportFullError, match="do not fit beside"):
        half.put(floats(4))
    with pytest.raises(InputError, match="at most max_bytes=65536"):
        half.put(floats(17 * PAGE))
    with pytest.raises(InputError, match=r"buffers\.x: expected a tensor"):
        half.put({"x": 3})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"buffers\.x: expected a dense tensor"):
        half.put({"x": torch.rand(3, 3).to_sparse()})
    half.release(first.number)
    half.release(first.number)
    third = half.put(floats(4 * PAGE))
    assert (third.offset, half.held_bytes) == (0, 10 * PAGE)
    half.release(second.number), half.release(third.number)
    assert half.held_bytes == 0
    half.close()
    with pytest.raises(TransportError, match="closed"):
        half.put(floats(4))


def test_a_peak_gives_its_pages_back(memory: SharedMemory) -> None:
    half = Half(memory, 1, kept_bytes=2 * PAGE)
    block = half.put(floats(12 * PAGE))
    assert memory.resident_bytes >= 12 * PAGE
    half.release(block.number)
    assert memory.resident_bytes <= 2 * PAGE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=40), st.randoms())
def test_no_byte_is_given_twice(steps: list[tuple[bool, int]], draw: random.Random) -> None:
    memory = SharedMemory(16 * PAGE)
    half = Half(memory, 0, 0)
    held: dict[Block, torch.Tensor] = {}
    for is_put, num_bytes in steps:
        if is_put:
            values = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
            try:
                held[half.put({"x": values})] = values
            except TransportFullError:
                continue
        elif held:
            block = draw.choice(list(held))
            half.release(block.number)
            del held[block]
        assert all(torch.equal(memory.read(0, block)["x"], values) for block, values in held.items())
    memory.close()


def test_small_blocks_do_not_keep_a_large_one_out(memory: SharedMemory) -> None:
    half, order = Half(memory, 0, 0), []
    held = [half.put(floats(8 * PAGE)), half.put(floats(8 * PAGE))]

    def put(name: str, pages: int) -> None:
        block = half.put(floats(pages * PAGE), timeout=60.0)
        order.append((block.number, name))  # threads may come here in another order

    threads = []
    for name, pages in (("large", 15), ("small", 1)):
        threads.append(threading.Thread(target=put, args=(name, pages)))
        threads[-1].start()
        while len(half._waiting) < len(threads):
            pass
    half.release(held[0].number)
    assert order == []
    half.release(held[1].number)
    for thread in threads:
        thread.join()
    assert [name for _, name in sorted(order)] == ["large", "small"]


def test_whoever_waits_for_room_is_woken_by_the_end(memory: SharedMemory) -> None:
    half = Half(memory, 0, 0)
    half.put(floats(16 * PAGE))
    threading.Timer(0.02, half.close).start()
    with pytest.raises(TransportError, match="closed"):
        half.put(floats(4), timeout=60.0)


@pytest.mark.parametrize(
    "block",
    [
        Block(1, 1 << 40, 64, ()),
        Block(1, -64, 64, ()),
        Block(1, 3, 64, ()),
        Block(1, 0, 1 << 40, ()),
        Block(1, 0, 64, (Layout("x", "float32", (17,), 0),)),
        Block(1, 0, 64, (Layout("x", "float32", (1,), 64),)),
        Block(1, 0, 64, (Layout("x", "float32", (-1,), 0),)),
        Block(1, 0, 64, (Layout("x", "object", (1,), 0),)),
        Block(1, 0, 64, (Layout("x", "uint8", (1 << 46, 1 << 46), 0),)),
    ],
)
def test_no_block_leads_outside_its_half(memory: SharedMemory, block: Block) -> None:
    with pytest.raises(TransportError):
        memory.read(0, block)


def test_memory_that_cannot_be_made_or_mapped_is_an_error(memory: SharedMemory) -> None:
    for size in (0, -1, 1 << 62):
        with nothing_left(), pytest.raises(InputError, match="max_bytes"):
            SharedMemory(size)
    with pytest.raises(OSError):  # sealed
        os.ftruncate(memory.descriptor, PAGE)
    with pytest.raises(InputError, match="cannot be made"):
        SharedMemory(17 * PAGE, os.dup(memory.descriptor))
    memory.close()
    with pytest.raises(TransportError, match="closed"):
        memory.read(0, Block(1, 0, 64, ()))


# --- messages

Ends = tuple[Channel[ToEncoder], Channel[FromEncoder], socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both, and the raw socket of the first."""
    with nothing_left():
        process, (here, there) = os.pidfd_open(os.getpid()), socket.socketpair()
        reader: Channel[ToEncoder] = Channel(here, process, ToEncoder)
        writer: Channel[FromEncoder] = Channel(there, process, FromEncoder)
        yield reader, writer, there
        reader.close(), writer.close()
        os.close(process)


class Color(enum.Enum):
    RED = "red"


def test_messages_arrive_as_they_were(ends: Ends) -> None:
    reader, writer, _ = ends
    values: dict[str, Any] = {"a": [1, 2.5, None, True], "b": {"c": b"bytes"}, "d": "ä" * 100_000}
    block = Block(3, 64, 128, (Layout("x", "bfloat16", (2, 3), 0),))
    item = WireItem("video", b"digest", 7, {**values, "color": Color.RED, "number": np.float32(0.5)})
    sent = [Start("a:b", values), Encode(5, [item], block), Release(4), Stop()]

    def send() -> None:
        for message in sent:
            writer.send(writer.encode(message))

    thread = threading.Thread(target=send)
    thread.start()
    again = [reader.receive() for _ in sent]
    thread.join()
    expected = WireItem("video", b"digest", 7, {**values, "color": "red", "number": 0.5})
    assert again == [sent[0], Encode(5, [expected], block), *sent[2:]]


def test_tensors_and_arrays_arrive_as_what_they_were(ends: Ends) -> None:
    reader, writer, _ = ends
    values = {"t": torch.rand(2, 3).bfloat16(), "a": np.arange(6).reshape(2, 3), "e": torch.empty(0)}
    writer.send(writer.encode(Start("a:b", values)))
    message: Any = reader.receive()
    assert torch.equal(message.arguments["t"], values["t"])
    assert isinstance(message.arguments["a"], np.ndarray) and (message.arguments["a"] == values["a"]).all()
    assert message.arguments["e"].shape == (0,)


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [
        *(object(), 1 << 70, {1.5j: 1}, DEEP, lambda: 1, np.array(["x"], object)),
        *(torch.zeros(1 << 19), torch.rand(3).to_sparse(), b"x" * (33 << 20)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_message_takes_is_an_error(ends: Ends, value: object) -> None:
    with pytest.raises(InputError, match="values: expected"):
        ends[1].encode(Start("a:b", {"x": value}))


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\x00\x00\x00x",
        b"\xff\xff\xff\xff",
        b"\x07\x00\x00\x00garbage",
        msgspec.msgpack.encode(["Started", {"image": 1}]),
        msgspec.msgpack.encode(["Release", "many"]),
        msgspec.msgpack.encode(["Start", "1", "a", {"x": msgspec.msgpack.Ext(9, b"\x90")}]),
        msgspec.msgpack.encode(
            ["Start", "1", "a", {"x": msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["int8", [9], b"1"]))}]
        ),
    ],
)
def test_what_nobody_understands_is_an_error(ends: Ends, data: bytes) -> None:
    reader, _, raw = ends
    if data[1:4] not in (b"\x00\x00\x00", b"\xff\xff\xff"):
        data = len(data).to_bytes(4, "little") + data
    raw.sendall(data)
    with pytest.raises(TransportError, match="a message"):
        reader.receive()


def test_the_end_of_the_other_is_seen_though_its_socket_is_open() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    process, (here, there) = os.pidfd_open(pid), socket.socketpair()
    os.waitpid(pid, 0)
    channel: Channel[FromEncoder] = Channel(here, process, FromEncoder)
    writer: Channel[ToEncoder] = Channel(there, process, ToEncoder)
    writer.send(writer.encode(Started({"image": 1})))
    writer.send(writer.encode(Encoded(1, {}, is_last=True))[:5])
    assert channel.receive() == Started({"image": 1}), "its last words"
    assert channel.receive() is None
    channel.close(), writer.close(), os.close(process)
