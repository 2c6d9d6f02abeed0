"""All stores of a directory, as one reader sees them."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import NamedTuple

from fxsplit_encoder.connector.store.reader import StoreReader
from fxsplit_encoder.connector.store.store import SUFFIX
from fxsplit_encoder.connector.transport.private_directory import private_directory
from fxsplit_encoder.connector.transport.seam import Handle, Payload
from fxsplit_encoder.errors import TransportError

_LOOK_SECONDS = 0.05
"""How often the directory is looked at, at most."""

_LOST_SECONDS = 60.0
"""How long the memory of a store that is gone stays mapped, for what was found in it."""


class Found(NamedTuple):
    """A feature that a store has; it is held."""

    handle: Handle
    num_mapping: int
    """Readers of this one's group that have mapped it."""


class Stores:
    """Connections to every store in a directory, old and new. Threads may share them.

    Args:
        directory: in which the stores have their sockets; made if it is not there.
        group: readers of one engine have one name.
        is_mapping: whether this one reads itself, rather than for others of its group.
        is_watching: whether a thread maps new stores as they come; else they are when something is asked.

    Raises:
        InputError: the directory is not this user's alone.
    """

    def __init__(
        self, directory: Path, group: str = "", *, is_mapping: bool = True, is_watching: bool = False
    ) -> None:
        self._directory = private_directory(directory, "directory")
        self._group = group
        self._is_mapping = is_mapping
        self._readers: dict[Path, StoreReader] = {}
        self._lost: list[tuple[float, StoreReader]] = []
        self._looked = float("-inf")
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.look()
        if is_watching:
            self._thread = threading.Thread(target=self._watch, name="fxsplit-stores", daemon=True)
            self._thread.start()

    def __len__(self) -> int:
        return len(self._readers)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Connect to stores that are new, and leave those that are gone."""
        with self._lock:
            if self._ended.is_set():
                return
            now = time.monotonic()
            self._looked = now
            for path in [path for path, reader in self._readers.items() if reader.is_lost]:
                self._lost.append((now, self._readers.pop(path)))
            while self._lost and now - self._lost[0][0] > _LOST_SECONDS:
                self._lost.pop(0)[1].close()
            with contextlib.suppress(FileNotFoundError):
                for path in sorted(self._directory.glob(f"*{SUFFIX}")):
                    if path not in self._readers:
                        self._connect(path)

    def _connect(self, path: Path) -> None:
        try:
            self._readers[path] = StoreReader(path, self._group, is_mapping=self._is_mapping)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # its process was killed
        except TransportError:
            pass  # it is just ending, or of another version, which is none of ours

    def find(self, key: bytes) -> Found | None:
        """A feature of the first store that has it; it is held until it is released."""
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self.look()
        for reader in list(self._readers.values()):
            try:
                answer = reader.find(key)
            except TransportError:
                continue  # it is gone: the next look leaves it
            if answer.handle is not None:
                return Found(answer.handle, answer.num_mapping)
        return None

    def view(self, handle: Handle) -> Payload:
        """A feature's tensors where they lie: valid until it is released, and to be written by nobody.

        Raises:
            TransportError: no store that this one knows holds it.
        """
        return self._reader_of(handle).view(handle)

    def get(self, handle: Handle) -> Payload:
        """Copies of a feature's tensors; see `view`."""
        return self._reader_of(handle).get(handle)

    def release(self, handle: Handle) -> None:
        """Give up one hold of a feature; where its store is gone, nothing."""
        with contextlib.suppress(TransportError):
            self._reader_of(handle).release(handle)

    def _reader_of(self, handle: Handle) -> StoreReader:
        for _ in range(2):
            known = [*self._readers.values(), *(reader for _, reader in self._lost)]
            for reader in known:
                if reader.owner == handle.owner:
                    return reader
            self.look()
        raise TransportError(f"no store {handle.owner} in {self._directory}")

    def close(self) -> None:
        """Hang up everywhere; idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for reader in (*self._readers.values(), *(reader for _, reader in self._lost)):
                reader.close()
            self._readers.clear()
            self._lost.clear()
