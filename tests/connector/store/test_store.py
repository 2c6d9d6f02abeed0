from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fxsplit_encoder.connector.store import FeatureStore, StoreReader, Stores, stores
from fxsplit_encoder.connector.store.messages import Answer, Find, Introduction, Released
from fxsplit_encoder.connector.store.reader import StoreReader as Reader
from fxsplit_encoder.connector.transport.peer import Greeting
from fxsplit_encoder.connector.transport.wire import Codec
from fxsplit_encoder.errors import InputError, TransportError
from tests.connector.processes.forked import quiet_fork
from tests.connector.resources import eventually, nothing_left

MAX_BYTES = 1 << 16


def rows(value: float, count: int = 10) -> dict[str, torch.Tensor]:
    return {"rows": torch.full((count, 4), value)}


@pytest.fixture
def store(short_path: Path) -> Iterator[FeatureStore]:
    with nothing_left():
        made = FeatureStore(short_path / "stores", MAX_BYTES)
        yield made
        made.close()
        made.close()
    assert list((short_path / "stores").iterdir()) == []


@pytest.fixture
def reader(store: FeatureStore) -> Iterator[StoreReader]:
    made = StoreReader(store.path)
    yield made
    made.close()
    made.close()


def test_a_feature_is_found_by_its_content(store: FeatureStore, reader: StoreReader) -> None:
    assert reader.find(b"a").handle is None
    assert store.put(b"a", rows(1.0), {"grid": (1, 2)})
    handle = reader.find(b"a").handle
    assert handle is not None
    payload = reader.get(handle)
    assert payload.buffers["rows"].sum() == 40
    assert payload.meta == {"grid": (1, 2)}
    assert reader.view(handle).buffers["rows"].shape == (10, 4)
    stats = store.stats()
    assert (stats.num_features, stats.num_held, stats.hits, stats.misses, stats.puts) == (1, 1, 1, 1, 1)


def test_the_same_feature_is_offered_once(store: FeatureStore) -> None:
    assert store.put(b"a", rows(1.0))
    before = store.stats().held_bytes
    assert store.put(b"a", rows(2.0))
    assert b"a" in store
    assert (store.stats().puts, store.stats().held_bytes) == (1, before)


def test_what_a_reader_holds_is_never_given_up(store: FeatureStore, reader: StoreReader) -> None:
    large = rows(1.0, count=1000)  # 16064 bytes: four fit
    for key in (b"a", b"b", b"c", b"d"):
        assert store.put(key, large)
    held = reader.find(b"a").handle
    assert held is not None
    for key in (b"e", b"f", b"g", b"h"):
        assert store.put(key, rows(2.0, count=1000))
    assert (b"a" in store, b"b" in store) == (True, False)
    assert reader.get(held).buffers["rows"].mean() == 1
    others = [reader.find(key).handle for key in (b"f", b"g", b"h")]
    assert None not in others
    evictions = store.stats().evictions
    assert not store.put(b"i", large)
    assert (store.stats().evictions, store.stats().refusals) == (evictions, 1)
    for handle in (held, *others):
        assert handle is not None
        reader.release(handle)
        reader.release(handle)
    assert eventually(lambda: store.stats().num_held == 0)
    assert store.put(b"i", large)
    with pytest.raises(TransportError, match="released"):
        reader.get(held)


def test_what_never_fits_or_cannot_be_handed_over_is_an_error(store: FeatureStore) -> None:
    with pytest.raises(InputError, match="max_bytes"):
        store.put(b"a", rows(1.0, count=10_000))
    with pytest.raises(InputError, match="metadata"):
        store.put(b"a", rows(1.0), {"long": bytes(40_000)})
    assert store.stats().held_bytes == 0


def test_a_reader_that_goes_holds_nothing(store: FeatureStore) -> None:
    store.put(b"a", rows(1.0))
    reader = StoreReader(store.path)
    for _ in range(3):
        reader.find(b"a")
    assert store.stats().num_held == 1
    reader.close()
    assert eventually(lambda: store.stats().num_readers == 0)
    assert store.stats().num_held == 0


def test_readers_of_a_group_that_map_are_counted(store: FeatureStore, short_path: Path) -> None:
    store.put(b"a", rows(1.0))
    directory = store.path.parent
    asking = Stores(directory, "engine", is_mapping=False)
    assert len(asking) == 1
    found = asking.find(b"a")
    assert found is not None
    assert found.num_mapping == 0
    workers = [Stores(directory, "engine", is_watching=True) for _ in range(2)]
    other = Stores(directory, "another")
    found = asking.find(b"a")
    assert found is not None
    assert found.num_mapping == 2
    assert workers[0].get(found.handle).buffers["rows"].sum() == 40
    for each in (asking, *workers, other):
        each.close()


def test_threads_share_a_store_and_a_reader(store: FeatureStore, reader: StoreReader) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(60):
            value = source.randrange(12)
            store.put(bytes([value]), rows(float(value), count=400))
            answer = reader.find(bytes([source.randrange(12)]))
            if answer.handle is None:
                continue
            tensor = reader.get(answer.handle).buffers["rows"]
            if (tensor != tensor[0, 0]).any():
                wrong.append("mixed")
            reader.release(answer.handle)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert eventually(lambda: store.stats().num_held == 0)
    assert store.stats().evictions > 0


# --- ends


def test_a_reader_is_told_that_its_store_is_gone_and_still_reads(short_path: Path) -> None:
    with nothing_left():
        store = FeatureStore(short_path / "stores", MAX_BYTES)
        known = Stores(short_path / "stores")
        store.put(b"a", rows(3.0))
        found = known.find(b"a")
        assert found is not None
        store.close()
        assert known.find(b"a") is None
        known.look()
        assert len(known) == 0
        assert known.get(found.handle).buffers["rows"].sum() == 120
        known.release(found.handle)
        known.close()
        with pytest.raises(TransportError, match="no store"):
            known.get(found.handle)


def fork_until_killed(do: Callable[[int], None]) -> tuple[int, bytes]:
    """A fork that does something, writes a word and then waits; its id, and the word."""
    reading, writing = os.pipe()
    pid = quiet_fork()
    if pid == 0:
        try:
            os.closerange(3, writing)
            do(writing)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    word = os.read(reading, 100)
    os.close(reading)
    return pid, word


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_killed_store_leaves_a_path_that_goes_and_features_that_are_read(short_path: Path) -> None:
    kept: list[FeatureStore] = []

    def offer(writing: int) -> None:
        kept.append(FeatureStore(short_path, MAX_BYTES))
        kept[0].put(b"a", rows(5.0))
        os.write(writing, b"there")

    pid, _ = fork_until_killed(offer)
    with nothing_left():
        known = Stores(short_path)
        found = known.find(b"a")
        assert found is not None
        kill(pid)
        assert eventually(lambda: known.find(b"a") is None)
        assert known.get(found.handle).buffers["rows"].sum() == 200
        known.close()
    Stores(short_path).close()
    assert list(short_path.iterdir()) == []


def test_a_killed_reader_holds_nothing(store: FeatureStore) -> None:
    store.put(b"a", rows(1.0))
    kept: list[StoreReader] = []

    def hold(writing: int) -> None:
        kept.append(StoreReader(store.path))
        kept[0].find(b"a")
        os.write(writing, b"held")

    pid, _ = fork_until_killed(hold)
    assert store.stats().num_held == 1
    kill(pid)
    assert eventually(lambda: store.stats().num_held == 0)


@pytest.mark.parametrize("packet", [b"x", b"fxse\x01\x00\x90", bytes(5000)], ids=["short", "empty", "zeros"])
def test_a_reader_that_nobody_understands_is_dropped(
    store: FeatureStore, reader: StoreReader, packet: bytes
) -> None:
    store.put(b"a", rows(1.0))
    reader._socket.send(packet)
    assert eventually(lambda: store.stats().num_readers == 0)
    with pytest.raises(TransportError):
        reader.find(b"a")
    assert reader.is_lost
    other = StoreReader(store.path)
    assert other.find(b"a").handle is not None
    other.close()


class FalseStore:
    """A socket that answers whatever it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen()

    def answer(self, *packets: bytes) -> None:
        connection, _ = self.listener.accept()
        for packet in packets:
            connection.send(packet)
        time.sleep(0.05)
        connection.close()


CODEC: Codec[Answer] = Codec(Answer | Find | Introduction | Released)


@pytest.mark.parametrize(
    "first", [b"nonsense", Codec(Greeting).encode(Greeting("own", 4096)), CODEC.encode(Find(b"a"))]
)
def test_what_is_no_store_is_refused(short_path: Path, first: bytes) -> None:
    with nothing_left():
        false = FalseStore(short_path / "false.store")
        thread = threading.Thread(target=false.answer, args=(first,))
        thread.start()
        with pytest.raises(TransportError):
            Reader(false.path, timeout=30)
        thread.join()
        thread = threading.Thread(target=false.answer, args=(first,))
        thread.start()
        known = Stores(short_path)
        assert len(known) == 0
        known.close()
        thread.join()
        false.listener.close()


def test_a_store_that_does_not_answer_is_lost(store: FeatureStore) -> None:
    reader = StoreReader(store.path, timeout=0.05)
    with store._lock, pytest.raises(TransportError, match="does not answer"):
        reader.find(b"a")
    assert reader.is_lost
    with pytest.raises(TransportError, match="gone"):
        reader.find(b"a")
    reader.close()


def test_memory_of_a_lost_store_is_unmapped_after_a_while(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_LOST_SECONDS", 0.0)
    with nothing_left():
        store = FeatureStore(short_path, MAX_BYTES)
        known = Stores(short_path)
        store.close()
        known.look()
        time.sleep(0.001)
        known.look()
        assert known._lost == []
        known.close()


def test_a_directory_that_others_may_enter_is_refused(short_path: Path) -> None:
    short_path.chmod(0o755)
    for make in (FeatureStore, Stores):
        with pytest.raises(InputError, match="this user alone"):
            make(short_path, MAX_BYTES)  # type: ignore[arg-type]
    short_path.chmod(0o700)
    with nothing_left(), pytest.raises(InputError, match="shorter path"):
        FeatureStore(short_path / ("x" * 90), MAX_BYTES)
