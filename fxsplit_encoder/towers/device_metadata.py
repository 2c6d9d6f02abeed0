"""Host metadata of batches that came lately, kept on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxsplit_encoder.compile import to_device
from fxsplit_encoder.towers import grid as grids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from fxsplit_encoder.towers.grid import Grid

# So many batches of at most so many patches, 48 bytes each in Qwen3-VL: 12 MiB in all.
_KEPT_BATCHES = 64
_KEPT_PATCHES = 4096


class DeviceMetadata:
    """The per-patch metadata of batches, by their grids, so that a replay need not bring it to the device
    again. The least recently used batch makes room for another.

    An order of rows that comes from here is not checked by the capture that takes it: it is what the tower
    computed on the host.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Grid, ...], dict[str, Tensor]] = {}

    def of(
        self,
        grids: tuple[Grid, ...],
        compute: Callable[[Sequence[Grid]], dict[str, Tensor]],
        device: torch.device,
    ) -> dict[str, Tensor]:
        """The metadata of a batch: on the device if the batch is small, else as `compute` gives it."""
        if grids_of.count_patches(grids) > _KEPT_PATCHES:
            return compute(grids)
        kept = self._kept.pop(grids, None)
        if kept is None or any(value.device != device for value in kept.values()):
            kept = {name: to_device(value, device) for name, value in compute(grids).items()}
            if len(self._kept) >= _KEPT_BATCHES:
                self._kept.pop(next(iter(self._kept)))
        self._kept[grids] = kept
        return kept
