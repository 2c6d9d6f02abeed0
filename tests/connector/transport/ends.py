"""Two connected ends of a transport in one process."""

from __future__ import annotations

import threading
from typing import Any

from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.connector.transport.wire import connected_sockets


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
