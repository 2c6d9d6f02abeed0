"""One tower twice, eager and through the manager: outputs, how far apart they are, and on a GPU times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.capture import measure_ms
from fxsplit_encoder.models.eager import EagerTower, max_error, rms_error
from fxsplit_encoder.planning import Plan

FLOAT32_TOLERANCE = 1e-4
"""The largest difference of a value from eager's, in float32."""

ERROR_RATIO_TOLERANCE = 1.1
"""In shorter dtypes: the largest error against float32, as a multiple of eager's own."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of one batch."""

    plan: Plan
    times: tuple[float, float] | None
    """Milliseconds of eager and of ours; None: on a CPU, where they would say nothing."""

    difference: float
    """The largest, against eager in the same dtype."""

    error_ratio: float | None
    """Root mean square error against float32 as a multiple of eager's own; None: the dtype is float32."""

    @property
    def problem(self) -> str | None:
        """What is out of tolerance; None: nothing is."""
        if self.error_ratio is None:
            if self.difference <= FLOAT32_TOLERANCE:
                return None
            return f"differs from eager by {self.difference:.1e}; allowed: {FLOAT32_TOLERANCE:.0e}"
        if self.error_ratio <= ERROR_RATIO_TOLERANCE:
            return None
        return f"has {self.error_ratio:.2f} times eager's error; allowed: {ERROR_RATIO_TOLERANCE} times"


class Comparer:
    """Encodes batches both ways.

    Args:
        manager: over the wrapped tower.
        eager: the same tower, not wrapped.
        reference: the same tower in float32; None: `eager` is in float32 itself.
    """

    def __init__(
        self, manager: fx.EncoderCudaGraphManager, eager: EagerTower, reference: EagerTower | None
    ) -> None:
        self.manager = manager
        self.eager = eager
        self.reference = reference
        self.device: torch.device = manager.device

    def compare(self, mm_kwargs: dict[str, Any]) -> Comparison:
        """Encode a batch both ways, and take times on a GPU."""
        expected, ours = self.eager(mm_kwargs), self.manager.execute(mm_kwargs)
        times = None
        if self.device.type == "cuda":
            times = (
                measure_ms(lambda: self.eager(mm_kwargs), self.device),
                measure_ms(lambda: self.manager.execute(mm_kwargs), self.device),
            )
        return Comparison(
            self.manager.plan(mm_kwargs),
            times,
            max_error(ours, expected),
            None if self.reference is None else error_ratio(ours, expected, self.reference(mm_kwargs)),
        )


def error_ratio(ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Our root mean square error as a multiple of eager's own."""
    return rms_error(ours, exact) / rms_error(eager, exact)
