"""What other threads and processes do is waited for, on however busy a machine."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
