"""A rehearsal of `capture`: captures to be thrown away, which take the memory of those to come."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from fxsplit_encoder.attention import choosing
from fxsplit_encoder.capture import CapturedForward, GraphPool, SharedBuffers
from fxsplit_encoder.errors import CaptureError

if TYPE_CHECKING:
    from fxsplit_encoder.manager.manager import EncoderCudaGraphManager

logger = logging.getLogger(__name__)


class Rehearsal:
    """Captures every budget of a manager, in every mode that `capture` would try, without compiling and
    without timing anything. For engines that measure the memory of graphs before they give out the rest.

    The tower's own code takes at least the memory of intermediate values that its compiled pieces do. What
    weights take that passes keep in another form (`pad_mlp_width`) is not rehearsed.

    Args:
        manager: whose budgets; it is not captured yet, and stays so.
    """

    def __init__(self, manager: EncoderCudaGraphManager) -> None:
        self._manager = manager
        self._pool = GraphPool(manager.device)
        self._captured: list[CapturedForward] = []

    def capture(self) -> None:
        """Captures, largest budgets first. One that cannot be captured is left out, as `capture` drops it."""
        planned = [each.key for each in self._manager.planned_captures().captures if each.pruned is None]
        shared: dict[object, SharedBuffers] = {}
        with choosing(self._manager.kernels), torch.inference_mode(False), torch.no_grad():
            for key in sorted(planned, key=lambda key: -key.budget):
                path = self._manager.paths_by_key[key.path, key.axis_keys]
                try:
                    request = path.forward.request(key.budget, shared.setdefault(path, SharedBuffers()))
                    modes = request.modes if path.mode == "auto" else request.modes[:1]
                    for mode in modes:
                        captured = CapturedForward(request, mode, self._pool)
                        captured.record()
                        self._captured.append(captured)
                except (CaptureError, torch.OutOfMemoryError) as error:
                    logger.info("%s: budget %d is not rehearsed: %s", path.label, key.budget, error)

    @property
    def num_captures(self) -> int:
        """Captures that are held now."""
        return len(self._captured)

    def clear(self) -> None:
        """Gives the memory back to the device."""
        for captured in self._captured:
            captured.release()
        self._captured.clear()
        self._pool.retire()
