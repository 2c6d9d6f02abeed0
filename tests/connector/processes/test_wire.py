"""The memory and the socket that two processes share."""

from __future__ import annotations

import ast
import enum
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

import fxsplit_encoder.connector
from fxsplit_encoder import errors
from fxsplit_encoder.connector.interfaces import PreparedItem
from fxsplit_encoder.connector.processes.wire import (
    DTYPES,
    KNOWN,
    Channel,
    Encode,
    Encoded,
    EncoderProgram,
    Failed,
    FromEncoder,
    SharedMemory,
    Started,
    ToEncoder,
    from_wire,
    to_wire,
)
from fxsplit_encoder.errors import InputError, TransportError
from tests.connector.resources import mapped_bytes, nothing_left

PAGE = 4096


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[SharedMemory]:
    with nothing_left():
        made = SharedMemory(getattr(request, "param", 16 * PAGE))
        yield made
        made.close()
        made.close()


@pytest.mark.parametrize(
    ("offset", "dtype", "shape"),
    [
        (1 << 40, torch.uint8, (64,)),
        (-64, torch.uint8, (64,)),
        (3, torch.uint8, (64,)),
        ((16 * PAGE) + (32 << 20) - 64, torch.float32, (17,)),
        (0, torch.float32, (-1,)),
        (0, torch.float32, (-1, -1)),
        (0, torch.uint8, (1 << 46, 1 << 46)),
    ],
)
def test_no_tensor_leads_outside_its_half(
    memory: SharedMemory, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    with pytest.raises(TransportError, match="is not within the shared memory"):
        memory.view(0, offset, dtype, shape)


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
        memory.view(0, 0, torch.uint8, (64,))


# --- messages


class Ends(NamedTuple):
    """The encoder process's, the parent's, and the raw sockets of both."""

    reader: Channel[ToEncoder]
    writer: Channel[FromEncoder]
    here: socket.socket
    there: socket.socket


@pytest.fixture
def ends(memory: SharedMemory) -> Iterator[Ends]:
    process, (here, there) = os.pidfd_open(os.getpid()), socket.socketpair(type=socket.SOCK_SEQPACKET)
    reader: Channel[ToEncoder] = Channel(here, process, ToEncoder, memory, half=1)
    writer: Channel[FromEncoder] = Channel(there, process, FromEncoder, memory, half=0)
    yield Ends(reader, writer, here, there)
    reader.close(), writer.close()
    os.close(process)


class Color(enum.Enum):
    RED = "red"


def test_messages_arrive_as_they_were(ends: Ends) -> None:
    reader, writer, *_ = ends
    values: dict[str, Any] = {"a": [1, 2.5, None, True], "b": {"c": b"bytes"}, "d": "ä" * 100_000}
    item = PreparedItem("video", b"digest", {}, 7, {**values, "color": Color.RED, "number": np.float32(0.5)})
    sent = [EncoderProgram("a:b", values), Encode([item]), Encode([])]
    again: list[Any] = []
    for message in sent:
        writer.send(writer.encode(message))
        again.append(reader.receive())
    assert (again[0], again[2]) == (sent[0], sent[2])
    expected = replace(item, metadata={**values, "color": "red", "number": 0.5})
    assert vars(again[1].items[0]) == vars(expected)


def test_tensors_of_every_kind_and_arrays_arrive_as_what_they_were(memory: SharedMemory, ends: Ends) -> None:
    """Through another mapping of the same file."""
    tensors = {
        name: torch.randint(0, 2, (3, 5), dtype=torch.uint8).to(dtype) for name, dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "turned": torch.rand(4, 3).t()}
    tensors |= {"watched": torch.rand(2, requires_grad=True)}
    writer = ends.writer
    other = SharedMemory(16 * PAGE, os.dup(memory.descriptor))
    assert mapped_bytes() == 2 * 2 * (16 * PAGE + (32 << 20))
    process, reading = os.pidfd_open(os.getpid()), ends.here.dup()
    reader: Channel[ToEncoder] = Channel(reading, process, ToEncoder, other, half=1)
    array = np.arange(6).reshape(2, 3)
    item = PreparedItem("image", b"", tensors, 1, {"a": array, "t": torch.ones(2)})
    writer.send(writer.encode(Encode([item])))
    message: Any = reader.receive()
    (again,) = message.items
    assert again.inputs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again.inputs[name].dtype == tensor.dtype and again.inputs[name].shape == tensor.shape
        assert torch.equal(again.inputs[name].contiguous().view(-1).float(), tensor.reshape(-1).float())
    assert isinstance(again.metadata["a"], np.ndarray) and (again.metadata["a"] == array).all()
    assert torch.equal(again.metadata["t"], torch.ones(2))
    reader.close(), os.close(process), other.close()


def test_what_does_not_fit_is_an_error_and_memory_is_used_again_after_an_answer(ends: Ends) -> None:
    reader, writer, *_ = ends
    pages = [torch.full((size * PAGE // 4,), float(size)) for size in (10, 6, 1)]
    for _ in range(3):
        with pytest.raises(InputError, match="at most max_bytes=65536"):
            reader.encode(Encoded(pages))
        reader.send(reader.encode(Encoded(pages[:2])))
        first: Any = writer.receive()
        assert all(torch.equal(one, page) for one, page in zip(first.features, pages, strict=False))
        writer.send(writer.encode(Encode([])))
        assert reader.receive() == Encode([])
    with pytest.raises(InputError, match="at most max_bytes=65536"):
        writer.encode(EncoderProgram("a:b", {"x": torch.zeros(17 * PAGE // 4)}))


def resident(memory: SharedMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512


@pytest.mark.parametrize("memory", [80 << 20], indirect=True)
def test_a_peak_gives_its_pages_back(ends: Ends, memory: SharedMemory) -> None:
    reader, writer, *_ = ends
    writer.send(writer.encode(EncoderProgram("a:b", {"x": torch.ones(72 << 18)})))
    assert reader.receive() is not None
    assert resident(memory) >= 72 << 20
    reader.send(reader.encode(Started({})))
    assert writer.receive() == Started({})
    assert resident(memory) <= (64 << 20) + PAGE


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [
        *(object(), 1 << 70, {1.5j: 1}, DEEP, lambda: 1, np.array(["x"], object)),
        *(torch.zeros(3, device="meta"), torch.rand(3).to_sparse(), b"x" * (33 << 20)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_message_takes_is_an_error(ends: Ends, value: object) -> None:
    with pytest.raises(InputError, match="values: expected"):
        ends.writer.encode(EncoderProgram("a:b", {"x": value}))


def program_with(code: int, *value: Any) -> bytes:
    """A message with an extension of MessagePack's in it."""
    extension = msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))
    return msgspec.msgpack.encode(["EncoderProgram", "a", {"x": extension}])


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        msgspec.msgpack.encode(["Started", {"image": 1}]),
        *(program_with(9), program_with(1, "int8", [9], 1), program_with(1, "object", [9], 0)),
        msgspec.msgpack.encode(["Encode", [{"modality": "image", "digest": b"", "inputs": {"x": [1]}}]]),
    ],
)
def test_what_nobody_understands_is_an_error(ends: Ends, memory: SharedMemory, data: bytes) -> None:
    reader, _, _, raw = ends
    memory.view(0, 0, torch.uint8, [len(data)]).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    raw.sendall(struct.pack("<QQ", 0, len(data)))
    with pytest.raises(TransportError, match=r"a message|is not within"):
        reader.receive()


@pytest.mark.parametrize("packet", [b"x", bytes(17), struct.pack("<QQ", 64, 1 << 40), b"\xff" * 16])
def test_a_packet_that_leads_to_no_message_is_an_error(ends: Ends, packet: bytes) -> None:
    ends.there.sendall(packet)
    with pytest.raises(TransportError, match=r"a message|is not within"):
        ends.reader.receive()


def test_the_end_of_the_other_is_seen_though_its_socket_is_open(memory: SharedMemory) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    process, (here, there) = os.pidfd_open(pid), socket.socketpair(type=socket.SOCK_SEQPACKET)
    os.waitpid(pid, 0)
    channel: Channel[FromEncoder] = Channel(here, process, FromEncoder, memory, half=0)
    writer: Channel[ToEncoder] = Channel(there, process, ToEncoder, memory, half=1)
    writer.send(writer.encode(Started({"image": 1})))
    assert channel.receive() == Started({"image": 1}), "its last words"
    assert channel.receive() is None
    channel.close(), writer.close(), os.close(process)


# --- errors that cross between processes, and what must never cross


def across(error: BaseException) -> Exception:
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(error)), type=Failed)
    return from_wire(wire, pid=12)


class OwnError(KeyError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        errors.MediaError("not an image"),
        errors.ConfigError("mode: bad", "debug: bad"),
        errors.MissingExtraError("wrap", "hf"),
        errors.ConnectorError("too slow", "timeout", True),
        errors.EncoderLostError("gone"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("x", 3, 2.5, True),
        KeyError("name"),
        FileNotFoundError(2, "No such file"),
        RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_as_itself(error: Exception) -> None:
    again = across(error)
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert getattr(again, "retryable", None) == getattr(error, "retryable", None)
    assert "In the encoder process 12" in again.__notes__[0]


def test_an_unknown_class_comes_back_as_its_nearest_known_base() -> None:
    again = across(OwnError("name"))
    assert type(again) is KeyError
    assert "OwnError: 'name'" in str(again)


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        ExceptionGroup("several", [ValueError("one")]),
        ValueError(object()),
        ValueError(2**200),
        ValueError("x" * 10**6),
        ValueError("there is no such image: caf\udce9.jpg"),
    ],
    ids=["decode", "group", "object", "large", "long", "surrogate"],
)
def test_what_is_made_from_more_than_words_keeps_them(error: Exception) -> None:
    again = across(error)
    assert str(error)[:20] in str(again)
    assert len(str(again)) < 10**5


def test_only_known_classes_are_made() -> None:
    for kind in ("system", "SystemExit", "KeyboardInterrupt", "Process", "__import__", ""):
        again = from_wire(Failed(kind, ["rm"], ""), pid=1)
        assert type(again) is RuntimeError
    assert all(issubclass(kind, Exception) for kind in KNOWN.values())


ROOT = Path(fxsplit_encoder.connector.__file__).parent
SOURCES = sorted((ROOT / "processes").glob("*.py"))
assert len(SOURCES) == 4
FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "copyreg", "joblib"}
CALLS = {"send_pyobj", "recv_pyobj", "send_serialized", "eval", "exec", "save", "load", "reductions"}
FAMILIES = {"AF_INET", "AF_INET6", "create_connection", "create_server", "bind_to_random_port"}


@pytest.mark.parametrize("source", SOURCES, ids=[f"{path.parent.name}.{path.stem}" for path in SOURCES])
def test_no_wire_has_pickles_or_leads_to_a_network(source: Path) -> None:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    assert names & (FORBIDDEN | CALLS | FAMILIES) == set()
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not any("tcp://" in text or "pgm://" in text for text in texts)
