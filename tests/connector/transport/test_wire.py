from __future__ import annotations

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
from fxsplit_encoder.connector.transport.wire import Codec, Greeting, Message, Packet, Released
from fxsplit_encoder.errors import TransportError

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
