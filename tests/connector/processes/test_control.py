from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fxsplit_encoder.connector.processes.messages import (
    ControlClient,
    ControlServer,
    FromEncoder,
    Hello,
    Started,
    Stop,
    ToEncoder,
)
from fxsplit_encoder.connector.transport.wire import Codec
from fxsplit_encoder.errors import TransportError
from tests.connector.resources import nothing_left

TO: Codec[ToEncoder] = Codec(ToEncoder)
FROM: Codec[FromEncoder] = Codec(FromEncoder)
Ends = tuple[ControlServer[FromEncoder], ControlClient[ToEncoder]]


@pytest.fixture
def ends(short_path: Path) -> Iterator[Ends]:
    with nothing_left():
        server = ControlServer(short_path / "control", FROM)
        client = ControlClient(short_path / "control", b"client", TO)
        server.identity = b"client"
        yield server, client
        client.close()
        server.close()


def test_messages_go_both_ways(ends: Ends) -> None:
    server, client = ends
    client.send(Hello(1, "a", "b"))
    assert server.receive(timeout_ms=60_000) == Hello(1, "a", "b")
    assert server.receive() is None
    assert server.send(TO.encode(Stop()))
    assert client.receive() == Stop()


def test_a_client_that_is_not_there_is_said(ends: Ends) -> None:
    server, _ = ends
    server.identity = b"another"
    assert not server.send(TO.encode(Stop()))


def test_strangers_are_not_heard(ends: Ends, short_path: Path) -> None:
    server, client = ends
    stranger = ControlClient(short_path / "control", b"stranger", TO)
    stranger.send(Started({"image": 1}))
    stranger.socket.send_multipart([b"client", FROM._head])
    assert server.receive(timeout_ms=500) is None
    client.send(Started({}))
    assert server.receive(timeout_ms=60_000) == Started({})
    assert server.num_dropped == 2
    stranger.close()


def test_what_is_no_message_is_an_error(ends: Ends) -> None:
    server, client = ends
    client.socket.send(b"nonsense")
    with pytest.raises(TransportError):
        server.receive(timeout_ms=60_000)
