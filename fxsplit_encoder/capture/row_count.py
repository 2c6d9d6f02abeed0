"""The number of real rows, where the masks of a captured forward read it."""

from __future__ import annotations

import torch


class RowCount:
    """A number on the device, and the same number here, so that it is written where it changes alone.

    Captures of one size that never run at the same time may share it.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tensor = torch.full((), rows, dtype=torch.int64, device=device)
        self._rows = rows

    def set(self, rows: int) -> None:
        """Takes effect for what is enqueued on the current stream from now on."""
        if rows != self._rows:
            self.tensor.fill_(rows)
            self._rows = rows
