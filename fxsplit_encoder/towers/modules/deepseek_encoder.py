"""DeepSeek-OCR's vision encoder (arXiv 2510.18234): SAM's features, CLIP over them, and a linear projector.

Module and parameter names are those of the published checkpoint after the prefix `model.`, so that its
tensors load as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.modules.blocks import check_tiles
from fxsplit_encoder.towers.modules.clip_encoder import ClipConfig, ClipEncoder
from fxsplit_encoder.towers.modules.folded import FoldedTables, sides_of
from fxsplit_encoder.towers.modules.sam import SamConfig, SamVisionModel

# SAM's two strided convolutions each halve the grid.
_PATCHES_PER_FEATURE = 4


@dataclass(frozen=True)
class DeepseekOcrConfig:
    """Sizes; by default those of the published checkpoint and of its mode "Gundam".

    The model's other modes are (base_size, image_size) = (512, 512), (640, 640), (1024, 1024), (1280, 1280)
    and (1280, 1024).
    """

    base_size: int = 1024
    """Pixels a side of the view of a whole image."""
    image_size: int = 640
    """Pixels a side of a crop."""
    out_hidden_size: int = 1280
    sam: SamConfig = field(default_factory=SamConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)

    @property
    def pixels_per_feature(self) -> int:
        """Pixels along each side of what becomes one output row."""
        return _PATCHES_PER_FEATURE * self.sam.patch_size


class DeepseekOcrVisionModel(nn.Module):
    """Square tiles to rows in the language model's width.

    The checkpoint's learned rows that stand between them, `image_newline` and `view_seperator` (sic), are
    parameters here too; the adapter that assembles an image inserts them.

    Raises:
        InputError: the sizes do not fit together.
    """

    def __init__(self, config: DeepseekOcrConfig | None = None) -> None:
        super().__init__()
        config = config or DeepseekOcrConfig()
        _check(config)
        sizes = (config.base_size, config.image_size)
        self.config = config
        self.sam_model = SamVisionModel(config.sam, sizes)
        self.vision_model = ClipEncoder(config.clip, sides_of(sizes, config.pixels_per_feature))
        self.projector = _Projector(2 * config.clip.hidden_size, config.out_hidden_size)
        self.image_newline = nn.Parameter(torch.zeros(config.out_hidden_size))
        self.view_seperator = nn.Parameter(torch.zeros(config.out_hidden_size))
        self._tables = FoldedTables(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(tiles, 3, size, size) to (tiles, side * side, out_hidden_size), row by row.

        `size` is the configuration's `base_size` or `image_size`; `side` is 16 for 1024 pixels and 10 for
        640.

        Raises:
            InputError: tiles of another shape.
        """
        check_tiles(pixel_values, (self.config.base_size, self.config.image_size))
        if not torch.compiler.is_compiling():
            self._tables.refresh()
        local = self.sam_model(pixel_values)
        context = self.vision_model(local)
        rows: Tensor = self.projector(torch.cat((context[:, 1:], local.flatten(2).transpose(1, 2)), dim=-1))
        return rows

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the tensors of a published checkpoint; those of the language model are left out.

        Raises:
            InputError: tensors of the encoder are missing.
        """
        expected = self.state_dict().keys()
        found = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        missing = sorted(expected - found.keys())
        if missing:
            raise InputError(
                f"the checkpoint has no {', '.join(missing[:4])} ({len(missing)} tensors missing)"
            )
        self.load_state_dict({name: found[name] for name in expected})


class _Projector(nn.Module):
    def __init__(self, hidden_size: int, out_hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.Linear(hidden_size, out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _check(config: DeepseekOcrConfig) -> None:
    if config.sam.downsample_channels[1] != config.clip.hidden_size:
        raise InputError(
            f"SAM's features have {config.sam.downsample_channels[1]} channels; CLIP takes "
            f"{config.clip.hidden_size}: they must be equal"
        )
    for name, size in (("base_size", config.base_size), ("image_size", config.image_size)):
        if size < 1 or size % config.pixels_per_feature:
            raise InputError(
                f"{name}: expected a positive multiple of {config.pixels_per_feature} pixels; got {size}"
            )
