"""No answer is taken for that to another question."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from fxsplit_encoder.connector.store import FeatureStore, StoreReader
from fxsplit_encoder.connector.store.messages import Answer
from fxsplit_encoder.connector.transport.seam import Handle
from fxsplit_encoder.errors import TransportError


class Interrupted(socket.socket):
    """Whose next answer is not read, as when a key is pressed meanwhile."""

    interrupts = False

    def recv(self, *arguments: Any) -> bytes:
        if self.interrupts:
            raise KeyboardInterrupt
        return super().recv(*arguments)


def test_an_answer_that_was_not_read_is_not_that_to_the_next_question(short_path: Path) -> None:
    store = FeatureStore(short_path / "stores", 1 << 16)
    reader = StoreReader(store.path)
    before = reader._socket
    reader._socket = Interrupted(before.family, before.type, before.proto, before.detach())
    reader._socket.settimeout(5)
    reader._socket.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        reader.find(b"a")
    reader._socket.interrupts = False
    with pytest.raises(TransportError, match="gone"):
        reader.find(b"b")
    reader.close()
    store.close()


def test_an_answer_of_another_key_is_none(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FeatureStore(short_path / "stores", 1 << 16)
    reader = StoreReader(store.path)
    wrong = Answer(Handle(store.owner, 1, b"another", 0, [], {}), 0)
    monkeypatch.setattr(store, "_find", lambda key, connection: wrong)
    with pytest.raises(TransportError, match="another feature"):
        reader.find(b"a")
    assert reader.is_lost
    reader.close()
    store.close()
