"""Work on a device that does nothing for a while, so that what is launched behind it begins together."""

from __future__ import annotations

import torch

# Cycles of a microsecond; GPUs that run slower wait longer.
_CYCLES = 2000

# Longer is not waited for: the host is taken to be at something else.
_LONGEST_S = 0.02


def wait_on_device(seconds: float) -> None:
    """Enqueues a kernel on the current stream that runs about so long, 20 ms at most."""
    torch.cuda._sleep(int(min(seconds, _LONGEST_S) * 1e6 * _CYCLES))  # type: ignore[no-untyped-call]
