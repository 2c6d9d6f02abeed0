"""Image and clip files to the inputs of a tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.preparation import Preparation, Prepared, join

_EXTENSIONS = (".apng", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Item:
    """One image or clip of a batch, or a part of a clip."""

    key: str
    """Its file name; from the second file of that name on, with #2, #3, ... in the order given. The items of
    one clip have [1], [2], ... at the end."""

    width: int
    height: int
    """Of the file, before it was resized."""

    frames: int
    """Frames of a clip; 0: an image."""

    layout: Mapping[str, Any]
    """How it was cut, see `Prepared.layout`."""

    size: str
    """The same in few characters."""

    @property
    def pixels(self) -> str:
        """Its size as people write it."""
        size = f"{self.width}x{self.height}"
        return f"{self.frames}x{size}" if self.frames else size


@dataclass(frozen=True)
class EncoderInputs:
    """A batch: its items, images first, then clips, and their tensors as the model's processor makes them."""

    items: tuple[Item, ...]
    mm_kwargs: dict[str, torch.Tensor]

    def to(self, device: torch.device, dtype: torch.dtype) -> EncoderInputs:
        """The same batch with its pixels on `device`, as `dtype`."""
        moved = {k: v.to(device, dtype) if v.is_floating_point() else v for k, v in self.mm_kwargs.items()}
        return EncoderInputs(self.items, moved)


def load_inputs(paths: Sequence[Path], preparation: Preparation) -> EncoderInputs:
    """Read images and clips, the animated files that Pillow decodes: WebP, GIF, APNG. Every frame counts.

    Raises:
        InputError: a file is missing, is no image, is too elongated, or is a clip for a model without any.
    """
    loaded: dict[bool, list[tuple[Item, Prepared]]] = {False: [], True: []}
    for key, path in zip(unique_keys(paths), paths, strict=True):
        for item, prepared in _load(key, path, preparation):
            loaded[item.frames > 0].append((item, prepared))
    pairs = [*loaded[False], *loaded[True]]
    return EncoderInputs(tuple(item for item, _ in pairs), join(prepared for _, prepared in pairs))


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The image and clip files among `paths`, directories searched one level deep, in order of name.

    Raises:
        InputError: a path does not exist, or a directory holds none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _EXTENSIONS)
        if not inside:
            raise InputError(f"{path}: no image in this directory; expected {', '.join(_EXTENSIONS)}")
        found += inside
    return found


def unique_keys(paths: Sequence[Path]) -> list[str]:
    """The file names; from the second file of a name on, with #2, #3, ... in the order given."""
    keys: dict[str, None] = {}
    for path in paths:
        number = 1
        key = path.name
        while key in keys:
            number += 1
            key = f"{path.name}#{number}"
        keys[key] = None
    return list(keys)


def _load(key: str, path: Path, preparation: Preparation) -> list[tuple[Item, Prepared]]:
    try:
        with Image.open(path) as image:
            if getattr(image, "is_animated", False):
                size, parts = image.size, preparation.clip(image)
            else:
                upright = ImageOps.exif_transpose(image).convert("RGB")
                size, parts = upright.size, [preparation.image(upright)]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: cannot be read as an image: {error}") from None
    keys = [key] if len(parts) == 1 else [f"{key}[{n}]" for n in range(1, len(parts) + 1)]
    return [
        (Item(name, *size, part.frames, part.layout, part.size), part)
        for name, part in zip(keys, parts, strict=True)
    ]
