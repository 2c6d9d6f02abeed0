from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.processes.messages import (
    Encode,
    Encoded,
    Failed,
    FromEncoder,
    Hello,
    Start,
    Started,
    Stop,
    ToEncoder,
    WireError,
    WireFeature,
    WireItem,
)
from fxsplit_encoder.connector.transport import wire
from fxsplit_encoder.connector.transport.layout import Handle, TensorLayout
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.connector.transport.wire import (
    Codec,
    Greeting,
    Message,
    Packet,
    Peer,
    Received,
    Released,
    connected_sockets,
)
from fxsplit_encoder.errors import TransportError
from tests.connector.resources import eventually, nothing_left, num_descriptors

HANDLE = Handle("ab", 3, b"key", 64, (TensorLayout("x", "bfloat16", (2, 3), 64),), {"grid": [1, 2]}, b"sum")
MESSAGES: list[tuple[object, Message]] = [
    (ToEncoder, Start("module:function", {"width": 3, "name": "x"})),
    (ToEncoder, Encode(7, [WireItem("video", b"digest", 12)], HANDLE)),
    (ToEncoder, Stop()),
    (FromEncoder, Hello(12, "0.1", "2.13")),
    (FromEncoder, Started({"image": 32, "video": 64})),
    (FromEncoder, Started({})),
    (FromEncoder, Encoded(7, [WireFeature(0, HANDLE)], is_last=False)),
    (FromEncoder, Failed(7, WireError("ValueError", ["shape", 1], "shape", "Traceback"))),
    (Packet, Greeting("ab", 4096)),
    (Packet, Released("ab", [1, 2, 3])),
]
everything = pytest.mark.parametrize(
    ("kinds", "message"), MESSAGES, ids=[type(message).__name__ for _, message in MESSAGES]
)


@everything
def test_a_message_comes_back_as_it_was(kinds: object, message: Message) -> None:
    codec: Codec[Message] = Codec(kinds)
    assert codec.decode(codec.encode(message)) == message


@everything
def test_a_message_that_is_cut_short_is_an_error(kinds: object, message: Message) -> None:
    codec: Codec[Message] = Codec(kinds)
    data = codec.encode(message)
    for length in range(len(data)):
        with pytest.raises(TransportError):
            codec.decode(data[:length])
    with pytest.raises(TransportError):
        codec.decode(data + b"\0")


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_other_bytes_is_an_error_or_one_of_its_type(
    case: tuple[object, Message], data: st.DataObject
) -> None:
    kinds, message = case
    codec: Codec[Message] = Codec(kinds)
    raw = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(codec.decode(bytes(raw)), Message)
    except TransportError:
        pass


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error(data: bytes) -> None:
    for body in (data, wire._HEAD.pack(b"fxse", wire.VERSION) + data):
        for kinds in (ToEncoder, FromEncoder, Packet):
            codec: Codec[Message] = Codec(kinds)
            try:
                assert codec.encode(codec.decode(body))
            except TransportError:
                pass


def test_a_message_of_another_direction_is_an_error() -> None:
    codec: Codec[Message] = Codec(ToEncoder)
    with pytest.raises(TransportError, match="cannot be read"):
        codec.decode(codec.encode(Hello(1, "", "")))


def test_a_deep_message_is_an_error() -> None:
    codec: Codec[Message] = Codec(ToEncoder)
    head = wire._HEAD.pack(b"fxse", wire.VERSION)
    deep = b"\x93\xa5Start\xa1x\x81\xa1y" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(TransportError):
        codec.decode(head + deep)


def test_another_version_is_said_in_words() -> None:
    data = Codec(ToEncoder, version=wire.VERSION + 1).encode(Stop())
    with pytest.raises(TransportError, match=r"expected version 1 of the protocol; got 2.*same version"):
        Codec(ToEncoder).decode(data)


def test_tensors_do_not_go_into_messages() -> None:
    with pytest.raises(TransportError, match="at most"):
        Codec(ToEncoder).encode(Start("x:y", {"data": bytes(wire.MOST_BYTES)}))


def test_every_message_is_told_by_its_name() -> None:
    tags = [type(message).__struct_config__.tag for _, message in MESSAGES]
    assert tags == [type(message).__name__ for _, message in MESSAGES]
    assert all(isinstance(message, msgspec.Struct) for _, message in MESSAGES)


CODEC: Codec[Packet] = Codec(Packet)
HELLO = CODEC.encode(Greeting("other", 4096))


class Listener:
    """A peer, with what it was told; `other` is the bare socket at the other end."""

    def __init__(self) -> None:
        ours, self.other = connected_sockets()
        self.released: list[int] = []
        self.gone = threading.Event()
        self.peer = Peer(ours, lambda owner, numbers: self.on_released(owner, numbers), self.gone.set)

    def on_released(self, owner: str, numbers: Sequence[int]) -> None:
        assert owner == "own"
        self.released.extend(numbers)

    def greet(self) -> Received:
        self.other.send(HELLO)
        return self.peer.greet(Greeting("own", 4096), [], timeout=60)

    def close(self) -> None:
        self.peer.close()
        self.other.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with nothing_left():
        made = Listener()
        yield made
        made.close()


def test_a_listener_that_fails_tells_that_the_other_end_is_gone(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by an event of a device that is lost: blocks are given back no more, and nobody may wait."""

    def fail(owner: str, numbers: Sequence[int]) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(listener, "on_released", fail)
    listener.greet()
    listener.other.send(CODEC.encode(Released("own", [1])))
    assert listener.gone.wait(60)


def test_nobody_is_told_that_we_hang_up(listener: Listener) -> None:
    listener.greet()
    listener.peer.close()
    listener.peer.close()
    assert not listener.gone.is_set()


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"fxse",
        HELLO,
        CODEC.encode(Released("own", [1]))[:-1],
        wire._HEAD.pack(b"fxse", 9) + b"\x90",
        b"\0" * 9000,
    ],
    ids=["short", "empty", "greeting", "cut", "version", "zeros"],
)
def test_what_nobody_understands_is_a_hang_up(listener: Listener, packet: bytes) -> None:
    listener.greet()
    listener.other.send(packet)
    assert listener.gone.wait(30)
    assert listener.released == []


def test_descriptors_that_nobody_asked_for_are_closed(listener: Listener) -> None:
    listener.greet()
    before = num_descriptors()
    for _ in range(20):
        descriptor = os.open("/dev/null", os.O_RDONLY)
        socket.send_fds(listener.other, [CODEC.encode(Released("own", [1]))], [descriptor])
        os.close(descriptor)
    assert eventually(lambda: len(listener.released) == 20)
    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"", "other process (hung up|does not read)"),
        (b"nonsense", "begins as none"),
        (wire._HEAD.pack(b"fxse", wire.VERSION + 1) + b"\x90", "same version"),
        (CODEC.encode(Released("own", [1])), "expected a greeting"),
        (HELLO, "descriptor"),
    ],
    ids=["none", "nonsense", "version", "released", "no descriptor"],
)
def test_a_first_packet_that_is_no_greeting_is_an_error(packet: bytes, words: str) -> None:
    with nothing_left():
        ours, other = connected_sockets()
        descriptor = os.open("/dev/null", os.O_RDONLY)
        if packet:
            socket.send_fds(other, [packet], [] if words == "descriptor" else [descriptor])
        else:
            other.shutdown(socket.SHUT_RDWR)
        os.close(descriptor)
        transport = SharedMemoryTransport(1 << 16)
        with pytest.raises(TransportError, match=words):
            transport.connect(ours, timeout=60)
        transport.close()
        other.close()


def test_an_end_that_does_not_greet_is_given_up() -> None:
    with nothing_left():
        ours, other = connected_sockets()
        transport = SharedMemoryTransport(1 << 16)
        with pytest.raises(TransportError, match=r"within 0\.01 s"):
            transport.connect(ours, timeout=0.01)
        transport.close()
        other.close()


def test_only_unix_sockets_are_taken() -> None:
    with socket.socket(socket.AF_INET) as network, pytest.raises(TransportError, match="Unix"):
        Peer(network, lambda owner, numbers: None, lambda: None)
