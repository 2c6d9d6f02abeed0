"""Host metadata of recent batches, kept where replays read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import mark_immutable, to_device
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid

# At most this many patches are kept in all, 48 bytes each in Qwen3-VL: 12 MiB; of a single batch a sixteenth.
_KEPT_PATCHES = 1 << 18
_MOST_PATCHES = _KEPT_PATCHES // 16


class DeviceMetadata:
    """The metadata of batches, by their grids, so that neither is it computed again nor its per-patch part
    copied to the device again. The least recently used batch is dropped for another.

    What comes from here is immutable. A permutation of rows on a device is not checked by the capture
    that takes it: it is what the tower computed on the host.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, tuple[Grid, ...]], dict[str, Tensor]] = {}
        self._patches = 0

    def of(
        self,
        grids: tuple[Grid, ...],
        device: torch.device,
        per_patch: Callable[[Sequence[Grid]], dict[str, Tensor]],
        lengths: Callable[[Sequence[Grid]], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """All metadata of a batch; that of a large batch is not kept, and lies on the CPU.

        Args:
            per_patch: computes the metadata of every patch, on the CPU.
            lengths: computes the cumulative lengths of segments, which stay there: the host must know them.
        """
        kept = self._kept.pop((device, grids), None)
        if kept is None:
            patches = grids_of.count_patches(grids)
            if patches > _MOST_PATCHES:
                return {**per_patch(grids), **lengths(grids)}
            with torch.inference_mode(False):  # others may need these tensors outside it
                moved = {name: to_device(value, device) for name, value in per_patch(grids).items()}
                kept = {name: mark_immutable(value) for name, value in {**moved, **lengths(grids)}.items()}
            self._patches += patches
            while self._patches > _KEPT_PATCHES:
                oldest = next(iter(self._kept))
                self._patches -= grids_of.count_patches(oldest[1])
                del self._kept[oldest]
        self._kept[device, grids] = kept
        return kept
