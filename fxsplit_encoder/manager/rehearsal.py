"""A rehearsal of `capture`: captures to be thrown away, which take the memory of those to come."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from fxsplit_encoder._torch.current_device import on_device
from fxsplit_encoder.capture import BudgetLadder, CapturedForward, GraphPool, SharedBuffers
from fxsplit_encoder.errors import CaptureError

if TYPE_CHECKING:
    from fxsplit_encoder.manager.manager import EncoderCudaGraphManager
    from fxsplit_encoder.manager.path import EncoderPath

logger = logging.getLogger(__name__)


class Rehearsal:
    """Captures every budget of a manager, in every mode that `capture` may try, without compiling and without
    timing anything. For engines that measure the memory of graphs before they give out the rest.

    The tower's own code takes at least the memory of intermediate values that its compiled pieces do. What
    weights take that passes keep in another form (`pad_mlp_width`, `wide_heads`) is not rehearsed. It takes
    more than `capture` keeps where `capture` finds that a budget needs no graph, or drops some for
    `max_graph_bytes`.

    Args:
        manager: whose budgets; it is not captured yet, and stays so.
    """

    def __init__(self, manager: EncoderCudaGraphManager) -> None:
        self._manager = manager
        # On the manager's stream: libraries keep a workspace for every stream for good.
        self._pool = GraphPool(manager.device, stream=manager.pool.stream)
        self._captured: list[CapturedForward] = []

    def capture(self) -> None:
        """Captures, largest budgets first. One that cannot be captured is left out, as `capture` drops it."""
        planned = [each.key for each in self._manager.planned_captures().captures if each.pruned is None]
        ladders = {key: self._ladder(path) for key, path in self._manager.paths_by_key.items()}
        on_its_device = on_device(self._manager.device)
        with self._manager.kernels.choosing(), on_its_device, torch.inference_mode(False), torch.no_grad():
            for key in sorted(planned, key=lambda key: -key.budget):
                try:
                    self._captured += ladders[key.path, key.axis_keys].rehearse(key.budget)
                except (CaptureError, torch.OutOfMemoryError) as error:
                    logger.info("path %s: budget %d is not rehearsed: %s", key.path, key.budget, error)

    def _ladder(self, path: EncoderPath) -> BudgetLadder:
        """One like the path's own, in this memory."""
        shared, agree = SharedBuffers(), path.scope.agree
        return BudgetLadder(
            lambda budget: path.request(budget, shared),
            path.mode,
            self._pool,
            measured=agree is None,
            agree=agree or bool,
        )

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
